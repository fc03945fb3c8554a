"""The graphs of the runtime for PyTorch devices, for `graphs.report`: traced on the meta device, and lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.state import HybridState, MambaState
from granite4_neuron.neuron.analysis.graphs import COMMIT, PREFILL, VERIFY, Traced
from granite4_neuron.neuron.analysis.torch_lowering import aot_backend, check_installed, hlo_proto_of, lower
from granite4_neuron.ops.xla import LOOPS
from granite4_neuron.runtime.torch_device import Form, compile_apart, directly, run_advance, run_step


def trace_torch(
    kind: str,
    tokens: int,
    config: GraniteMoeHybridConfig,
    dtype: torch.dtype,
    tp_degree: int,
    num_sequences: int,
    max_length: int,
) -> Traced:
    """Trace a graph of `runtime.torch_device.TorchRuntime`, of all layers. Arguments are those of `graphs.trace_xla`.

    Raises:
        ToolsMissing: torch-mlir or jax is not installed.
    """
    check_installed()
    rows = 1 if kind == PREFILL else num_sequences
    with torch.device("meta"):
        model = GraniteMoeHybridForCausalLM(config, Parallel(0, tp_degree)).to(dtype)
        state = HybridState.allocate(config, num_sequences, max_length, dtype, "meta", tp_degree, has_null_slot=False)
        ids, positions = torch.empty(2, rows, tokens, dtype=torch.int32)
        lengths, slots = torch.empty(2, rows, dtype=torch.int32)
        sizes = config.rank_dimensions(tp_degree)
        kept_input = torch.empty(rows, tokens, sizes.mamba_conv_dim + sizes.mamba_heads, dtype=dtype)
    weight_bytes = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    model.tie_weights()
    tensors = [
        tensor[:rows] if isinstance(layer, MambaState) else tensor
        for layer in state.layers
        for tensor in vars(layer).values()
    ]
    in_order = kind != PREFILL
    if kind == COMMIT:
        kept_inputs = [kept_input] * sum(layer.is_mamba for layer in model.model.layers)
        arguments = (Form(0, in_order), (positions, lengths, slots, *kept_inputs), tensors)
        graph = _graph(run_advance, model.bind(LOOPS), *arguments)
    else:
        verifies = kind == VERIFY
        form = Form(max_length, in_order, all_logits=verifies, verifies=verifies)
        graph = _graph(run_step, model.bind(LOOPS), form, (ids, positions, lengths, slots), tensors)
    lowered = lower(graph)
    return Traced(
        hlo_proto_of(lowered.text),
        donated=lowered.donated,
        components={},
        weight_bytes=weight_bytes,
        state_bytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.tensors()),
    )


@torch.no_grad()
def _graph(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    """Return the one graph of `run_step` or `run_advance`; arguments are those after `call`."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    compile_apart(function, aot_backend(keep))(directly, *arguments)
    return graphs[0]
