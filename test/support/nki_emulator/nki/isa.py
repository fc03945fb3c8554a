"""The part of `nki.isa` that the kernels use: signatures of NKI 0.6, arithmetic in float32, limits of Trainium2."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from nki import language as nl
from nki.emulation import DTYPES, Memory, NkiTensor, cast, last_launch, require
from nki.indirect import IndirectView
from nki.language import Operator

MAX_STATIONARY = 128
MAX_MOVING = 512
MAX_TRANSPOSE = {"tensor": 128, "vector": 32}
SCALAR_ENGINE_PAIRS = (("multiply", "add"), ("multiply", None), ("add", None))


class engine(enum.Enum):
    """Where an instruction runs; `unknown` leaves the choice to the compiler."""

    unknown = "unknown"
    tensor = "tensor"
    vector = "vector"
    scalar = "scalar"
    gpsimd = "gpsimd"


class dge_mode(enum.Enum):
    """Who makes a DMA's descriptors: GpSimd (swdge), a block of its own (hwdge), or the host before the run (none)."""

    unknown = "unknown"
    none = "none"
    swdge = "swdge"
    hwdge = "hwdge"


class oob_mode(enum.Enum):
    """What an index out of range does: an error, or nothing is moved for it."""

    error = "error"
    skip = "skip"


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
) -> None:
    """Move between HBM and SBUF, casting through float32 where the dtypes differ.

    Either side can be an `IndirectView`. What its indices leave out is neither read nor written, nor counted.
    """
    for tensor in (dst, src):
        require(tensor.buffer is not Memory.PSUM, "DMA does not reach PSUM")
        if tensor.buffer.is_on_chip:
            last_launch().use(tensor.storage)
    require(dge_mode.value != "hwdge" or dst.dtype == src.dtype, "dge_mode.hwdge does not cast")
    _same_sizes(dst, src)
    moved = Counter()
    for to, values in _transfers(dst, src, oob_mode.value, dge_mode.value):
        cast_values = values if dst.dtype == src.dtype else cast(np.asarray(values, np.float32), dst.dtype)
        to[...] = cast_values.reshape(to.shape)
        if not src.buffer.is_on_chip:
            moved["hbm_read"] += values.nbytes
        if not dst.buffer.is_on_chip:
            moved["hbm_written"] += to.nbytes
    last_launch().record("dma", "dma_copy", dst.partitions, dst.free_size, **moved)


