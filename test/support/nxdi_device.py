"""A loaded application of NxD Inference whose graphs XLA's CPU compiler has compiled, as a Neuron device would run it.

Each bucket's graph is traced as for a device, with its own alias map, and compiled once. A call goes through NxD's own
device model, which finds the graph by the shapes of all inputs. The state tensors exist once, for all graphs. A graph's
aliased outputs become the new state and are not returned. What is not real: the compiler, the loading of weights, and
that all ranks are one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from granite4_neuron.config import MAMBA
from test.support import nxdi

Memory = dict[str, torch.Tensor]


@dataclass
class Device:
    """A device with a loaded application.

    memory: the state tensors by name, which the graphs replace.
    graphs: the kind and the bucket's index of each graph.
    launches: those that have run.
    """

    application: object
    memory: Memory = field(default_factory=dict)
    graphs: set[tuple[str, int]] = field(default_factory=set)
    launches: set[tuple[str, int]] = field(default_factory=set)

    def poison(self, lengths: Mapping[int, int]) -> None:
        """Fill unused recurrent state with NaN. Fill caches behind the ends of sequences with large finite numbers,
        because they are read with the weight 0.

        Args:
            lengths: of sequences, by slot from 0 on.
        """
        layer_types = self.application.config.granite.layer_types
        for name, tensor in self.memory.items():
            filled = tensor.cpu()
            for slot in range(len(filled)):
                length = lengths.get(slot, 0)
                if layer_types[int(name.rpartition(".")[2]) // 2] != MAMBA:
                    filled[slot, :, length:] = 1e3
                elif not length:
                    filled[slot] = math.nan
            self.memory[name] = filled.to("xla")


def device_model(folder: Path, **options) -> Device:
    """Load a checkpoint on the device that XLA's CPU compiler stands in for, and warm it up."""
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM
    from granite4_neuron.devices.neuron.nxdi.trace import trace

    values = dict(on_cpu=False, enable_bucketing=True, logical_nc_config=1, attn_kernel_enabled=False)
    application = NeuronGraniteMoeHybridForCausalLM(str(folder), nxdi.make_config(folder, **{**values, **options}))
    device, weights = Device(application), _weights(application)
    compiled: dict[str, list[_Graph]] = {}
    keys: dict[str, tuple[str, int]] = {}
    for wrapper in application.models:
        for index, bucket in enumerate(wrapper.neuron_config.buckets):
            place = wrapper.tag, index
            graph = _Graph(trace(application, wrapper, bucket), weights, device, place)
            compiled.setdefault(wrapper.tag, []).append(graph)
            # As NxD's ModelBuilder does it: of two graphs with the same key it would keep one.
            key = str([list(tensor.shape) for tensor in wrapper.input_generator()[index]])
            assert key not in keys, f"{keys[key]} and {place} have the same inputs {key}"
            keys[key] = place
    device.graphs = set(keys.values())
    model = _loaded_model(compiled, keys)
    for wrapper in application.models:
        wrapper.model = model
    application.is_loaded_to_neuron = True
    application.warmup()
    assert device.launches == device.graphs
    return device


def _weights(application) -> dict[str, torch.Tensor]:
    """Return the weights as NxD prepares them for a rank, on XLA's device."""
    from neuronx_distributed.trace.trace import preprocess_checkpoint

    weights = application.checkpoint_loader_fn()
    instance = application.models[0].get_model_instance()
    with nxdi.simulated_ranks(1):
        instance.load_module()
        preprocess_checkpoint(instance.module, weights)
    return {name: tensor.to("xla") for name, tensor in weights.items()}


class _Graph:
    """One compiled graph, with the methods of NxD's SPMDModel."""

    def __init__(self, traced, weights: Mapping[str, torch.Tensor], device: Device, place: tuple[str, int]):
        import torch_xla

        self._xla = torch_xla._XLAC
        self._device, self._place = device, place
        names = {id(tensor): name for name, tensor in traced.parameters.items()}
        self._states = {output: names[id(state)] for state, output in zip(traced.states, traced.aliases, strict=True)}
        self._dtypes = [tensor.dtype for tensor in traced.inputs]
        self._hash = self._xla._get_graph_hash(traced.outputs)
        self._xla._xla_warm_up_cache(traced.outputs, [])
        known = {self._xla._xla_get_tensor_id(tensor): number for number, tensor in enumerate(traced.inputs)}
        for name, parameter in traced.parameters.items():
            number = self._xla._xla_get_tensor_id(parameter)
            if "past_key_values" in name:
                known[number] = name
                device.memory.setdefault(name, torch.zeros(parameter.shape, dtype=parameter.dtype).to("xla"))
            else:
                assert (weights[name].shape, weights[name].dtype) == (parameter.shape, parameter.dtype)
                known[number] = weights[name]
        # For each parameter of the graph: the number of an input, the name of a state tensor, or a constant value.
        data = zip(*self._xla._get_tensors_xla_device_data_node(traced.outputs), strict=True)
        self._sources = [known.get(number, constant) for number, constant in data]

    def is_initialized(self) -> bool:
        return True

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [result.cpu() for result in self._run(inputs)]

    def forward_ranked(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [self._run(each) for each in inputs]

    def _run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert [tensor.dtype for tensor in inputs] == self._dtypes
        inputs, memory = [tensor.to("xla") for tensor in inputs], self._device.memory
        arguments = []
        for source in self._sources:
            if isinstance(source, int):
                arguments.append(inputs[source])
            else:
                arguments.append(memory[source] if isinstance(source, str) else source)
        outputs = self._xla._run_cached_graph(self._hash, arguments)
        memory.update((name, outputs[output]) for output, name in self._states.items())
        self._device.launches.add(self._place)
        return [output for number, output in enumerate(outputs) if number not in self._states]


def _loaded_model(graphs: Mapping[str, Sequence[_Graph]], keys: Mapping[str, tuple[str, int]]) -> nn.Module:
    """Return NxD's device model over these graphs. To NxD Inference it is a loaded TorchScript module."""
    from neuronx_distributed.trace.spmd import NxDModel, NxDModelExecutor, SPMDBucketModelScript

    class Model(NxDModel):
        def router(self, inputs: Sequence[torch.Tensor]) -> tuple[str, int]:
            # In TorchScript a shape is a list.
            return super().router([SimpleNamespace(shape=list(tensor.shape)) for tensor in inputs])

    class Loaded(NxDModelExecutor):
        @property
        def __class__(self):
            return torch.jit.ScriptModule

    buckets = {tag: SPMDBucketModelScript(list(of_tag)) for tag, of_tag in graphs.items()}
    names = [f"{tag}_{index}" for tag, of_tag in graphs.items() for index in range(len(of_tag))]
    return Loaded(
        Model(
            models=nn.ModuleDict(buckets),
            flattener_map=nn.ModuleDict((name, nn.Identity()) for name in names),
            input_shape_map=dict(keys),
            packer=lambda results: results[0] if len(results) == 1 else results,
            state_initializer=None,
            weight_loader=None,
        )
    )
