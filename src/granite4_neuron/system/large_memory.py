"""Memory for many large tensors: a model's weights, laid out for fast reading once per token, or in a mapped file; and
snapshots of sequences, in pages that the system provides fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from typing import BinaryIO

import torch

HUGE_PAGE = 2**21
_POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, since 5.14
_ALIGNMENT = 64  # bytes; a cache line, and the widest vector


class LargeMemory:
    """One block of memory, handed out from its start to its end.

    On Linux it asks for pages of 2 MiB. With pages of 4 KiB a processor that streams through weights looks up an
    address for about every four rows and reads a quarter slower, and the first write to memory takes twice as long. The
    part that is not handed out takes no memory.

    Args:
        tensors: shape and dtype of each tensor that it must have room for.
    """

    def __init__(self, tensors: Sequence[tuple[torch.Size, torch.dtype]]):
        size = block_bytes(tensors)
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memory
        self._start = self._next = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
        whole = size - size % HUGE_PAGE  # a last page that is only partly used would waste the rest
        if hasattr(mmap, "MADV_HUGEPAGE") and whole:
            memory.madvise(mmap.MADV_HUGEPAGE, self._next, whole)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor with a storage of its own."""
        start, self._next = self._next, self._next + padded_bytes(shape, dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    @property
    def used(self) -> memoryview:
        """The bytes that have been handed out."""
        return memoryview(self._memory)[self._start : self._next]


class MappedMemory(LargeMemory):
    """A file as memory, handed out from an offset on. Processes that map a file share its pages in the system's cache;
    what a process writes is its own.

    Args:
        file: open for reading. It may be replaced later, but not changed.
        offset: a multiple of 64.
    """

    def __init__(self, file: BinaryIO, offset: int):
        self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._start = self._next = offset
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # an older Linux maps each page where it is first read
                self._memory.madvise(_POPULATE_READ)


def give_back_freed() -> None:
    """Return freed memory to the system. glibc would keep what was freed in pieces of less than 32 MB, which may add up
    to hundreds of megabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def block_bytes(tensors: Sequence[tuple[torch.Size, torch.dtype]]) -> int:
    """Return the bytes that are handed out for tensors of these shapes and dtypes."""
    return sum(padded_bytes(shape, dtype) for shape, dtype in tensors)


def padded_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a block, including the padding before the next one."""
    size = math.prod(shape) * dtype.itemsize
    return size + -size % _ALIGNMENT
