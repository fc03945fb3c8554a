"""Instructions of VectorE and GpSimd along a partition's elements and across partitions, with arithmetic in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from nki.isa.operands import apply, binary, not_both_psum, per_partition, record, rows
from nki.language import Operator
from nki.tensors import NkiTensor
from nki.values import require

REDUCTIONS = ("add", "maximum", "minimum")


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: float | NkiTensor,
    op0: Operator,
    op1: Operator,
    name: str | None = None,
) -> None:
    """r[i] = (data0[i] op0 r[i - 1]) op1 data1[i] along the free dimension, r[-1] = initial, in float32 throughout."""
    binary(op0)
    binary(op1)
    not_both_psum(data0, data1)
    require(dst.ndim == data0.ndim == data1.ndim == 2, "tensor_tensor_scan takes [partitions, elements]")
    require(dst.shape == data0.shape == data1.shape, f"shapes differ: {dst.shape}, {data0.shape}, {data1.shape}")
    # Time comes first, so that a step works on contiguous rows.
    first = np.ascontiguousarray(data0.read("data0").T)
    second = np.ascontiguousarray(data1.read("data1").T)
    result = np.empty_like(first)
    previous = np.broadcast_to(per_partition(initial, data0, "initial"), (dst.partitions, 1))[:, 0]
    for i in range(len(result)):
        previous = result[i] = op1.function(op0.function(first[i], previous), second[i])
    dst.write(result.T)
    record("vector", "tensor_tensor_scan", dst, 2)


def tensor_reduce(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    axis: int | Sequence[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """Reduce the last free dimensions."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    last = tuple(range(data.ndim - len(axes), data.ndim))
    require(axes == last and 0 not in axes, f"axes {axes} of {data.shape} are not its last free dimensions")
    reduced = _reduced(op, data.read("data"), axes)
    require(dst.partitions == data.partitions and dst.array.size == reduced.size, f"dst is {dst.shape}")
    dst.write(-reduced if negate else reduced)
    record("vector", "tensor_reduce", data)


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: float | NkiTensor,
    reduce_op: Operator,
    reduce_res: NkiTensor,
    reverse0: bool = False,
    name: str | None = None,
) -> None:
    """dst = data op0 operand0, and its reduction over a partition's elements."""
    if op0.arity == 1:  # abs takes no operand
        result = op0.function(data.read("data"))
    else:
        result = apply(op0, data.read("data"), per_partition(operand0, data, "operand0"), reverse0)
    dst.write(result)
    reduce_res.write(_reduced(reduce_op, result.reshape(data.partitions, -1), (1,)))
    record("vector", "tensor_scalar_reduce", data)


def tensor_partition_reduce(dst: NkiTensor, op: Operator, data: NkiTensor, name: str | None = None) -> None:
    """Reduce over all partitions to [1, elements], on GpSimd."""
    dst.write(_reduced(op, rows(data, "data"), (0,)))
    record("gpsimd", "tensor_partition_reduce", data)


def _reduced(op: Operator, values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    require(op.name in REDUCTIONS, f"{op.name} is not a reduction")
    return getattr(np, op.name).reduce(values, axis=axes, dtype=np.float32)


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Write [partitions, 6]: number, mean and sum of squared differences of the even elements and of the odd ones."""
    values = rows(data, "data")
    parts = (values[:, 0::2], values[:, 1::2])
    statistics = [(np.full(len(part), part.shape[1]), part.mean(1), part.var(1) * part.shape[1]) for part in parts]
    dst.write(np.stack([column for part in statistics for column in part], axis=1))
    record("vector", "bn_stats", data)


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Write [partitions, 2]: mean and variance of all elements that several `bn_stats` cover."""
    number, mean, squares = np.moveaxis(rows(data, "data").reshape(data.partitions, -1, 3), 2, 0)
    total = number.sum(1, keepdims=True)
    whole_mean = (number * mean).sum(1, keepdims=True) / total
    variance = (squares + number * (mean - whole_mean) ** 2).sum(1, keepdims=True) / total
    dst.write(np.concatenate([whole_mean, variance], axis=1))
    record("vector", "bn_aggr", data)
