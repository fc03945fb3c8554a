"""A captured sequence of kernels on a GPU, which is launched as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class CudaGraph:
    """A function of tensors that is captured once and replayed with other values in them.

    Args:
        function: returns tensors, in any nesting of lists and tuples. Tensors that are not its arguments have to stay
            where they are.
        inputs: on the GPU, with values for which `function` may be run without harm: it is run a few times.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]):
        self._inputs = [tensor.clone() for tensor in inputs]
        # What runs for the first time compiles or chooses an algorithm, and neither can be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(*self._inputs)

    def replay(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run with other inputs, which may be on the host; return copies of the outputs."""
        for ours, given in zip(self._inputs, inputs, strict=True):
            ours.copy_(given, non_blocking=True)
        self._graph.replay()
        return tree_map_only(torch.Tensor, torch.clone, self._outputs)
