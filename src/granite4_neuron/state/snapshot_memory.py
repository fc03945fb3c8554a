"""Memory for the recurrent states of snapshots on a CPU."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch

from granite4_neuron.system.large_memory import HUGE_PAGE, LargeMemory, padded_bytes


class _Place(NamedTuple):
    start: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype


class SnapshotMemory:
    """Gives each snapshot of a model's states a block of its own.

    It keeps at most one free block: the block of a deleted snapshot, or one that `make_ready` has allocated. The first
    write to memory fresh from the system takes several times as long as a later write, and ten times longer still in a
    virtual machine that has to get the memory from its host. So a separate thread does the first write while steps run.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._num_bytes = 0
        self._ready: torch.Tensor | None = None  # [_num_bytes], uint8
        self._writing: threading.Thread | None = None  # to it

    def take(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return uninitialised tensors of these shapes and dtypes; none if they are small, because then any memory is
        fast.

        Args:
            like: with the same names, shapes and dtypes in every call.
        """
        if not self._places:
            self._lay_out(like)
        if self._num_bytes < HUGE_PAGE:
            return {}
        self.wait()
        block, self._ready = self._ready, None
        return self._lend(self._new() if block is None else block)

    def make_ready(self) -> None:
        """Begin to preallocate the next block. Does nothing before the first `take`, when the size is still unknown."""
        if self._ready is None and self._num_bytes >= HUGE_PAGE:
            self.wait()
            self._ready = self._new()
            self._writing = threading.Thread(target=_write_to_pages, args=[self._ready])
            self._writing.start()

    def wait(self) -> None:
        """Wait until the process has the block that `make_ready` began to preallocate."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def give_back(self) -> None:
        """Free the unused block."""
        self._ready = None

    def _lay_out(self, like: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in like.items():
            self._places[name] = _Place(self._num_bytes, tensor.shape, tensor.dtype)
            self._num_bytes += padded_bytes(tensor.shape, tensor.dtype)

    def _new(self) -> torch.Tensor:
        about = torch.Size([self._num_bytes]), torch.uint8
        return LargeMemory([about]).empty(*about)

    def _lend(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        view = block.numpy().data  # each tensor keeps it alive
        weakref.finalize(view, self._take_back, block).atexit = False
        return {
            name: torch.frombuffer(view, dtype=dtype, count=shape.numel(), offset=start).view(shape)
            for name, (start, shape, dtype) in self._places.items()
        }

    def _take_back(self, block: torch.Tensor) -> None:
        if self._ready is None:
            self._ready = block


@torch.inference_mode()
def _write_to_pages(block: torch.Tensor) -> None:
    block[:: mmap.PAGESIZE].zero_()  # a byte of each page; other threads run meanwhile
