"""The graphs that TorchNeuron would get of the runtime for PyTorch devices, with their writes, operators and numbers.

The models have one layer of each kind: layers of a kind share a graph, or have the same part of one.
"""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.commands.cli import main
from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig, config_from_file, published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.graphs.operators import INPUT_FIRST, LOOPS, expert_path
from granite4_neuron.devices.torch import runtime as torch_runtime
from granite4_neuron.devices.torch.options import kv_write_of
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.model.parameters import matmul_weights
from granite4_neuron.ops.sampling import Choice, choose
from granite4_neuron.planning.analysis import graphs, hlo_lint, torch_graphs, torch_lowering
from granite4_neuron.planning.analysis.hlo_cost import count, hlo_text
from granite4_neuron.planning.analysis.torch_graphs import trace_torch
from granite4_neuron.planning.analysis.torch_lowering import hlo_proto_of, lower, written_inputs
from granite4_neuron.runtime.interface import UNDECIDED, Row
from test.support.checkpoints import DENSE, small_config
from test.support.fx_lint import findings
from test.support.neuron_compiler import Graph, Recorder
from test.support.stablehlo import execute
from test.support.stablehlo import findings as stablehlo_findings
from test.support.stepping import random_tokens

KINDS = (MAMBA, ATTENTION)
SEQUENCES = 8
BUCKETS = (128, 512)
WRITTEN_KINDS = {
    "embed": (),
    "mamba_layer": (MAMBA,),
    "attention_layer": (ATTENTION,),
    "head": (),
    "choosing_head": (),
    "draw": (),
    "advance_layer": (MAMBA,),
    "run_step": KINDS,
    "run_advance": (MAMBA,),
}


def bundled():
    config = config_from_file(bundled_checkpoint() / "config.json")
    return replace(config, layer_types=KINDS, num_hidden_layers=len(KINDS))


def experts():
    """With h-small's number of experts, some steps fetch the chosen ones, some compute all, and some compute blocks."""
    return small_config(layer_types=KINDS, num_local_experts=72, num_experts_per_tok=3, intermediate_size=1024)


@dataclass(frozen=True)
class Case:
    """steps: the traced steps in order; each continues the sequences that a prefill began."""

    name: str
    config: ModelConfig
    steps: tuple[str, ...]
    options: dict = field(default_factory=dict)


ALL = ("decode 8", "verify 4", "commit 4", "decode 8", "decode 1")
# Each form of graphs with one of the models: a second takes long to trace, and has the same parts.
EVERY_STEP = Case("bundled-model", bundled(), ("prefill 128", "decode 8", "draw 8", *ALL[1:]), dict(graphs="model"))
CASES = [
    Case("a-prompt-and-a-token", bundled(), ("prefill 128", "decode 1"), dict(graphs="model")),
    pytest.param(EVERY_STEP, marks=pytest.mark.slow, id=EVERY_STEP.name),
    pytest.param(Case("experts-layer", experts(), ("prefill 512", *ALL)), marks=pytest.mark.slow, id="experts-layer"),
]


class Run:
    """The steps of a case on a TorchRuntime and on a CPURuntime.

    graphs: all graphs that the TorchRuntime has run. differences: of logits, for each step.
    """

    def __init__(self, case: Case):
        self.config, self.differences = case.config, []
        recorder = Recorder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_runtime, "LOOPS", INPUT_FIRST)  # the CPU computes with the Neuron device's operators
            options = dict(kv_write=kv_write_of(None, "neuron"), compiler=recorder, **case.options)
            ours = TorchRuntime(random_model(case.config), GenerationConfig(), BUCKETS, **options)
        runtimes = ours, CPURuntime(random_model(case.config), GenerationConfig())
        self.runtimes = runtimes
        self.states = [runtime.allocate(SEQUENCES, 1024) for runtime in runtimes]
        for tensor in self.states[0].tensors():
            tensor.zero_()  # unused slots are computed and compared too
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

    def draw(self, sequences):
        ours, cpu = self.runtimes
        draws = Choice(0.7, 20, 0.9, 0.01, seed=2**63 - 25, place=700), Choice(1e30, top_k=20)
        rows = [replace(self._row(sequence, 1), draw=draw) for sequence, draw in zip((1, 0), draws, strict=True)]
        decoded = ours.decode(self.states[0], rows)
        expected = cpu.step(self.states[1], rows)
        self._compare(decoded.logits((0, 1)), expected)
        [chosen] = choose(list(expected[:1]), draws[:1])
        assert decoded.tokens() == [chosen.token, UNDECIDED]

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


