"""What a compiler behind torch.compile gets of a graph, in TorchNeuron's way: AOTAutograd keeps the writes to inputs.

Source: the design of TorchNeuron's backend, as far as it is known; TorchNeuron itself is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd

aten = torch.ops.aten

# Those of TorchNeuron's that the model's operators could meet. Its decomposition of split is not among them: a split
# would become slices, and is to be seen.
_DECOMPOSED = (
    aten.unbind,
    aten.embedding,
    aten.index_add,
    aten._unsafe_index,
    aten._unsafe_index_put,
    aten.silu,
    aten.clamp_min,
    aten.clamp_max,
    aten.logsumexp,
    aten.lerp,
)

Compile = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Sequence[torch.Tensor]]]


def aot_backend(compile: Compile) -> Callable[..., Any]:
    """Return a backend of torch.compile.

    Args:
        compile: returns a function that computes what a graph of ATen operators does. Each input that the graph writes
            ends in a `copy_` to its placeholder.
    """

    def compile_boxed(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        compiled = compile(graph, inputs)

        def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return compiled(*arguments)

        run._boxed_call = True  # AOTAutograd gives such functions a list, which they may empty
        return run

    return aot_autograd(
        fw_compiler=compile_boxed,
        inference_compiler=compile_boxed,
        decompositions=get_decompositions(_DECOMPOSED),
        keep_inference_input_mutations=True,
    )


def written_inputs(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of `graph` that copy a value to an input."""
    calls = graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return [node for node in calls if node.args[0].op == "placeholder"]
