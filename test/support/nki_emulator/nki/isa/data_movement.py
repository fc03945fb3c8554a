"""Instructions that move elements: DMA, copies, constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from nki.dma_elements import dma_elements
from nki.indirect import IndirectView
from nki.isa.operands import elementwise_engine, record, same_shapes
from nki.isa.options import dge_mode, engine, oob_mode
from nki.running import last_launch
from nki.tensors import NkiTensor
from nki.values import INTEGERS, Memory, cast, require

MEMSET_FREE_DIMENSIONS = 4
TRANSPOSED_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
SHUFFLED_PARTITIONS, UNCHANGED = 32, 255


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> None:
    """Move between HBM and SBUF, casting through float32 where the dtypes differ.

    Either side can be an `IndirectView`. Places that its indices leave out are neither read nor written, nor counted.
    """
    _use(dst, src)
    require(dge_mode.value != "hwdge" or dst.dtype == src.dtype, "dge_mode.hwdge does not cast")
    starts = ("scalar", "sync", "unknown") if dge_mode.value == "hwdge" else ("unknown",)
    require(engine.value in starts, f"engine {engine.value} starts no DMA with dge_mode.{dge_mode.value}")
    require(priority is None, "a DMA has a priority on NeuronCore-v4 only")
    is_whole = dst.buffer.is_on_chip and src.buffer.is_on_chip
    require(not is_whole or dst.partitions == src.partitions, f"sizes differ: {dst.shape}, {src.shape}")
    require(dst.array.size == src.array.size, f"sizes differ: {dst.shape}, {src.shape}")
    moved: Counter[str] = Counter()
    elements: Counter[int] = Counter()
    for to, values in _transfers(dst, src, oob_mode.value, dge_mode.value):
        src.storage.check_order(values)
        cast_values = values if dst.dtype == src.dtype else cast(np.asarray(values, np.float32), dst.dtype)
        cast_values = cast_values.reshape(to.shape)
        dst.storage.check_order(to, cast_values)
        to[...] = cast_values
        elements += dma_elements(to, values, dst.buffer.is_on_chip, src.buffer.is_on_chip)
        if not src.buffer.is_on_chip:
            moved["hbm_read"] += values.nbytes
        if not dst.buffer.is_on_chip:
            moved["hbm_written"] += to.nbytes
    sizes = tuple(sorted(elements.items()))
    last_launch().record("dma", "dma_copy", dst.partitions, dst.free_size, dma_elements=sizes, **moved)


def _use(dst: NkiTensor, src: NkiTensor) -> None:
    is_lost = dst.is_reshaped and not dst.buffer.is_on_chip
    require(not is_lost, "dst is a reshaped tensor in HBM, and NKI 0.3 wrote such a copy elsewhere; write through ap")
    for tensor in (dst, src):
        require(tensor.buffer is not Memory.PSUM, "DMA does not reach PSUM")
        if tensor.buffer.is_on_chip:
            last_launch().use(tensor.storage)


def _transfers(dst: NkiTensor, src: NkiTensor, oob: str, dge: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of memory to write and memory to read."""
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


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> None:
    """Write src to dst with its dimensions in the order of `axes`. By default the first and the last are exchanged.

    Every entry counts as an element of its own.
    """
    require(not isinstance(src, IndirectView), "an indirect transpose is not emulated")
    require(dst.dtype == src.dtype, f"dst is {dst.dtype}, src is {src.dtype}")
    _use(dst, src)
    order = tuple(axes or TRANSPOSED_AXES[src.ndim])
    require(order == TRANSPOSED_AXES[src.ndim], f"axes {order}; of {src.ndim} dimensions {TRANSPOSED_AXES[src.ndim]}")
    shape = tuple(src.shape[axis] for axis in order)
    require(dst.shape == shape, f"dst is {dst.shape}, not {shape}")
    require(dge_mode.value in ("unknown", "hwdge"), f"dge_mode.{dge_mode.value} does not transpose")
    dst.array[...] = np.transpose(src.array, order)
    moved = {"hbm_read": 0 if src.buffer.is_on_chip else src.array.nbytes}
    moved["hbm_written"] = 0 if dst.buffer.is_on_chip else dst.array.nbytes
    sizes = ((dst.array.itemsize, dst.array.size),)
    last_launch().record("dma", "dma_transpose", dst.partitions, dst.free_size, dma_elements=sizes, **moved)


def memset(dst: NkiTensor, value: float, engine: engine = engine.unknown, name: str | None = None) -> None:
    """Fill a tensor with a value. Integers are exact; a tensor of floats takes an integer too."""
    is_whole = isinstance(value, int)
    require(is_whole or dst.dtype not in INTEGERS, f"memset of {dst.dtype} with {value!r}")
    values = np.full(dst.shape, value, np.int64 if is_whole else np.float32)
    dst.write(values, free_dimensions=MEMSET_FREE_DIMENSIONS)
    record(elementwise_engine(engine, ("vector", "gpsimd"), dst), "memset", dst)


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: engine = engine.unknown, name: str | None = None) -> None:
    """Copy a tensor. Equal dtypes keep every bit; integers keep their value as far as the other dtype has it."""
    same_shapes(dst, src)
    is_whole = {dst.dtype, src.dtype} <= set(INTEGERS)
    dst.write(src.read_unchanged("src") if is_whole else src.read("src"))
    record(elementwise_engine(engine, ("vector", "scalar", "gpsimd"), dst, src), "tensor_copy", dst)


def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None) -> None:
    """Let partition i of every 32 become partition shuffle_mask[i]; 255 leaves dst as it is. Runs on VectorE."""
    values, result = src.read("src"), dst.array.astype(np.float32)
    for first in range(0, dst.partitions, SHUFFLED_PARTITIONS):
        for i, chosen in enumerate(shuffle_mask[: dst.partitions - first]):
            if chosen != UNCHANGED:
                source = first + chosen if first + chosen < src.partitions else chosen
                result[first + i] = values[source].reshape(result[first + i].shape)
    dst.write(result)
    record("vector", "nc_stream_shuffle", dst)
