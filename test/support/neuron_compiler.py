"""A compiler for TorchRuntime that records the graphs that TorchNeuron would get, and runs them on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from granite4_neuron.planning.analysis.torch_lowering import aot_backend, written_inputs


@dataclass
class Graph:
    """A graph, with its inputs and outputs when it first ran.

    step: the runtime's step. function: the name of its function in devices.torch.step_functions.
    arguments: its inputs before it ran. results: the values it wrote to inputs, in their order, then its outputs.
    """

    step: str
    function: str
    module: fx.GraphModule
    arguments: list[torch.Tensor] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)

    def run(self, *arguments: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.arguments:
            return self.module(*arguments)
        self.arguments = [argument.clone() for argument in arguments]
        outputs = self.module(*arguments)
        by_node = dict(zip(self.module.graph.find_nodes(op="placeholder"), arguments, strict=True))
        written = [by_node[write.args[0]] for write in written_inputs(self.module)]
        self.results = [each.clone() for each in (*written, *outputs)]
        return outputs


class Recorder:
    """A backend of torch.compile. `step` is the step of the graphs that are compiled next."""

    def __init__(self):
        self.step = ""
        self.graphs: list[Graph] = []
        self._backend = aot_backend(self._keep)
        self._function = ""

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable:
        self._function = _function_of(graph)
        return self._backend(graph, inputs)

    def _keep(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable:
        self.graphs.append(Graph(self.step, self._function, module))
        return self.graphs[-1].run


def _function_of(graph: fx.GraphModule) -> str:
    """Return the name of the function that was compiled: the outermost one in which a node was made."""
    traces = (node.meta.get("stack_trace") for node in graph.graph.nodes)
    lines = next(trace for trace in traces if trace).splitlines()
    return next(line.rsplit(" in ", 1)[1] for line in lines if " in " in line)
