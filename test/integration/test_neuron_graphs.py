"""What TorchNeuron would get of the runtime for PyTorch devices: each graph with its writes, operators and numbers.

The models have one layer of each kind: layers of a kind share a graph, or have the same part of one.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import ATTENTION, MAMBA, GraniteMoeHybridConfig
from granite4_neuron.neuron.analysis.torch_lowering import aot_backend
from granite4_neuron.runtime.cpu import CPURuntime
from granite4_neuron.runtime.interface import Row
from granite4_neuron.runtime.torch_device import TorchRuntime
from test.support.checkpoints import DENSE, small_config
from test.support.fx_lint import findings
from test.support.neuron_compiler import Graph, Recorder, written_inputs
from test.support.stepping import random_tokens

pytestmark = pytest.mark.once

KINDS = (MAMBA, ATTENTION)
SEQUENCES = 8
BUCKETS = (128, 512)
WRITTEN_KINDS = {
    "embed": (),
    "mamba_layer": (MAMBA,),
    "attention_layer": (ATTENTION,),
    "head": (),
    "advance_layer": (MAMBA,),
    "run_step": KINDS,
    "run_advance": (MAMBA,),
}


def bundled():
    config = GraniteMoeHybridConfig.from_file(bundled_checkpoint() / "config.json")
    return replace(config, layer_types=KINDS, num_hidden_layers=len(KINDS))


def experts():
    """As many experts as h-small has: some steps fetch the chosen ones, some compute all, and some compute blocks."""
    return small_config(layer_types=KINDS, num_local_experts=72, num_experts_per_tok=3)


@dataclass(frozen=True)
class Case:
    """steps: what is traced, in order: each takes up the sequences that a prefill began."""

    name: str
    config: GraniteMoeHybridConfig
    steps: tuple[str, ...]
    options: dict = field(default_factory=dict)


FEW, ALL = ("prefill 128", "decode 8"), ("decode 8", "verify 4", "commit 4", "decode 8", "decode 1")
CASES = [
    Case("bundled-layer", bundled(), FEW),
    Case("bundled-model", bundled(), ("prefill 128", *ALL), dict(graphs="model")),
    Case("experts-layer", experts(), ("prefill 512", *ALL)),
    Case("experts-model", experts(), ("prefill 512", "decode 8"), dict(graphs="model")),
    # Prefill writes rows of the cache, and reads and writes recurrent state by slot; decode writes all of the cache.
    Case("select", small_config(layer_types=KINDS, **DENSE), FEW, dict(kv_write="select", prefill_by_view=False)),
]


class Run:
    """The steps of a case on a TorchRuntime and on a CPURuntime.

    graphs: all graphs of the former, which have run. differences: of logits, for each step.
    """

    def __init__(self, case: Case):
        self.config, self.differences = case.config, []
        recorder = Recorder()
        runtimes = (
            TorchRuntime(random_model(case.config), GenerationConfig(), BUCKETS, compiler=recorder, **case.options),
            CPURuntime(random_model(case.config), GenerationConfig()),
        )
        self.runtimes = runtimes
        self.states = [runtime.allocate(SEQUENCES, 1024) for runtime in runtimes]
        self.tokens = random_tokens(case.config.vocab_size, 2, 600).tolist()
        self.done = [0, 0]
        for step in case.steps:
            recorder.step = step
            kind, size = step.split()
            getattr(self, kind)(int(size))
        self.graphs: list[Graph] = recorder.graphs

    def prefill(self, bucket):
        for sequence in (0, 1):
            self._compare(*self._step([self._row(sequence, bucket - 20 - sequence)]))

    def decode(self, sequences):
        if sequences == SEQUENCES:
            self._compare(*self._step([self._row(1, 1), self._row(0, 1)]))
            return
        (ours, cpu), (state, cpu_state) = self.runtimes, self.states
        single = ours.allocate(1, 1024)
        ours.restore(single, [ours.snapshot(state, 1, self.done[0])], 1)
        row = self._row(0, 1)
        self._compare(ours.step(single, [row]), cpu.step(cpu_state, [row]))

    def verify(self, tokens):
        self.rows = [self._row(0, tokens - 2), self._row(1, tokens)]
        each = zip(self.runtimes, self.states, strict=True)
        self.verified = [runtime.verify(state, self.rows) for runtime, state in each]
        self._compare(*(verified.logits[1] for verified in self.verified))

    def commit(self, tokens):
        for runtime, state, verified in zip(self.runtimes, self.states, self.verified, strict=True):
            runtime.commit(state, verified, [1, tokens - 1])
        self.done = [row.start + accepted for row, accepted in zip(self.rows, (1, tokens - 1), strict=True)]

    def _row(self, sequence, count):
        start = self.done[sequence]
        self.done[sequence] += count
        return Row(sequence + 1, start, self.tokens[sequence][start : start + count])

    def _step(self, rows):
        return [runtime.step(state, rows) for runtime, state in zip(self.runtimes, self.states, strict=True)]

    def _compare(self, ours, expected):
        self.differences.append(float((ours - expected).abs().max()))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def run(request):
    return Run(request.param)


def test_numbers_are_the_cpu_runtimes(run):
    assert max(run.differences) <= 1e-5


def test_each_state_is_written_once(run):
    """Verification writes keys and values only, and a commit recurrent states only."""
    shapes = {
        kind: sorted(tuple(tensor.shape[1:]) for tensor in vars(layer).values())
        for kind, layer in zip(KINDS, run.states[0].layers, strict=True)
    }
    for graph in run.graphs:
        kinds = [kind for kind in WRITTEN_KINDS[graph.function] if (graph.step, kind) != ("verify 4", MAMBA)]
        written = [tuple(write.args[0].meta["val"].shape[1:]) for write in written_inputs(graph.module)]
        assert sorted(written) == sorted(shape for kind in kinds for shape in shapes[kind])


def test_nothing_is_forbidden(run):
    for graph in run.graphs:
        assert findings(graph.module, most_indices(graph, run.config)) == [], (graph.step, graph.function)


def most_indices(graph, config):
    """One for each choice of an expert and each key head of a token. Blocks of experts have further rows."""
    kind, size = graph.step.split()
    tokens = {"prefill": 1, "verify": SEQUENCES, "decode": 1}[kind] * int(size) if kind != "commit" else SEQUENCES
    return 15 * tokens * max(config.num_experts_per_tok, config.num_key_value_heads)


ROWS = torch.tensor([1, 2], dtype=torch.int32)


def grouped(x):
    return torch._grouped_mm(x, x[None], offs=ROWS[:1])


FAULTS = {
    "is a sort": lambda x, state: x.sort(-1).values,
    "is a sort, topk": lambda x, state: x.topk(2).values,
    "is a sort, unique": lambda x, state: x.unique(),
    "is a running sum": lambda x, state: x.cumsum(-1),
    "is a split": lambda x, state: x.split((1, 3), -1)[1] * 2,
    "is a split, chunk": lambda x, state: x.chunk(2, -1)[1] * 2,
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
