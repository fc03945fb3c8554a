"""Memory for many large tensors: a model's weights, laid out for fast reading once per token; and snapshots of
sequences, in pages that the system provides fast.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

HUGE_PAGE = 2**21
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
        size = sum(padded_bytes(shape, dtype) for shape, dtype in tensors)
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


def give_back_freed() -> None:
    """Return freed memory to the system. glibc would keep what was freed in pieces of less than 32 MB, which may add up
    to hundreds of megabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def padded_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a block, including the padding before the next one."""
    size = math.prod(shape) * dtype.itemsize
    return size + -size % _ALIGNMENT