@pytest.mark.slow
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
        chooses = graph.step.startswith("decode") and graph.function in ("choosing_head", "run_step")
        chosen = [()] * (chooses or graph.function == "draw")
        assert sorted(written) == sorted([*chosen, *(shape for kind in kinds for shape in shapes[kind])])


def test_nothing_is_forbidden(run):
    for graph in run.graphs:
        assert findings(graph.module, most_indices(graph, run.config)) == [], (graph.step, graph.function)


def most_indices(graph, config):
    """Return the most indices that an operator may have.

    They are one for each key head of a token, for each expert that it chose, or for each row of a block of experts.
    """
    kind, size = graph.step.split()
    tokens = int(size) if kind in ("prefill", "decode") else SEQUENCES * int(size)
    most = tokens * max(config.num_key_value_heads, config.num_experts_per_tok)
    if not config.num_local_experts:
        return most
    sizes = config.num_experts_per_tok, config.num_local_experts, config.intermediate_size
    path = expert_path(tokens, *sizes, has_gate=config.has_gated_mlp)
    return max(most, path.capacity * max(config.num_local_experts, path.num_blocks))


def needs_tools():
    for package in ("torch_mlir", "jax"):
        pytest.importorskip(package, reason=f"{package} is not installed; the extra dev has it")


@pytest.fixture(scope="module")
def lowered(run):
    needs_tools()
    return [(graph, lower(graph.module)) for graph in run.graphs]


class TestStableHLO:
    """The same graphs, lowered by torch-mlir to StableHLO."""

    def test_nothing_is_forbidden(self, run, lowered):
        for graph, module in lowered:
            assert stablehlo_findings(module.text, most_indices(graph, run.config)) == [], (graph.step, graph.function)

    @pytest.mark.slow
    def test_numbers_equal_torchs(self, lowered):
        for graph, module in lowered:
            results = execute(module.text, graph.arguments)
            for ours, expected in zip(results, graph.results, strict=True):
                np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5, err_msg=f"{graph.step} {graph.function}")

    def test_each_state_has_its_own_memory_again(self, lowered):
        for graph, module in lowered:
            assert sorted(module.donated.values()) == list(range(len(written_inputs(graph.module))))
            for number, result in module.donated.items():
                assert graph.arguments[number].shape == graph.results[result].shape


class TestExpertsOfDecodedTokens:
    """h-small's decode on a rank of four, in StableHLO, at its real sizes."""

    def found(self, batch_size, *form):
        needs_tools()
        config = published_config("h-small")
        one_layer = replace(config, layer_types=(ATTENTION,), num_hidden_layers=1, vocab_size=1024)
        traced = trace_torch(graphs.Graph("decode", 1, one_layer, torch.bfloat16, 4, batch_size, 1024, *form))
        return hlo_lint.findings(hlo_text(traced.proto), True, config.num_local_experts, traced.states)

    @pytest.mark.slow
    @pytest.mark.parametrize(("batch_size", "form", "gathers"), [(1, None, 2), (1, "all", 0), (3, None, 0)])
    def test_one_or_two_tokens_fetch_weights_by_index(self, batch_size, form, gathers):
        """This is the default; more tokens, or one with "all", do not."""
        found = self.found(batch_size, form)
        assert [finding.partition(" ")[2] for finding in found] == [
            "is a gather of experts' weights at places that depend on data."
        ] * gathers