def _transfers(dst: NkiTensor, src: NkiTensor, oob: str, dge: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of memory to write and to read."""
    indirect = [tensor for tensor in (dst, src) if isinstance(tensor, IndirectView)]
    if not indirect:
        require(oob == "error", "oob_mode.skip is for an indirect access")
        yield dst.array, src.array
        return
    require(len(indirect) == 1, "dst and src are both indirect")
    require(dst.shape == src.shape, f"dst is {dst.shape}, src is {src.shape}")
    possible = ("unknown", "swdge") if indirect[0].is_vector else ("unknown", "swdge", "hwdge")
    require(dge in possible, f"dge_mode.{dge} does not do this, only {' or '.join(possible)}")
    if src is indirect[0]:
        for part, memory in src.places(oob == "skip"):
            yield dst.array[part], memory
        return
    indices = dst.indices.array[dst.indices.array < dst.limit]
    require(len(set(indices.tolist())) == len(indices), "two rows are written to one place")
    for part, memory in dst.places(oob == "skip"):
        yield memory, src.array[part]


def memset(dst: NkiTensor, value: float, engine: engine = engine.unknown) -> None:
    is_integer_dtype = np.issubdtype(DTYPES[dst.dtype], np.integer)
    require(is_integer_dtype == isinstance(value, int), f"memset of {dst.dtype} with {value!r}")
    dst.write(np.full(dst.shape, value, np.float32))
    _record(_elementwise_engine(engine, ("vector", "gpsimd"), dst), "memset", dst)


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: engine = engine.unknown) -> None:
    _same_sizes(dst, src)
    dst.write(src.read("src"))
    _record(_elementwise_engine(engine, ("vector", "scalar", "gpsimd"), dst, src), "tensor_copy", dst)


def tensor_tensor(
    dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Operator, engine: engine = engine.unknown
) -> None:
    """dst = data1 op data2."""
    _binary(op)
    _same_sizes(dst, data1, data2)
    _not_both_psum(data1, data2)
    first = data1.read("data1")
    dst.write(op.function(first, data2.read("data2").reshape(first.shape)))
    _record(_elementwise_engine(engine, ("vector", "gpsimd"), dst, data1, data2), "tensor_tensor", dst)


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: float | NkiTensor,
    reverse0: bool = False,
    op1: Operator | None = None,
    operand1: float | NkiTensor | None = None,
    reverse1: bool = False,
    engine: engine = engine.unknown,
) -> None:
    """dst = (data op0 operand0) op1 operand1, the operands being constants or one float32 per partition."""
    require((op1 is None) == (operand1 is None), "op1 and operand1 go together")
    name = _elementwise_engine(engine, ("vector", "scalar"), dst, data)
    if name == "scalar":
        pair = (op0.name, op1 and op1.name)
        require(pair in SCALAR_ENGINE_PAIRS, f"ScalarE has no tensor_scalar for {pair}")
    _same_sizes(dst, data)
    result = _apply(op0, data.read("data"), _per_partition(operand0, data, "operand0"), reverse0)
    if op1 is not None:
        result = _apply(op1, result, _per_partition(operand1, data, "operand1"), reverse1)
    dst.write(result)
    _record(name, "tensor_scalar", dst)


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: float | NkiTensor,
    op1: Operator,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """dst = (data op0 operand0) op1 operand1: operand0 a constant or one per partition, operand1 a whole tile."""
    _same_sizes(dst, data, operand1)
    _not_both_psum(data, operand1)
    result = _apply(op0, data.read("data"), _per_partition(operand0, data, "operand0"), reverse0)
    dst.write(_apply(op1, result, operand1.read("operand1").reshape(result.shape), reverse1))
    _record("vector", "scalar_tensor_tensor", dst)


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: float | NkiTensor,
    op0: Operator,
    op1: Operator,
) -> None:
    """r[i] = (data0[i] op0 r[i - 1]) op1 data1[i] along the free dimension, r[-1] = initial; float32 throughout."""
    _binary(op0)
    _binary(op1)
    _same_sizes(dst, data0, data1)
    _not_both_psum(data0, data1)
    require(dst.ndim == data0.ndim == data1.ndim == 2, "tensor_tensor_scan takes [partitions, elements]")
    # Time first, so that a step works on contiguous rows.
    first = np.ascontiguousarray(data0.read("data0").T)
    second = np.ascontiguousarray(data1.read("data1").T)
    result = np.empty_like(first)
    previous = np.broadcast_to(_per_partition(initial, data0, "initial"), (dst.partitions, 1))[:, 0]
    for i in range(len(result)):
        previous = result[i] = op1.function(op0.function(first[i], previous), second[i])
    dst.write(result.T)
    _record("vector", "tensor_tensor_scan", dst)


def tensor_reduce(dst: NkiTensor, op: Operator, data: NkiTensor, axis: int | Sequence[int]) -> None:
    """Reduce the last free dimensions."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    last = tuple(range(data.ndim - len(axes), data.ndim))
    require(axes == last and 0 not in axes, f"axes {axes} of {data.shape} are not its last free dimensions")
    require(op.name in ("add", "maximum", "minimum"), f"{op.name} is not a reduction")
    reduced = getattr(np, op.name).reduce(data.read("data"), axis=axes, dtype=np.float32)
    require(dst.partitions == data.partitions and dst.array.size == reduced.size, f"dst is {dst.shape}")
    dst.write(reduced)
    _record("vector", "tensor_reduce", data)


def activation(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    bias: NkiTensor | float | None = None,
    scale: NkiTensor | float = 1.0,
) -> None:
    """dst = op(data * scale + bias) on ScalarE: scale and bias constants or one float32 per partition."""
    require(op.arity == 1, f"{op.name} is not an activation function")
    _same_sizes(dst, data)
    shift = np.float32(0) if bias is None else _per_partition(bias, data, "bias")
    dst.write(op.function(data.read("data") * _per_partition(scale, data, "scale") + shift))
    _record("scalar", f"activation {op.name}", dst)


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    accumulate: bool | None = None,
) -> None:
    """dst = stationary.T @ moving on TensorE, or dst += with `accumulate`; None adds to what a product was written to.

    Accumulating onto anything but a matrix product is undefined on the hardware, and an error here.
    """
    for tensor, name in ((stationary, "stationary"), (moving, "moving")):
        require(tensor.buffer is Memory.SBUF, f"{name} is in {tensor.buffer.value}; it must be in SBUF")
        require(tensor.dtype in nl_floats, f"{name} is {tensor.dtype}; TensorE multiplies floats")
    require(dst.buffer is Memory.PSUM, f"dst is in {dst.buffer.value}; it must be in PSUM")
    require(dst.dtype == "float32", f"dst is {dst.dtype}; it must be float32")
    require(len(dst.banks) == 1, "one matrix product must fit one PSUM bank")
    rows, columns = stationary.free_size, moving.free_size
    require(stationary.partitions == moving.partitions, f"{stationary.partitions} and {moving.partitions} partitions")
    require(rows <= MAX_STATIONARY, f"stationary has {rows} columns; at most {MAX_STATIONARY}")
    require(columns <= MAX_MOVING, f"moving has {columns} columns; at most {MAX_MOVING}")
    is_float32 = stationary.dtype == "float32"
    require(is_float32 == (moving.dtype == "float32"), "float32 multiplies float32 only")
    require((dst.partitions, dst.free_size) == (rows, columns), f"dst is {dst.shape}, not ({rows}, {columns})")
    for tensor, is_declared in ((stationary, is_stationary_onezero), (moving, is_moving_onezero)):
        is_onezero = not is_declared or ((tensor.array == 0) | (tensor.array == 1)).all()
        require(bool(is_onezero), "an operand declared to be ones and zeros holds something else")

    left = stationary.read("stationary").reshape(-1, rows)
    product = left.T @ moving.read("moving").reshape(-1, columns)
    is_product = dst.is_product
    if accumulate is None:
        require(is_product.all() or not is_product.any(), "part of dst holds a matrix product and part does not")
        accumulate = bool(is_product.all())
    if accumulate:
        require(bool(is_product.all()), "accumulate=True on PSUM that holds no matrix product")
        product = dst.array.reshape(product.shape) + product
    dst.write(product, is_product=True)
    last_launch().record(
        "tensor",
        "nc_matmul",
        stationary.partitions,
        columns,
        is_float32=is_float32,
    )


