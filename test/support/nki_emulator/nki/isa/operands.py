"""Checks of instructions' operands, and the reports of instructions."""

from __future__ import annotations

import numpy as np
from nki.isa.options import engine
from nki.language import Operator
from nki.running import last_launch
from nki.tensors import NkiTensor
from nki.values import Memory, require

FAST_IN_BFLOAT16 = ("add", "multiply", "subtract")


def record(name: str, op: str, tensor: NkiTensor, cycles_per_element: int = 1) -> None:
    cycles = cycles_per_element if name == "vector" else 1
    last_launch().record(name, op, tensor.partitions, tensor.free_size, cycles_per_element=cycles)


def cycles_of_two_tiles(op: Operator, dst: NkiTensor, *tiles: NkiTensor) -> int:
    """Return VectorE's cycles for an element of two tiles: 2, or 1 if one is in PSUM or all is dense bfloat16."""
    is_bfloat16 = all(tensor.dtype == "bfloat16" for tensor in (dst, *tiles))
    is_fast = is_bfloat16 and op.name in FAST_IN_BFLOAT16 and all(tile.is_dense for tile in tiles)
    return 1 if is_fast or any(tile.buffer is Memory.PSUM for tile in tiles) else 2


def elementwise_engine(wanted: engine, possible: tuple[str, ...], *tensors: NkiTensor) -> str:
    """Return the engine that an instruction runs on, or the first possible one if the compiler has the choice."""
    name = possible[0] if wanted is engine.unknown else wanted.value
    require(name in possible, f"{name} does not do this, only {' or '.join(possible)}")
    if name == "gpsimd":
        require(all(tensor.buffer is not Memory.PSUM for tensor in tensors), "GpSimd does not reach PSUM")
    return name


def same_shapes(*tensors: NkiTensor) -> None:
    """Check that shapes are equal except for dimensions of one element, which an access pattern does not count."""
    shapes = {(tensor.partitions, *(size for size in tensor.shape[1:] if size > 1)) for tensor in tensors}
    require(len(shapes) == 1, "shapes differ: " + ", ".join(str(tensor.shape) for tensor in tensors))


def not_both_psum(first: NkiTensor, second: NkiTensor) -> None:
    require({first.buffer, second.buffer} != {Memory.PSUM}, "both inputs are in PSUM")


def binary(op: Operator) -> None:
    require(op.arity == 2, f"{op.name} is not a binary operator")
    require(op.name != "divide", "no engine divides; multiply by the reciprocal")


def apply(op: Operator, data: np.ndarray, operand: np.ndarray, reverse: bool) -> np.ndarray:
    binary(op)
    return op.function(operand, data) if reverse else op.function(data, operand)


def per_partition(
    operand: float | NkiTensor, data: NkiTensor, name: str, dtypes: tuple[str, ...] = ("float32",)
) -> np.ndarray:
    """Return a constant or [partitions, 1] in a shape that broadcasts over data."""
    if not isinstance(operand, NkiTensor):
        return np.float32(operand)
    require(operand.free_size == 1 and operand.partitions == data.partitions, f"{name} is {operand.shape}")
    require(operand.dtype in dtypes, f"{name} is {operand.dtype}; it must be {' or '.join(dtypes)}")
    return operand.read(name).reshape(-1, *[1] * (data.ndim - 1))


def rows(tensor: NkiTensor, name: str) -> np.ndarray:
    """Return a tensor as [partitions, elements] in float32."""
    return tensor.read(name).reshape(tensor.partitions, -1)
