"""Lowers graphs of torch.compile to StableHLO as TorchNeuron does: AOTAutograd keeps writes to inputs, torch-mlir
lowers.

Source: the decomposition table and the passes of TorchNeuron's public beta (a snapshot of April 2026); TorchNeuron
itself is not used, and the source of SDK 2.33 is not public. Its table makes a scatter of single elements of an
`index_put`, with an index of 64 bits for each, so the graphs have none.

torch-mlir widens the indices of an embedding to int64, one for each row; those of `index_select` stay int32. A slice
before an index (`state[:, rows]`) becomes an index for each element, so the graphs have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd

from granite4_neuron.devices.neuron.sdk import why_not_lowered
from granite4_neuron.planning.analysis.collective_lowering import lower_collectives
from granite4_neuron.planning.analysis.hlo_cost import ToolsMissing

aten = torch.ops.aten

# TorchNeuron's decompositions that the model's operators could meet. That of a split is a strided view, of which
# TorchNeuron makes a gather with an index of 64 bits for each element, and so does torch-mlir: graphs have slices.
_DECOMPOSED = (
    aten.split,
    aten.split_with_sizes,
    aten.unbind,
    aten.embedding,
    aten.index_add,
    aten._unsafe_index,
    aten._unsafe_index_put,
    aten.silu,
    aten.clamp_min,
    aten.clamp_max,
    aten.logsumexp,
    aten.lerp,
)

_TO_TORCH_BACKEND = "builtin.module(torchdynamo-export-to-torch-backend-pipeline)"
# Folds torch-mlir's lowering of arange, which is arithmetic in float64 and an iota of a computed length.
_SIMPLIFICATION = "builtin.module(func.func(stablehlo-aggressive-simplification))"

Compile = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Sequence[torch.Tensor]]]


def aot_backend(compile: Compile) -> Callable[..., Any]:
    """Return a backend of torch.compile.

    Args:
        compile: returns a function that computes what a graph of ATen operators does. Each input that the graph writes
            ends in a `copy_` to its placeholder.
    """

    def compile_boxed(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        return make_boxed_func(compile(graph, inputs))

    return aot_autograd(
        fw_compiler=compile_boxed,
        inference_compiler=compile_boxed,
        decompositions={**get_decompositions(_DECOMPOSED), aten.index_put.default: _index_put},
        keep_inference_input_mutations=True,
    )


def _index_put(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Return `aten.index_put` as TorchNeuron computes it. Indexed axes must be side by side, as in all our graphs."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    assert axes == list(range(axes[0], axes[-1] + 1)) and not accumulate
    given = torch.broadcast_tensors(*(index for index in indices if index is not None))
    block = given[0].shape
    shape = (*tensor.shape[: axes[0]], *block, *tensor.shape[axes[-1] + 1 :])
    places = torch.zeros(shape, dtype=torch.int64, device=tensor.device)
    for axis, size in enumerate(tensor.shape):
        if axis in axes:
            index = given[axis - axes[0]]
            at, last = index.where(index >= 0, index + size).to(torch.int64), axes[-1]
        else:
            at, last = torch.arange(size, device=tensor.device), axis
        behind = tensor.dim() - 1 - last + (len(block) - len(axes) if last < axes[0] else 0)
        places = places + at.view(*at.shape, *[1] * behind) * math.prod(tensor.shape[axis + 1 :])
    flat = tensor.flatten().scatter(0, places.flatten(), values.to(tensor.dtype).expand(shape).flatten())
    return flat.view(tensor.shape)


def written_inputs(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of `graph` that copy a value to an input."""
    calls = graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return [node for node in calls if node.args[0].op == "placeholder"]


def check_installed() -> None:
    """Check that the tools of `lower` and `hlo_proto_of` are installed; raise ToolsMissing if one is not installed."""
    if (reason := why_not_lowered()) is not None:
        raise ToolsMissing(reason)


@dataclass(frozen=True)
class Lowered:
    """A graph in StableHLO.

    text: of the module; its function `main` has the graph's inputs. Results are the new values of the inputs that the
        graph writes, then the graph's outputs.
    donated: the number of the result that takes the memory of an input, by the input's number.
    """

    text: str
    donated: Mapping[int, int]


def lower(graph: fx.GraphModule, tp_degree: int = 1) -> Lowered:
    """Lower a graph of `aot_backend` with torch-mlir.

    Args:
        tp_degree: number of ranks; each collective is among all of them.
    """
    from torch_mlir.compiler_utils import OutputType, lower_mlir_module, run_pipeline_with_repro_report
    from torch_mlir.fx import stateless_fx_import
    from torch_mlir.passmanager import PassManager

    graph = deepcopy(graph)
    inputs, writes = graph.graph.find_nodes(op="placeholder"), written_inputs(graph)
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ((*(write.args[1] for write in writes), *output.args[0]),)
    donated = {inputs.index(write.args[0]): number for number, write in enumerate(writes)}
    for write in writes:
        graph.graph.erase_node(write)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            # Torch-mlir would take another device for a copy between devices.
            node.update_kwarg("device", torch.device("cpu"))
    module = stateless_fx_import(graph, output_type="raw")
    lower_collectives(module, tp_degree)
    run_pipeline_with_repro_report(module, _TO_TORCH_BACKEND, "lowering to operators of torch")
    lower_mlir_module(False, OutputType.STABLEHLO, module)
    with module.context:
        PassManager.parse(_SIMPLIFICATION).run(module.operation)
    return Lowered(str(module).replace("arith.constant", "stablehlo.constant"), donated)


def hlo_proto_of(stablehlo: str) -> bytes:
    """Return a module in StableHLO as a serialised HLO module, with jax."""
    from jaxlib import _jax

    computation = _jax.mlir.mlir_module_to_xla_computation(stablehlo, use_tuple_args=False, return_tuple=True)
    return computation.as_serialized_hlo_module_proto()