def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown) -> None:
    """[partitions, free] to [free, partitions]: on TensorE from SBUF to PSUM, or on VectorE up to 32 x 32."""
    name = engine.value
    if name == "unknown":
        name = "tensor" if dst.buffer is Memory.PSUM else "vector"
    rows, columns = data.partitions, data.free_size
    require(dst.dtype == data.dtype, f"dst is {dst.dtype}, data is {data.dtype}")
    require((dst.partitions, dst.free_size) == (columns, rows), f"dst is {dst.shape}, not ({columns}, {rows})")
    limit = MAX_TRANSPOSE[name]
    require(max(rows, columns) <= limit, f"({rows}, {columns}) transposed on {name}; at most ({limit}, {limit})")
    if name == "tensor":
        places = (data.buffer, dst.buffer)
        require(places == (Memory.SBUF, Memory.PSUM), "a transpose on TensorE goes from SBUF to PSUM")
        require(len(dst.banks) == 1, "one transpose must fit one PSUM bank")
    dst.write(data.read("data").reshape(rows, columns).T)
    last_launch().record(name, "nc_transpose", rows, rows, is_float32=data.dtype == "float32")


def iota(dst: NkiTensor, pattern: Sequence[Sequence[int]], offset: int = 0, channel_multiplier: int = 0) -> None:
    """dst[p, i...] = offset + channel_multiplier * p + sum(step * i) on GpSimd; pattern is [[step, count], ...]."""
    require(dst.buffer is Memory.SBUF, f"dst is in {dst.buffer.value}; it must be in SBUF")
    dst.write(_affine(dst, pattern, offset, channel_multiplier))
    _record("gpsimd", "iota", dst)


def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Operator = nl.equal,
    offset: int = 0,
) -> None:
    """Keep on_true_tile where `iota`'s value compares true with 0; elsewhere on_false_value. On GpSimd."""
    _same_sizes(dst, on_true_tile)
    for tensor in (dst, on_true_tile):
        require(tensor.buffer is Memory.SBUF, f"affine_select in {tensor.buffer.value}; it works in SBUF")
    keep = cmp_op.function(_affine(dst, pattern, offset, channel_multiplier), 0) != 0
    values = on_true_tile.read("on_true_tile")
    dst.write(np.where(keep.reshape(values.shape), values, np.float32(on_false_value)))
    _record("gpsimd", "affine_select", dst)


nl_floats = (nl.float32, nl.bfloat16, nl.float16)


def _record(name: str, op: str, tensor: NkiTensor) -> None:
    last_launch().record(name, op, tensor.partitions, tensor.free_size)


def _elementwise_engine(wanted: Any, possible: tuple[str, ...], *tensors: NkiTensor) -> str:
    """Where an instruction runs; on VectorE if the compiler has the choice."""
    name = "vector" if wanted is engine.unknown else wanted.value
    require(name in possible, f"{name} does not do this, only {' or '.join(possible)}")
    if name == "gpsimd":
        require(all(tensor.buffer is not Memory.PSUM for tensor in tensors), "GpSimd does not reach PSUM")
    return name


def _same_sizes(*tensors: NkiTensor) -> None:
    sizes = {(tensor.partitions, tensor.free_size) for tensor in tensors}
    require(len(sizes) == 1, "sizes differ: " + ", ".join(str(tensor.shape) for tensor in tensors))


def _not_both_psum(first: NkiTensor, second: NkiTensor) -> None:
    require({first.buffer, second.buffer} != {Memory.PSUM}, "both inputs are in PSUM")


def _binary(op: Operator) -> None:
    require(op.arity == 2, f"{op.name} is not a binary operator")


def _apply(op: Operator, data: np.ndarray, operand: np.ndarray, reverse: bool) -> np.ndarray:
    _binary(op)
    return op.function(operand, data) if reverse else op.function(data, operand)


def _per_partition(operand: float | NkiTensor, data: NkiTensor, name: str) -> np.ndarray:
    """A constant, or [partitions, 1] in float32, in a shape that broadcasts over data."""
    if not isinstance(operand, NkiTensor):
        return np.float32(operand)
    require(operand.free_size == 1 and operand.partitions == data.partitions, f"{name} is {operand.shape}")
    require(operand.dtype == "float32", f"{name} is {operand.dtype}; it must be float32")
    return operand.read(name).reshape(-1, *[1] * (data.ndim - 1))


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