@pytest.mark.slow
def test_a_transposed_weight_is_found(monkeypatch):
    """Every matrix of a layer that lies [out, in] is found, and the bytes of its transpose are counted."""
    needs_tools()
    config = replace(bundled(), layer_types=(MAMBA,), num_hidden_layers=1)
    graph = graphs.Graph("decode", 1, config, torch.bfloat16, 1, 8, 1024)
    stored, traced = [], []
    for operators in (INPUT_FIRST, LOOPS):
        monkeypatch.setattr(torch_graphs, "INPUT_FIRST", operators)
        traced.append(trace_torch(graph))
        stored.append(traced[-1].weight_bytes)
    found = [hlo_lint.findings(hlo_text(each.proto), True, states=each.states) for each in traced]
    transposes = [finding for finding in found[1] if finding.endswith("is a transpose of a weight.")]
    # in_proj, out_proj, router, the first matrices of MLP and experts, the second ones, and the head
    assert (found[0], len(transposes)) == ([], 8)
    head = config.vocab_size * config.hidden_size * torch.bfloat16.itemsize
    assert stored[0] - stored[1] == head  # a tied head has values of its own
    first, second = (count(each.proto, each.states).fused_bytes for each in traced)
    matrices = sum(one.nbytes(torch.bfloat16.itemsize) for one in matmul_weights(config).values())
    assert second - first == pytest.approx(2 * matrices, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["index", "rows"])
def test_a_scatter_of_single_elements_is_found(form, monkeypatch):
    """TorchNeuron makes one of each indexed write, for keys and for values."""
    needs_tools()
    monkeypatch.setattr(torch_graphs, "kv_write_of", lambda *_: form)
    config = replace(bundled(), layer_types=(ATTENTION,), num_hidden_layers=1)
    traced = trace_torch(graphs.Graph("decode", 1, config, torch.bfloat16, 1, 8, 1024))
    found = hlo_lint.findings(hlo_text(traced.proto), True, states=traced.states)
    assert [finding.partition(" ")[2] for finding in found] == ["is a scatter of single elements."] * 2


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 1), (1,), (1, 2), (2,)])
def test_an_indexed_write_is_torchs(axes):
    """The decomposition that stands for TorchNeuron's writes the same elements."""
    tensor = torch.randn(5, 3, 7, 4)
    chosen = {0: torch.tensor([[0], [2]]), 1: torch.tensor([[1, 2, 0]]), 2: torch.tensor([-1, 3, 5])}
    indices = [chosen[axis] if axis in axes else None for axis in range(axes[-1] + 1)]
    place = tuple(slice(None) if index is None else index for index in indices)
    expected, values = tensor.clone(), torch.randn_like(tensor[place])
    expected[place] = values
    assert torch.equal(torch_lowering._index_put(tensor, indices, values), expected)


@pytest.mark.slow
class TestReport:
    """`granite4-neuron graphs --backend torch` reports the graphs that run."""

    @pytest.mark.parametrize("run", [EVERY_STEP], indirect=True, scope="module", ids=lambda case: case.name)
    def test_its_graphs_are_those_that_the_runtime_runs(self, run):
        needs_tools()
        for kind, size in (("decode", 8), ("commit", 4)):
            ran = next(graph for graph in run.graphs if graph.step == f"{kind} {size}")
            tokens = 1 if kind == "decode" else size
            traced = trace_torch(graphs.Graph(kind, tokens, run.config, torch.float32, 1, SEQUENCES, 1024))
            assert count(traced.proto) == count(hlo_proto_of(lower(ran.module).text))

    def test_the_command(self, tmp_path):
        needs_tools()
        save_model(random_model(small_config(layer_types=(ATTENTION,), **DENSE)), tmp_path / "model")
        sizes = ("--model", str(tmp_path / "model"), "--buckets", "32", "--max-length", "64")
        assert main(["graphs", "--backend", "torch", *sizes, "--json", str(tmp_path / "graphs")]) == 0
        prefill, decode = json.loads((tmp_path / "graphs").read_text())
        assert (prefill["graph"], decode["graph"]) == ("prefill 32", "decode, batch 1")
        assert prefill["findings"] == decode["findings"] == []
        assert prefill["cost"]["flops"] > prefill["minimum"]["flops"] > decode["cost"]["flops"] > 0
