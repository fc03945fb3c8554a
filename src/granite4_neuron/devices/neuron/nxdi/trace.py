"""The graphs that a device gets, traced on any machine through NxD Inference's own device code path, as one rank.

Nothing runs and no weight exists: parameters and inputs are placeholders of torch_xla, and the process group is a mock.
Operators of the Neuron SDK without public source are traced as custom calls under the SDK's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trace.mock_torchdist import mock_distributed
from neuronx_distributed.utils.model_utils import init_on_device
from neuronx_distributed_inference.models.model_wrapper import ModelWrapper
from neuronx_distributed_inference.utils.compile_env import set_compile_env_vars
from torch_xla.core.xla_builder import create_placeholder_tensor

from granite4_neuron.devices.neuron.nxdi import sdk_custom_calls
from granite4_neuron.devices.neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM
from granite4_neuron.devices.neuron.nxdi.state import NeuronStep
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.state.hybrid_state import MambaState

# Modules of the traced model that are counted separately: the mixers and the feed-forward parts of each layer, and
# modules that exist once.
_COMPONENTS = re.compile(r"layers\.\d+\.(mamba|self_attn|block_sparse_moe|shared_mlp)|embed_tokens|lm_head|sampler")


@dataclass(repr=False)  # placeholders have no values to show
class Trace:
    """One graph of one rank.

    outputs: results, then the new value of each state tensor.
    states: the state tensors before the step, which the compiler gets as aliases.
    aliases: for each of `states`, the index of its new value in `outputs`, as the compiler gets it.
    inputs: of a step.
    parameters: weights and state tensors by their names in the traced model.
    components: the outputs of a module when it is traced alone, by its name.
    """

    outputs: list[torch.Tensor]
    states: list[torch.Tensor]
    aliases: list[int]
    inputs: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]
    components: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all parameters except the state."""
        return sum(tensor.nbytes for name, tensor in self.parameters.items() if "past_key_values" not in name)

    @property
    def results(self) -> list[torch.Tensor]:
        return self.outputs[: len(self.outputs) - len(self.states)]


def trace(
    application: NeuronGraniteMoeHybridForCausalLM, wrapper: ModelWrapper, bucket: int, with_components: bool = False
) -> Trace:
    """Trace one of an application's graphs.

    Args:
        application: made with a config that is not on_cpu.
        wrapper: the kind of graph, one of application.models.
        bucket: one of wrapper.neuron_config.buckets.
        with_components: also trace the graph's modules alone.
    """
    set_compile_env_vars(application.neuron_config)
    with _one_rank(application.neuron_config), sdk_custom_calls.as_custom_calls():
        instance = wrapper.get_model_instance()
        with init_on_device(torch.device("meta"), force_custom_init_on_device=True):
            instance.load_module()
        _use_placeholders(instance.module)
        index = wrapper.neuron_config.buckets.index(bucket)
        module, aliases = instance.get(index)
        inputs = [_placeholder(tensor) for tensor in wrapper.input_generator()[index]]
        with _calls_of_components(module) as calls, torch.no_grad(), torch.device("xla"):
            outputs = list(module(*inputs))
        traced = Trace(outputs, list(aliases), list(aliases.values()), inputs, dict(module.named_parameters()))
        if with_components:
            with torch.no_grad(), torch.device("xla"):
                for name, (component, arguments, options) in calls.items():
                    traced.components[name] = _outputs_of_component(component, arguments, options)
        return traced


@contextmanager
def _one_rank(neuron_config: Any) -> Iterator[None]:
    """Within the context, set the parallel state in this one process as on rank 0 of the config's ranks."""
    degree, before = neuron_config.tp_degree, dict(vars(parallel_state))
    try:
        with mock_distributed(degree):
            torch.distributed.init_process_group(backend="xla", rank=0, world_size=degree)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=degree, skip_collective_init=True, lnc_size=neuron_config.logical_nc_config
            )
            parallel_state.set_aot_mode(True)
            _forget_token()
            yield
    finally:
        vars(parallel_state).update(before)


def _forget_token() -> None:
    """Forget torch_xla's token, which orders collectives and would tie a graph to the previously traced one."""
    torch_xla._XLAC._set_all_reduce_token(xm._get_device_context().device, None)


def _use_placeholders(module: torch.nn.Module) -> None:
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = torch.nn.Parameter(_placeholder(parameter), requires_grad=False)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = _placeholder(buffer)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    return create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)


Call = tuple[torch.nn.Module, tuple, dict]


@contextmanager
def _calls_of_components(module: torch.nn.Module) -> Iterator[dict[str, Call]]:
    """Return the arguments that each component was called with, by its name."""
    calls: dict[str, Call] = {}
    handles = [
        child.register_forward_pre_hook(
            lambda child, arguments, options, name=name: calls.setdefault(name, (child, arguments, options)) and None,
            with_kwargs=True,
        )
        for name, child in module.named_modules()
        if _COMPONENTS.fullmatch(name)
    ]
    yield calls
    for handle in handles:
        handle.remove()


def _outputs_of_component(component: torch.nn.Module, arguments: tuple, options: dict) -> list[torch.Tensor]:
    _forget_token()
    fresh = _Fresh()
    result = component(*fresh(arguments), **fresh(options))
    if isinstance(component, Mamba2):
        result, _ = result  # the layer around it keeps the inputs of `advance`
    return list(_tensors([result, fresh.states]))


class _Fresh:
    """Maps a module's arguments to placeholders, the same for the same tensor."""

    def __init__(self) -> None:
        self.states: list[MambaState] = []
        self._placeholders: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._placeholders.setdefault(id(value), _placeholder(value))
        if isinstance(value, (tuple, list)):
            return type(value)(self(item) for item in value)
        if isinstance(value, dict):
            return {key: self(item) for key, item in value.items()}
        if isinstance(value, MambaState):
            self.states.append(MambaState(*self(list(vars(value).values()))))
            return self.states[-1]
        if isinstance(value, NeuronStep):
            index = self(value.positions), self(value.lengths), self(value.slots), value.kv_length
            return NeuronStep(*index, self(value.sequences), verifies=value.verifies, has_begun=value.has_begun)
        return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, MambaState):
        yield from vars(value).values()
    elif isinstance(value, (tuple, list)) or hasattr(value, "__iter__"):
        for item in value:
            yield from _tensors(item)
