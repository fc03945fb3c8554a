"""Memory, tensors and launches of the emulated NeuronCore-v3 (Trainium2)."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ml_dtypes
import numpy as np

PARTITIONS = 128
PSUM_BANK_BYTES = 2048
PSUM_BANKS = 8
# 224 KiB are there; what the runtime and the compiler keep for themselves is not.
SBUF_PARTITION_BYTES = 224 * 1024 - 16 * 1024 - 264
MAX_SBUF_ELEMENTS = 64 * 1024
MAX_PSUM_ELEMENTS = 4 * 1024
MAX_RANK = 5
MAX_FREE_DIMENSIONS = 3  # of an instruction's operand, but for a few instructions

DTYPES = {name: np.dtype(name) for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")}
DTYPES |= {"float16": np.dtype("float16"), "float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FLOATS = ("float16", "float32", "bfloat16")
INTEGER_SENTINEL = 4


class NkiError(Exception):
    """What the NKI compiler or the hardware would refuse, or leave undefined."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise NkiError(message)


class Memory(enum.Enum):
    """Where a tensor lives."""

    SBUF = "SBUF"
    PSUM = "PSUM"
    HBM = "private HBM"
    SHARED_HBM = "shared HBM"

    @property
    def is_on_chip(self) -> bool:
        return self in (Memory.SBUF, Memory.PSUM)


@dataclass(frozen=True)
class Instruction:
    """One instruction of one program.

    engine: tensor, vector, scalar, gpsimd or dma.
    elements: per partition; of a matrix product, the columns of the moving operand.
    is_float32: the operands of a matrix product are float32.
    """

    program: int
    engine: str
    op: str
    partitions: int
    elements: int
    hbm_read: int = 0
    hbm_written: int = 0
    is_float32: bool = False


class Storage:
    """One allocation, and when it is first and last used: a compiler gives its memory to others outside that time."""

    def __init__(self, array: np.ndarray, memory: Memory):
        self.array = array
        self.memory = memory
        self.first_use: int | None = None
        self.last_use: int | None = None
        # PSUM: which elements hold a matrix product, and so may be accumulated onto.
        self.is_product = np.zeros(array.shape, bool) if memory is Memory.PSUM else None

    @property
    def partition_bytes(self) -> int:
        return math.prod(self.array.shape[1:]) * self.array.itemsize


