"""A captured sequence of kernels on a GPU, which is launched as one; copies to the host; the precision of products."""

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
        function: of all inputs. Tensors that are not among them have to stay where they are.
        from_host: the input on the host.
        others: further inputs, on the GPU.
        device: the GPU.

    The inputs are such that `function` may be run without harm: it is run a few times.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        from_host: torch.Tensor,
        others: Sequence[torch.Tensor],
        device: torch.device,
    ):
        self._device = device
        self._pinned = from_host.pin_memory()
        self._from_host = self._pinned.to(device)
        self._others = [tensor.clone() for tensor in others]
        self._inputs = self._from_host, *self._others
        # First runs compile or choose an algorithm, and neither can be captured.
        stream = _stream_of_first_runs(self._from_host.device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of NCCL, may call CUDA meanwhile.
        with _no_garbage_collection(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs)
        self._is_copied = torch.cuda.Event()

    def replay(self, from_host: torch.Tensor, others: Sequence[torch.Tensor]) -> Any:
        """Run with other inputs. The outputs are overwritten when this graph, or another one, is replayed.

        The GPU may not have finished the replay before this one: the copy of the input is no part of the graph, so that
        only it has to be waited for.
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
def _stream_of_first_runs(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all graphs: cuBLAS keeps memory for every stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage: another graph may be in it, whose memory cannot be given back during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor from a GPU, through memory that is faster for that, and wait for it."""
    return start_copy(tensor)()


def start_copy(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor from a GPU as `to_host` does; return what waits for the copy, and not for what is launched
    after it.
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
    """Have a GPU's tensor cores round the operands of products in float32 to 11 bits, in a model of bfloat16 only.

    They add in float32. Weights, and what these are multiplied with, have 8 bits; so only the products of the
    recurrence are less exact.
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
