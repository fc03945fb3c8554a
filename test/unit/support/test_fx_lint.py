"""Each fault that `test.support.fx_lint` looks for, planted once."""

import pytest
import torch

from granite4_neuron.planning.analysis.torch_lowering import aot_backend, written_inputs
from test.support.fx_lint import findings

ROWS = torch.tensor([1, 2], dtype=torch.int32)


def grouped(x):
    return torch._grouped_mm(x, x[None], offs=ROWS[:1])


FAULTS = {
    "is a sort": lambda x, state: x.sort(-1).values,
    "is a sort, topk": lambda x, state: x.topk(2).values,
    "is a sort, unique": lambda x, state: x.unique(),
    "is a running sum": lambda x, state: x.cumsum(-1),
    "has strides, split": lambda x, state: x.split((1, 3), -1)[1] * 2,
    "has strides, chunk": lambda x, state: x.chunk(2, -1)[1] * 2,
    "is a convolution": lambda x, state: torch.conv1d(x[None], x[:, :, None]),
    "is a product of groups": lambda x, state: grouped(x.bfloat16().repeat(4, 4)),
    "has strides": lambda x, state: x.as_strided((2, 2), (1, 2)) * 2,
    "is torch.float64": lambda x, state: x.double().sum(),
    "is torch.complex64": lambda x, state: torch.fft.fft(x).abs(),
    "has rank 5": lambda x, state: x[None, None, None] * 2,
    "is random": lambda x, state: x * torch.rand_like(x),
    "depends on values": lambda x, state: x.nonzero() * 2,
    "depends on values, item": lambda x, state: x * x.argmax().item(),
    "has an index in torch.bool": lambda x, state: x[x > 0] * 2,
    "has an index in torch.int64": lambda x, state: x.index_select(0, ROWS.long()),
    "has an index in torch.int64, gather": lambda x, state: x.gather(1, ROWS.long()[:, None]),
    "has an index in torch.int64, write": lambda x, state: state.index_put_((ROWS.long(),), x[:2]) * 2,
    "has 16 indices": lambda x, state: x.gather(1, torch.zeros(4, 4, dtype=torch.int32)),
    "has an index of each element": lambda x, state: state.index_copy_(0, ROWS.long(), x[:2]) * 2,
    "there is no output": lambda x, state: [state.copy_(x)][1:],
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.replace("torch.", ""))
def test_a_fault_is_found(fault):
    assert any(finding.endswith(fault.split(",")[0]) for finding in findings(graph_of(FAULTS[fault]), 4))


def graph_of(function):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    options = dict(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with torch.no_grad(), torch._dynamo.config.patch(**options):
        torch.compile(function, backend=aot_backend(keep), fullgraph=True)(torch.rand(4, 4), torch.rand(4, 4))
    return graphs[0]


class TestWrites:
    """Graphs that AOTAutograd does not make, but a pass might."""

    @pytest.fixture
    def graph(self):
        graph = graph_of(lambda x, state: state.mul_(x).sum() + x.sum())
        assert findings(graph, 4) == []
        return graph

    def test_a_second_write(self, graph):
        (write,) = written_inputs(graph)
        with graph.graph.inserting_after(write):
            graph.graph.call_function(write.target, write.args)
        assert f"{write.args[0]} is written 2 times" in findings(graph, 4)

    def test_a_use_after_the_write(self, graph):
        (write,) = written_inputs(graph)
        with graph.graph.inserting_after(write):
            graph.graph.call_function(torch.ops.aten.neg.default, (write.args[0],))
        assert findings(graph, 4) == [f"{write.args[0]} is used after it is written"]

    def test_another_write(self, graph):
        (write,) = written_inputs(graph)
        with graph.graph.inserting_before(write):
            negated = graph.graph.call_function(torch.ops.aten.neg_.default, (write.args[1],))
        assert findings(graph, 4) == [f"{negated} writes something that is not an input"]

    def test_an_input_as_output(self, graph):
        written = written_inputs(graph)[0].args[0]
        read = next(each for each in graph.graph.find_nodes(op="placeholder") if each is not written)
        next(iter(graph.graph.find_nodes(op="output"))).args = ((read,),)
        assert findings(graph, 4) == [f"{read} is an input and an output"]