class Launch:
    """One call of a kernel: its programs, their instructions and the memory they held at most."""

    def __init__(self, programs: int):
        self.programs = programs
        self.program = 0
        self.instructions: list[Instruction] = []
        self.peak_sbuf_bytes = 0
        self.peak_psum_banks = 0
        self._storages: list[Storage] = []
        self._shared: list[NkiTensor] = []
        self._next_shared = 0

    def start_program(self, program: int) -> None:
        self.program = program
        self._storages = []
        self._next_shared = 0

    def finish_program(self) -> None:
        """Check the program's memory, which a compiler would have to allocate."""
        require(self._next_shared == len(self._shared), "the programs allocate different shared_hbm tensors")
        sbuf = self._peak(Memory.SBUF, lambda storage: storage.partition_bytes)
        psum = self._peak(Memory.PSUM, lambda storage: -(-storage.partition_bytes // PSUM_BANK_BYTES))
        require(sbuf <= SBUF_PARTITION_BYTES, f"SBUF: {sbuf} bytes per partition, of {SBUF_PARTITION_BYTES}")
        require(psum <= PSUM_BANKS, f"PSUM: {psum} banks, of {PSUM_BANKS}")
        self.peak_sbuf_bytes = max(self.peak_sbuf_bytes, sbuf)
        self.peak_psum_banks = max(self.peak_psum_banks, psum)

    def _peak(self, memory: Memory, size: Callable[[Storage], int]) -> int:
        changes: Counter[int] = Counter()
        for storage in self._storages:
            if storage.memory is memory and storage.first_use is not None:
                changes[storage.first_use] += size(storage)
                changes[storage.last_use + 1] -= size(storage)
        held = peak = 0
        for time in sorted(changes):
            held += changes[time]
            peak = max(peak, held)
        return peak

    def allocate(self, shape: Sequence[int], dtype: str, memory: Memory) -> NkiTensor:
        """New memory, full of NaN (integers: of a sentinel). Programs get the same `shared_hbm` tensors, in order."""
        shape = tuple(shape)
        if memory.is_on_chip:
            require(len(shape) >= 2, f"a tensor in {memory.value} needs a partition and a free dimension, not {shape}")
            require(shape[0] <= PARTITIONS, f"{shape[0]} partitions; there are {PARTITIONS}")
        if memory is Memory.SHARED_HBM and self.program > 0:
            require(self._next_shared < len(self._shared), "the programs allocate different shared_hbm tensors")
            tensor = self._shared[self._next_shared]
            self._next_shared += 1
            require(
                (tensor.shape, tensor.dtype) == (shape, dtype), "the programs allocate different shared_hbm tensors"
            )
            return tensor
        sentinel = math.nan if dtype in FLOATS else INTEGER_SENTINEL
        storage = Storage(np.full(shape, sentinel, DTYPES[dtype]), memory)
        self._storages.append(storage)
        tensor = NkiTensor(storage.array, storage)
        if memory is Memory.SHARED_HBM:
            self._shared.append(tensor)
            self._next_shared += 1
        return tensor

    def record(self, engine: str, op: str, partitions: int, elements: int, **more: int | bool) -> None:
        self.instructions.append(Instruction(self.program, engine, op, partitions, elements, **more))

    def use(self, storage: Storage) -> None:
        """The instruction about to be recorded reads or writes this."""
        now = len(self.instructions)
        storage.first_use = now if storage.first_use is None else storage.first_use
        storage.last_use = now

    def count(self, engine: str | None = None, op: str | None = None, program: int = 0) -> int:
        """Instructions of one program; of one engine, with one name, if given."""
        return sum(
            i.program == program and engine in (None, i.engine) and op in (None, i.op) for i in self.instructions
        )

    @property
    def hbm_bytes(self) -> int:
        """Read from and written to HBM, by all programs together."""
        return sum(i.hbm_read + i.hbm_written for i in self.instructions)


_launches: list[Launch] = []


@contextmanager
def launching(launch: Launch) -> Iterator[None]:
    """Make `launch` the one whose kernel is running; afterwards it is the last one."""
    _launches[:] = [launch]
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        yield


def last_launch() -> Launch:
    """The running launch, or the last one."""
    return _launches[0]


class NkiTensor:
    """A view of memory, with NKI's indexing: an integer index on chip keeps the partition dimension."""

    def __init__(self, array: np.ndarray, storage: Storage, start_partition: int = 0):
        self.array = array
        self.storage = storage
        self.start_partition = start_partition

    @classmethod
    def of_array(cls, array: np.ndarray) -> NkiTensor:
        """An argument of a kernel: HBM that is the caller's array."""
        return cls(array, Storage(array, Memory.SHARED_HBM))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> str:
        return self.array.dtype.name

    @property
    def buffer(self) -> Memory:
        return self.storage.memory

    @property
    def partitions(self) -> int:
        return self.shape[0]

    @property
    def free_size(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def is_product(self) -> np.ndarray:
        """PSUM: the part of the storage's map that belongs to this view."""
        return _same_view(self.storage.is_product, self.array, self.storage.array)

    def __getitem__(self, key: int | slice | tuple[int | slice, ...]) -> NkiTensor:
        key = key if isinstance(key, tuple) else (key,)
        require(len(key) <= self.ndim, f"{len(key)} indices for shape {self.shape}")
        key += (slice(None),) * (self.ndim - len(key))
        for index, size in zip(key, self.shape, strict=True):
            if isinstance(index, slice):
                start, stop = index.start or 0, size if index.stop is None else index.stop
                require(0 <= start < stop <= size, f"slice {start}:{stop} of a dimension of {size}")
            else:
                require(0 <= index < size, f"index {index} of a dimension of {size}")
        start_partition = self.start_partition
        if self.buffer.is_on_chip:
            first = key[0] if isinstance(key[0], slice) else slice(key[0], key[0] + 1)
            require(first.step in (None, 1), "partitions cannot be strided")
            key = (first, *key[1:])
            start_partition += first.start or 0
        return NkiTensor(self.array[key], self.storage, start_partition)

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        require(math.prod(shape) == self.array.size, f"{self.shape} does not reshape to {tuple(shape)}")
        if self.buffer.is_on_chip:
            require(shape[0] == self.partitions, "reshape must keep the partition dimension")
        view = self.array.reshape(shape)
        require(np.shares_memory(view, self.array), f"{self.shape} with its strides is no view of {tuple(shape)}")
        return self._view(view)

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """One dimension as several; any strides will do."""
        require(not self.buffer.is_on_chip or dim != 0, "reshape_dim must keep the partition dimension")
        require(math.prod(shape) == self.shape[dim], f"dimension {dim} of {self.shape} does not reshape to {shape}")
        return self._view(self.array.reshape((*self.shape[:dim], *shape, *self.shape[dim + 1 :])))

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        require(not self.buffer.is_on_chip or dims[0] == 0, "permute must keep the partition dimension")
        return self._view(self.array.transpose(dims))

    def expand_dim(self, dim: int) -> NkiTensor:
        require(not self.buffer.is_on_chip or dim != 0, "expand_dim must keep the partition dimension")
        return self._view(np.expand_dims(self.array, dim))

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """A dimension of 1 read `size` times, with a stride of 0."""
        require(self.shape[dim] == 1, f"dimension {dim} of {self.shape} is not 1")
        require(not self.buffer.is_on_chip or dim != 0, "partitions cannot be broadcast")
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._view(np.broadcast_to(self.array, shape))

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int = 0,
        scalar_offset: NkiTensor | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
    ) -> NkiTensor:
        """HBM at places that indices name when the kernel runs: see `nki.indirect.IndirectView`."""
        from nki.indirect import IndirectView

        require((scalar_offset is None) != (vector_offset is None), "ap takes a scalar_offset or a vector_offset")
        indices = vector_offset if scalar_offset is None else scalar_offset
        return IndirectView(self, pattern, offset, indices, scalar_offset is None, indirect_dim)

    def view(self, dtype: str) -> NkiTensor:
        """The same bytes read as another dtype, with the last dimension's size to match."""
        last = self.shape[-1] * self.array.itemsize
        require(last % DTYPES[dtype].itemsize == 0, f"{self.shape} of {self.dtype} is no view of {dtype}")
        require(self.buffer is not Memory.PSUM, "PSUM keeps its dtype")
        return self._view(self.array.view(DTYPES[dtype]))

    def _view(self, array: np.ndarray) -> NkiTensor:
        require(array.ndim <= MAX_RANK, f"{array.ndim} dimensions; an access pattern has at most {MAX_RANK}")
        return NkiTensor(array, self.storage, self.start_partition)

    def read(self, name: str) -> np.ndarray:
        """What an engine reads: float32, which is exact for integers up to 2**24."""
        self.check_on_chip(name)
        last_launch().use(self.storage)
        return np.asarray(self.array, np.float32)

    def write(self, values: np.ndarray, is_product: bool = False) -> None:
        """What an engine writes: float32 values cast to the tensor's dtype; integers are rounded and saturate."""
        self.check_on_chip("dst")
        last_launch().use(self.storage)
        if self.storage.is_product is not None:
            self.is_product[...] = is_product
        self.array[...] = cast(np.asarray(values, np.float32).reshape(self.shape), self.dtype)

    def check_on_chip(self, name: str) -> None:
        """The limits that every operand of every compute engine has."""
        require(self.buffer.is_on_chip, f"{name} is in {self.buffer.value}; engines work on SBUF and PSUM")
        starts = (0,) if self.partitions > 64 else (0, 64) if self.partitions > 32 else (0, 32, 64, 96)
        require(
            self.start_partition in starts,
            f"{name}: {self.partitions} partitions start at {self.start_partition}, not one of {starts}",
        )
        free = self.ndim - 1
        require(free <= MAX_FREE_DIMENSIONS, f"{name}: {free} free dimensions; at most {MAX_FREE_DIMENSIONS}")
        limit = MAX_PSUM_ELEMENTS if self.buffer is Memory.PSUM else MAX_SBUF_ELEMENTS
        require(self.free_size <= limit, f"{name}: {self.free_size} elements per partition; at most {limit}")

    @property
    def banks(self) -> range:
        """PSUM: the banks from the view's first byte to its last, counted from the start of its storage."""
        low, high = np.lib.array_utils.byte_bounds(self.array[:1])
        base = np.lib.array_utils.byte_bounds(self.storage.array[self.start_partition : self.start_partition + 1])[0]
        return range((low - base) // PSUM_BANK_BYTES, (high - base - 1) // PSUM_BANK_BYTES + 1)


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 to any dtype; to integers by rounding half to even and saturating."""
    if dtype in FLOATS:
        return values.astype(DTYPES[dtype])
    limits = np.iinfo(DTYPES[dtype])
    return np.clip(np.rint(values, dtype=np.float64), limits.min, limits.max).astype(DTYPES[dtype])


def _same_view(other: np.ndarray, view: np.ndarray, base: np.ndarray) -> np.ndarray:
    """The view of `other` that `view` is of `base`, two arrays of one shape and different item sizes."""
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // base.itemsize
    strides = tuple(stride // base.itemsize * other.itemsize for stride in view.strides)
    return np.ndarray(view.shape, other.dtype, other, offset * other.itemsize, strides)
