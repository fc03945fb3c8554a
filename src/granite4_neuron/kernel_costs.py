"""What kernels cost. In a graph they are custom calls, of which XLA knows nothing but shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

Shape = tuple[str, tuple[int, ...]]  # HLO's name of the dtype, dimensions
# Of dtypes in HLO.
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


def kernel_cost(name: str, operands: Sequence[Shape], results: Sequence[Shape]) -> tuple[float, float]:
    """FLOPs, and bytes read and written: every operand and every result once, and no FLOPs, where nothing is known."""
    cost = _COSTS.get(name)
    everything = float(sum(size_of(shape) for shape in (*operands, *results)))
    return (0.0, everything) if cost is None else cost(operands, everything)


def size_of(shape: Shape) -> int:
    """Bytes of a tensor."""
    dtype, dimensions = shape
    return prod(dimensions) * BYTES[dtype]


def _attention_cte(operands: Sequence[Shape], everything: float) -> tuple[float, float]:
    """Causal attention: query [heads, tokens, head_dim], key, value; then what is there of a prior, all of it visited.

    Source: the prefix caching of `attention_cte` in AWS's public nki-library, which masks what is not used.
    """
    heads, tokens, head_dim = operands[0][1]
    prior = operands[3][1][1] if len(operands) > 3 else 0
    return 4.0 * heads * head_dim * tokens * (prior + (tokens + 1) / 2), everything


_COSTS: Mapping[str, Callable[[Sequence[Shape], float], tuple[float, float]]] = {"attention_cte": _attention_cte}
