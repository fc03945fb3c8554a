"""The graphs of the runtime for PyTorch devices, for `graphs.report`: traced on the meta device, and lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from granite4_neuron.devices.graphs.operators import INPUT_FIRST, write_cache_as
from granite4_neuron.devices.graphs.runtime import decode_inputs, graph_inputs, in_slot_order
from granite4_neuron.devices.selection import select_operators
from granite4_neuron.devices.torch.devices import compile_apart
from granite4_neuron.devices.torch.options import kv_write_of
from granite4_neuron.devices.torch.step_functions import GraphKey, call_inline, run_advance, run_step, state_tensors
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.planning.analysis.graphs import COMMIT, DECODE, PREFILL, VERIFY, Graph, Traced
from granite4_neuron.planning.analysis.torch_lowering import Lowered, aot_backend, check_installed, hlo_proto_of, lower
from granite4_neuron.runtime.interface import Row

_GROUP = "ranks"


def trace_torch(graph: Graph) -> Traced:
    """Trace a graph of `devices.torch.runtime.TorchRuntime`, of all layers.

    Raises:
        ToolsMissing: torch-mlir or jax is not installed.
    """
    lowered = lower_torch(graph)
    return Traced(
        hlo_proto_of(lowered.text),
        donated=lowered.donated,
        components={},
        weight_bytes=sum(weight.nbytes for weight in _bound(graph).parameters()),
        state_bytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in graph.meta_state().tensors()),
        widens_places=True,
        keeps_layouts=True,
    )


def _bound(graph: Graph, rank: int = 0) -> HybridForCausalLM:
    """Return a rank's model as `TorchRuntime` computes with it."""
    model = graph.meta_model(rank, _GROUP if graph.tp_degree > 1 else None)
    operators = select_operators(INPUT_FIRST, graph.config, graph.tp_degree, experts_decode=graph.experts_decode)
    return model.bind(replace(operators, write_cache=write_cache_as(kv_write_of(None, "neuron"))))


def lower_torch(graph: Graph, rank: int = 0) -> Lowered:
    """Lower a graph of `devices.torch.runtime.TorchRuntime`, of all layers, with its collectives.

    Raises:
        ToolsMissing: torch-mlir or jax is not installed.
    """
    check_installed()
    model, state = _bound(graph, rank), graph.meta_state()
    inputs = graph_inputs([Row(1, 0, [0])] * graph.rows, graph.tokens).to("meta")
    tensors = state_tensors(state, 1 if graph.kind == PREFILL else None, views_caches=True)
    if graph.kind == COMMIT:
        sizes = graph.config.rank_dimensions(graph.tp_degree)
        shape = (graph.rows, graph.tokens, sizes.mamba_conv_dim + sizes.mamba_heads)
        kept_input = torch.empty(shape, dtype=graph.dtype, device="meta")
        kept_inputs = [kept_input] * sum(layer.is_mamba for layer in model.model.layers)
        module = _graph(run_advance, model, GraphKey(0, in_order=True), (inputs, *kept_inputs), tensors)
    else:
        verifies = graph.kind == VERIFY
        key = GraphKey(
            graph.max_length, in_order=True, all_logits=verifies, verifies=verifies, chooses=graph.kind == DECODE
        )
        if key.chooses:
            inputs = decode_inputs(in_slot_order([], graph.rows)).to("meta")
            tensors = [torch.empty(graph.rows, dtype=torch.int32, device="meta"), *tensors]
        module = _graph(run_step, model, key, (inputs,), tensors)
    return lower(module, graph.tp_degree)


@torch.no_grad()
def _graph(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    """Return the one graph of `run_step` or `run_advance`; arguments are those after `call`."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    compile_apart(function, aot_backend(keep))(call_inline, *arguments)
    return graphs[0]
