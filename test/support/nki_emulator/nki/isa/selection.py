"""Instructions that select by position or by value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from nki import language as nl
from nki.isa.operands import record, rows
from nki.language import Operator
from nki.running import last_launch
from nki.tensors import NkiTensor
from nki.values import Memory, require

SELECTED_AT_ONCE = 8
SELECT_OPERATORS = ("greater_equal", "equal")
LOWEST = float(np.finfo(np.float32).min)


def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> None:
    """dst[p, i...] = offset + channel_multiplier * p + sum(step * i) on GpSimd; pattern is [[step, count], ...]."""
    require(dst.buffer is Memory.SBUF, f"dst is in {dst.buffer.value}; it must be in SBUF")
    dst.write(_affine(dst, pattern, offset, channel_multiplier))
    record("gpsimd", "iota", dst)


def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Operator = nl.equal,
    offset: int = 0,
    name: str | None = None,
) -> None:
    """Keep on_true_tile where `iota`'s value compares true with 0, and on_false_value elsewhere. Runs on GpSimd.

    Only forms in use are here: one free dimension, dense, in float32. More is documented.
    """
    require(dst.shape == on_true_tile.shape, f"shapes differ: {dst.shape}, {on_true_tile.shape}")
    for tensor in (dst, on_true_tile):
        require(tensor.buffer is Memory.SBUF, f"affine_select in {tensor.buffer.value}; it works in SBUF")
        require(tensor.ndim == 2, f"affine_select of {tensor.shape}, which has {tensor.ndim} dimensions, not 2")
        require(tensor.dtype == "float32", f"affine_select of {tensor.dtype}; it must be float32")
        require(tensor.is_dense, f"affine_select of {tensor.shape} with strides")
    require(cmp_op.name in SELECT_OPERATORS, f"affine_select compares with {' or '.join(SELECT_OPERATORS)}")
    keep = cmp_op.function(_affine(dst, pattern, offset, channel_multiplier), 0) != 0
    dst.write(np.where(keep, on_true_tile.read("on_true_tile"), np.float32(on_false_value)))
    record("gpsimd", "affine_select", dst)


def _affine(dst: NkiTensor, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int) -> np.ndarray:
    require(1 <= len(pattern) <= 4, f"pattern {pattern} has {len(pattern)} dimensions; at most 4")
    values = _affine_values(dst.partitions, tuple(map(tuple, pattern)), offset, channel_multiplier)
    require(values.shape[1] == dst.free_size, f"pattern {pattern} for {dst.shape}")
    return values.reshape(dst.shape)


@lru_cache(maxsize=64)
def _affine_values(
    partitions: int, pattern: tuple[tuple[int, int], ...], offset: int, channel_multiplier: int
) -> np.ndarray:
    indices = np.indices([count for _, count in pattern]).reshape(len(pattern), -1)
    free = np.array([step for step, _ in pattern]) @ indices
    return offset + channel_multiplier * np.arange(partitions)[:, None] + free


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Operator,
    comp_op1: Operator,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: object = None,
    reduce_res: NkiTensor | None = None,
    reduce_op: Operator | None = None,
    range_start: float = 0.0,
    on_false_value: float = LOWEST,
    name: str | None = None,
) -> None:
    """Keep on_true_tile where an element's number compares true with both bounds; find each partition's largest."""
    values = rows(on_true_tile, "on_true_tile")
    numbers = range_start + np.arange(values.shape[1], dtype=np.float32)[None]
    keep = (comp_op0.function(numbers, rows(bound0, "bound0")) != 0) & (
        comp_op1.function(numbers, rows(bound1, "bound1")) != 0
    )
    result = np.where(keep, values, np.float32(on_false_value))
    dst.write(result)
    if reduce_res is not None:
        require(reduce_op is None or reduce_op.name == "maximum", "range_select reduces to the maximum")
        reduce_res.write(result.max(1))
    record("vector", "range_select", dst)


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> None:
    """Find the eight largest elements of each partition, in descending order."""
    dst.write(-np.sort(-rows(src, "src"), axis=1)[:, :SELECTED_AT_ONCE])
    record("vector", "max8", src)


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> None:
    """Find where each of eight values is first in its partition. Equal values take successive places."""
    found, _ = _matches(rows(data, "data"), rows(vals, "vals"))
    dst.write(found)
    record("vector", "nc_find_index8", data)


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> None:
    """Replace the first match of each of eight values in data by `imm`, and find where these were."""
    found, left = _matches(rows(data, "data"), rows(vals, "vals"))
    dst.write(np.where(left, rows(data, "data"), np.float32(imm)))
    if dst_idx is not None:
        dst_idx.write(found)
    record("vector", "nc_match_replace8", data)


def _matches(data: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each value in its row, or -1, and which elements of the data no value took."""
    places, left = np.full(values.shape, -1.0, np.float32), np.ones(data.shape, bool)
    for p, row in enumerate(data):
        for j, value in enumerate(values[p]):
            hits = np.flatnonzero((row == value) & left[p])
            if hits.size:
                places[p, j] = hits[0]
                left[p, hits[0]] = False
    return places, left


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> None:
    """Gather each partition's elements at its indices, on GpSimd."""
    dst.write(np.take_along_axis(rows(data, "data"), rows(indices, "indices").astype(np.int64), 1))
    record("gpsimd", "nc_n_gather", dst)


def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> None:
    """Write the numbers of every 16th partition's nonzero elements, and their count in the last place. On GpSimd."""
    result = np.full((dst.partitions, dst.free_size), padding_val, np.float32)
    for p in range(0, src.partitions, 16):
        places = np.flatnonzero(rows(src, "src")[p])
        result[p, : len(places)] = places + index_offset
        result[p, -1] = len(places)
    dst.write(result)
    last_launch().record("gpsimd", "nonzero_with_count", src.partitions, src.free_size)
