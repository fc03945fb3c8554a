"""Tensors: views of memory, with NKI's indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType

import numpy as np
from nki.running import last_launch
from nki.values import (
    DTYPES,
    MAX_FREE_DIMENSIONS,
    MAX_RANK,
    MAX_SBUF_ELEMENTS,
    PSUM_BANK_BYTES,
    Memory,
    cast,
    require,
)
from numpy.lib.stride_tricks import as_strided

Index = int | slice | EllipsisType


class Storage:
    """One allocation, and its first and last use. A compiler gives its memory to others outside that time."""

    def __init__(self, array: np.ndarray, memory: Memory):
        self.array = array
        self.memory = memory
        self.first_use: int | None = None
        self.last_use: int | None = None
        # In PSUM: the elements that hold a matrix product and so may be accumulated onto.
        self.is_product = np.zeros(array.shape, bool) if memory is Memory.PSUM else None
        # In HBM that several programs share: who wrote an element, see `check_order`. None if nobody did.
        self.writers: np.ndarray | None = None

    @property
    def partition_bytes(self) -> int:
        return math.prod(self.array.shape[1:]) * self.array.itemsize

    def check_order(self, view: np.ndarray, new_values: np.ndarray | None = None) -> None:
        """Check that no other program has written this part of shared HBM, unless both have met at a barrier since.

        Both may write the same values, as AWS's kernels do. A writer is numbered 2 * barriers + program + 1, with the
        barriers that it has met; 0 is none. Parts that are accessed as another dtype are not checked.

        Args:
            new_values: what the running program writes there, before it does; None if it reads.
        """
        launch = last_launch()
        is_seen = new_values is not None or self.writers is not None
        if launch.programs == 1 or self.memory is not Memory.SHARED_HBM or not is_seen:
            return
        if view.itemsize != self.array.itemsize:
            return
        if self.writers is None:
            self.writers = np.zeros(self.array.shape, np.int16)
        writers = _same_view(self.writers, view, self.array)
        is_other = (writers > 0) & (writers % 2 != (launch.program + 1) % 2) & ((writers - 1) // 2 >= launch.barriers)
        if new_values is None:
            require(not is_other.any(), "one program reads what the other has written, without a core_barrier between")
            return
        is_equal = view[is_other].tobytes() == new_values[is_other].tobytes()
        require(is_equal, "both programs write to one place, without a core_barrier between")
        writers[...] = 2 * launch.barriers + launch.program + 1


class NkiTensor:
    """A view of memory. On chip, an index keeps the partition dimension and the last free one.

    is_reshaped: whether the view was made by `reshape` or `reshape_dim`, or is a view of such a view.
    """

    def __init__(self, array: np.ndarray, storage: Storage, start_partition: int = 0, is_reshaped: bool = False):
        self.array = array
        self.storage = storage
        self.start_partition = start_partition
        self.is_reshaped = is_reshaped

    @classmethod
    def from_array(cls, array: np.ndarray) -> NkiTensor:
        """Return an argument of a kernel: HBM that is the caller's array."""
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
        """The part of the storage's PSUM map that belongs to this view."""
        return _same_view(self.storage.is_product, self.array, self.storage.array)

    @property
    def is_dense(self) -> bool:
        """Whether a partition's elements lie one after another."""
        return bool(self.array[0].flags.c_contiguous)

    @property
    def is_broadcast(self) -> bool:
        """Whether an element is visited more than once, because some stride is 0."""
        return any(stride == 0 and size > 1 for stride, size in zip(self.array.strides, self.shape, strict=True))

    def __getitem__(self, key: Index | tuple[Index, ...]) -> NkiTensor:
        key = key if isinstance(key, tuple) else (key,)
        if Ellipsis in key:
            place = key.index(Ellipsis)
            key = key[:place] + (slice(None),) * (self.ndim - len(key) + 1) + key[place + 1 :]
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
        array = self.array[key]
        if self.buffer.is_on_chip and array.ndim == 1:
            array = array[:, None]
        return NkiTensor(array, self.storage, start_partition, self.is_reshaped)

    def reshape(self, *shape: int | Sequence[int]) -> NkiTensor:
        shape = shape if isinstance(shape[0], int) else tuple(shape[0])
        require(math.prod(shape) == self.array.size, f"{self.shape} does not reshape to {tuple(shape)}")
        if self.buffer.is_on_chip:
            require(shape[0] == self.partitions, "reshape must keep the partition dimension")
        view = self.array.reshape(shape)
        require(np.shares_memory(view, self.array), f"{self.shape} with its strides is no view of {tuple(shape)}")
        return self._view(view, is_reshaped=True)

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Split one dimension into several. Any strides will do."""
        require(not self.buffer.is_on_chip or dim != 0, "reshape_dim must keep the partition dimension")
        require(math.prod(shape) == self.shape[dim], f"dimension {dim} of {self.shape} does not reshape to {shape}")
        view = self.array.reshape((*self.shape[:dim], *shape, *self.shape[dim + 1 :]))
        return self._view(view, is_reshaped=True)

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        require(not self.buffer.is_on_chip or dims[0] == 0, "permute must keep the partition dimension")
        return self._view(self.array.transpose(dims))

    def expand_dim(self, dim: int) -> NkiTensor:
        require(not self.buffer.is_on_chip or dim != 0, "expand_dim must keep the partition dimension")
        return self._view(np.expand_dims(self.array, dim))

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Read a dimension of 1 `size` times, with a stride of 0."""
        require(self.shape[dim] == 1, f"dimension {dim} of {self.shape} is not 1")
        require(not self.buffer.is_on_chip or dim != 0, "partitions cannot be broadcast")
        strides = (*self.array.strides[:dim], 0, *self.array.strides[dim + 1 :])
        return self._view(as_strided(self.array, (*self.shape[:dim], size, *self.shape[dim + 1 :]), strides))

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int = 0,
        dtype: str | None = None,
        scalar_offset: NkiTensor | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
    ) -> NkiTensor:
        """Return memory from the tensor's first element on, by [stride, count] of each dimension, in elements.

        An offset that is a tensor gives HBM at places that indices name when the kernel runs. See
        `nki.indirect.IndirectView`.
        """
        first = self.array.__array_interface__["data"][0] - self.storage.array.__array_interface__["data"][0]
        require(first == 0, "ap of a part; the documentation has two meanings of its offset, so take it of the tensor")
        if scalar_offset is None and vector_offset is None:
            return self._pattern(pattern, offset, dtype or self.dtype)
        from nki.indirect import IndirectView

        require((scalar_offset is None) != (vector_offset is None), "ap takes a scalar_offset or a vector_offset")
        indices = vector_offset if scalar_offset is None else scalar_offset
        return IndirectView(self, pattern, offset, indices, scalar_offset is None, indirect_dim)

    def _pattern(self, pattern: Sequence[Sequence[int]], offset: int, dtype: str) -> NkiTensor:
        base = self.storage.array
        elements = base.reshape(-1).view(DTYPES[dtype])
        strides, counts = zip(*pattern, strict=True)
        last = offset + sum(stride * (count - 1) for stride, count in zip(strides, counts, strict=True))
        require(offset >= 0 and last < elements.size, f"ap ends at element {last} of {elements.size}")
        start_partition = 0
        if self.buffer.is_on_chip:
            step = elements.size // base.shape[0]
            is_partition = strides[0] == step or counts[0] == 1
            require(is_partition, f"ap steps {strides[0]} elements from partition to partition, of {step} each")
            start_partition = offset // step
        view = as_strided(elements[offset:], counts, [stride * elements.itemsize for stride in strides])
        return NkiTensor(view, self.storage, start_partition)

    def view(self, dtype: str) -> NkiTensor:
        """Return the same bytes read as another dtype, with the last dimension's size to match."""
        last = self.shape[-1] * self.array.itemsize
        require(last % DTYPES[dtype].itemsize == 0, f"{self.shape} of {self.dtype} is no view of {dtype}")
        require(self.buffer is not Memory.PSUM, "PSUM keeps its dtype")
        return self._view(self.array.view(DTYPES[dtype]))

    def _view(self, array: np.ndarray, is_reshaped: bool = False) -> NkiTensor:
        require(array.ndim <= MAX_RANK, f"{array.ndim} dimensions; an access pattern has at most {MAX_RANK}")
        return NkiTensor(array, self.storage, self.start_partition, is_reshaped or self.is_reshaped)

    def read(self, name: str) -> np.ndarray:
        """Return the values that an engine computes with, in float32, which is exact for integers up to 2**24."""
        return np.asarray(self.read_unchanged(name), np.float32)

    def read_unchanged(self, name: str) -> np.ndarray:
        """Return the values that an engine reads, in the tensor's dtype."""
        self.check_on_chip(name)
        last_launch().use(self.storage)
        return self.array

    def write(self, values: np.ndarray, is_product: bool = False, free_dimensions: int = MAX_FREE_DIMENSIONS) -> None:
        """Write values as an engine does, cast to the tensor's dtype. See `cast`."""
        self.check_on_chip("dst", free_dimensions)
        last_launch().use(self.storage)
        if self.storage.is_product is not None:
            self.is_product[...] = is_product
        self.array[...] = cast(np.asarray(values).reshape(self.shape), self.dtype, last_launch().random)

    def check_on_chip(self, name: str, free_dimensions: int = MAX_FREE_DIMENSIONS) -> None:
        """Check the limits that every operand of every compute engine has."""
        require(self.buffer.is_on_chip, f"{name} is in {self.buffer.value}; engines work on SBUF and PSUM")
        starts = (0,) if self.partitions > 64 else (0, 64) if self.partitions > 32 else (0, 32, 64, 96)
        require(
            self.start_partition in starts,
            f"{name}: {self.partitions} partitions start at {self.start_partition}, not one of {starts}",
        )
        free = self.ndim - 1
        require(free <= free_dimensions, f"{name}: {free} free dimensions; at most {free_dimensions}")
        require(
            self.free_size <= MAX_SBUF_ELEMENTS,
            f"{name}: {self.free_size} elements per partition; at most {MAX_SBUF_ELEMENTS}",
        )
        if self.buffer is Memory.PSUM:
            require(len(self.banks) == 1, f"{name} {self.shape} lies in {len(self.banks)} PSUM banks; at most 1")

    @property
    def banks(self) -> range:
        """The PSUM banks from the view's first byte to its last, counted from the start of its storage."""
        low, high = np.lib.array_utils.byte_bounds(self.array[:1])
        base = np.lib.array_utils.byte_bounds(self.storage.array[self.start_partition : self.start_partition + 1])[0]
        return range((low - base) // PSUM_BANK_BYTES, (high - base - 1) // PSUM_BANK_BYTES + 1)


def _same_view(other: np.ndarray, view: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Return the view of `other` that matches `view` of `base`. Both arrays have one shape and different item sizes."""
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // base.itemsize
    strides = tuple(stride // base.itemsize * other.itemsize for stride in view.strides)
    return np.ndarray(view.shape, other.dtype, other, offset * other.itemsize, strides)
