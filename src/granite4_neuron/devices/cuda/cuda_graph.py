"""CUDA graphs: kernels that are captured once and launched together. Also copies to the host, and tensor cores."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class CudaGraph:
    """A function of tensors that is captured once and replayed with other values in them.

    Args:
        function: takes all inputs. Other tensors that it uses must keep their addresses.
        from_host: the input on the host.
        others: further inputs, on the GPU.
        device: the GPU.
        pool: of `torch.cuda.graph_pool_handle`, of memory that graphs share which never run at the same time.

    `function` runs a few times with these inputs, so it must do no harm with them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        from_host: torch.Tensor,
        others: Sequence[torch.Tensor],
        device: torch.device,
        pool: torch.cuda._POOL_HANDLE | None,
    ):
        self._device = device
        self._pinned = from_host.pin_memory()
        self._from_host = self._pinned.to(device)
        self._others = [tensor.clone() for tensor in others]
        self._inputs = self._from_host, *self._others
        # The first runs compile or choose an algorithm, which cannot be captured.
        stream = _stream_of_captures(self._from_host.device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's or the one that writes snapshots to files, may call CUDA meanwhile. The stream
        # that torch would take is of whichever GPU was current when it was made.
        with (
            _no_garbage_collection(),
            torch.cuda.device(device),
            torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"),
        ):
            self._outputs = function(*self._inputs)
        self._is_copied = torch.cuda.Event()

    def replay(self, from_host: torch.Tensor, others: Sequence[torch.Tensor]) -> Any:
        """Run with other inputs. The outputs are overwritten when this graph, or another one, is replayed.

        The GPU may not have finished the previous replay. The copy of the input is not a part of the graph, so only
        that copy has to be waited for.
        """
        self._is_copied.synchronize()
        self._pinned.copy_(from_host)
        self._from_host.copy_(self._pinned, non_blocking=True)
        self._is_copied.record(torch.cuda.current_stream(self._device))
        for ours, given in zip(self._others, others, strict=True):
            ours.copy_(given)
        self._graph.replay()
        return self._outputs


@functools.cache
def _stream_of_captures(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for a GPU's first runs and captures, because cuBLAS keeps memory for every stream that it has
    seen.
    """
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: it might free another graph, whose memory cannot be released during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def start_copy(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor from a GPU through pinned memory. Return a function that waits for the copy only, not for
    work launched after it, and returns the tensor.
    """
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    is_copied = torch.cuda.Event()
    is_copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> torch.Tensor:
        is_copied.synchronize()
        return copied

    return wait


@contextmanager
def tensor_cores(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """In a bfloat16 model, let a GPU's tensor cores round the operands of float32 products to 11 bits (TF32).

    They accumulate in float32. Weights and the activations that they multiply have 8 bits, so only the products of the
    recurrence become less exact.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
