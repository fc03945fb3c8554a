"""The traced graphs that a compiler will see, and their costs."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.loading import set_parameter
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.cli import main
from granite4_neuron.config import published_config
from granite4_neuron.devices.graphs.operators import XLA
from granite4_neuron.devices.xla.runtime import XLARuntime
from granite4_neuron.errors import UserError
from granite4_neuron.model.binding import set_operators
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import DenseStep
from granite4_neuron.planning.analysis.graphs import report, trace_xla
from granite4_neuron.planning.analysis.hlo_cost import count, hlo_proto, hlo_text, tracer
from granite4_neuron.planning.analysis.hlo_lint import instructions as instructions_of
from granite4_neuron.planning.analysis.live_set import products
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import MambaState
from granite4_neuron.state.sizes import mamba_state_shapes
from test.support.checkpoints import CASES, DENSE, NEMOTRON_CASES, nemotron_config, small_config

pytestmark = pytest.mark.versions

pytest.importorskip("torch_xla", reason="torch_xla is not installed; graphs are traced with torch 2.9")
pytest.importorskip("jax", reason="jax is not installed; it counts the graphs")


def graphs_of(config, tp_degree=1, batch_size=1, buckets=(64,), max_length=256, dtype=torch.float32, **options):
    return list(report(config, dtype, tp_degree, batch_size, buckets, max_length, **options))


def test_sizes_and_order():
    config = small_config()
    prefill, longer, decode = graphs_of(config, batch_size=3, buckets=(64, 128))
    assert [graph.graph for graph in (prefill, longer, decode)] == ["prefill 64", "prefill 128", "decode, batch 3"]
    weights = sum(parameter.numel() * 4 for parameter in random_model(config).parameters())
    assert prefill.weight_bytes == longer.weight_bytes == decode.weight_bytes == weights
    assert prefill.state_bytes == decode.state_bytes
    assert decode.cost.flops < prefill.cost.flops < longer.cost.flops


def test_they_are_the_graphs_that_the_runtime_runs(monkeypatch):
    """The graphs that the runtime hands to XLA, with two layers of each kind, have the same counts."""
    import torch_xla

    config = small_config(layer_types=("mamba", "attention", "mamba", "attention"))
    runtime = XLARuntime(random_model(config), GenerationConfig(), (16,))
    state, counted = runtime.allocate(3, 50), []

    def run(outputs, *arguments, **options):
        counted.append(count(hlo_proto(outputs)))
        sync(outputs, *arguments, **options)

    sync = torch_xla._XLAC._xla_sync_multi
    monkeypatch.setattr(torch_xla._XLAC, "_xla_sync_multi", run)
    runtime.step(state, [Row(2, 0, [3] * 9)])
    runtime.step(state, [Row(2, 9, [3])])
    runtime.commit(state, runtime.verify(state, [Row(2, 10, [3] * 4)]), [2])
    graphs = graphs_of(config, batch_size=3, buckets=(16,), max_length=state.max_length, verified_tokens=4)
    assert [cost.instructions for cost in counted] == [graph.cost.instructions for graph in graphs]
    for cost, graph in zip(counted, graphs, strict=True):  # XLA adds up in float32
        assert cost.flops == pytest.approx(graph.cost.flops, rel=1e-5)
        assert cost.bytes_accessed == pytest.approx(graph.cost.bytes_accessed, rel=1e-5)
    assert {graph.state_bytes for graph in graphs} == {sum(tensor.nbytes for tensor in state.tensors())}


def test_decode_advances_the_recurrent_state_in_place():
    """A copy of one layer's state would be half of the whole; other temporaries of a step are an eighth."""
    _, decode = graphs_of(small_config(layer_types=("mamba",) * 2, mamba_d_state=128, **DENSE), batch_size=8)
    assert decode.temporary_bytes < decode.state_bytes / 4


def test_verification_reads_little_more_than_decode():
    """This holds at h-small's sizes, on one of four ranks. A batch of eight needs most of the experts anyway."""
    config = published_config("granite-4.0-h-small")
    options = dict(tp_degree=4, batch_size=8, buckets=(), max_length=2048, dtype=torch.bfloat16, verified_tokens=4)
    decode, verify, commit = graphs_of(config, **options)
    assert verify.cost.bytes_accessed <= 1.3 * decode.cost.bytes_accessed
    assert commit.graph == "commit 4, batch 8" and commit.cost.bytes_accessed <= 0.35 * decode.cost.bytes_accessed
    assert set(commit.components) == {"mamba", "rest"} and commit.bytes_ratio >= 1


def test_a_model_without_recurrent_state_commits_nothing():
    config = small_config(layer_types=("attention",) * 2, **DENSE)
    assert [graph.graph for graph in graphs_of(config, verified_tokens=4)][1:] == [
        "decode, batch 1",
        "verify 4, batch 1",
    ]


def test_no_loop_over_tokens():
    """Within a chunk, the number of instructions does not depend on the tokens. Each chunk adds a constant."""
    one, one_too, two, three, four = graphs_of(small_config(**DENSE), buckets=(65, 128, 256, 384, 512))[:5]
    assert one.cost.instructions == one_too.cost.instructions
    assert four.cost.instructions - three.cost.instructions == three.cost.instructions - two.cost.instructions


def test_temporaries_grow_linearly_with_the_bucket():
    config = small_config(**DENSE)
    reports = graphs_of(config, buckets=(256, 512, 1024), max_length=1024)[:3]
    half, whole, double = (graph.temporary_bytes for graph in reports)
    assert double - whole <= 2.2 * (whole - half)


def test_temporaries_of_a_long_context_are_those_of_a_chunk():
    """At any length, scores exist for one block of the context at a time, and the cache is written in place."""
    config = small_config(layer_types=("mamba", "attention"), **DENSE)
    short, long = (graphs_of(config, buckets=(1024,), max_length=length) for length in (16384, 65536))
    for before, after in zip(short, long, strict=True):
        assert after.state_bytes > 3.5 * before.state_bytes
        assert after.temporary_bytes <= 1.05 * before.temporary_bytes


@pytest.mark.parametrize("case", (*CASES, *NEMOTRON_CASES), ids=lambda case: case.name)
def test_graphs_avoid_what_the_neuron_compiler_handles_badly(case):
    for graph in graphs_of(case.config(), batch_size=3, buckets=(300,), dtype=torch.bfloat16, max_length=1500):
        assert graph.findings == ()


class TestOneMambaLayer:
    """A layer of h-small, a rank of 4, one sequence, bfloat16. Counted before optimisation, to count the model."""

    CONFIG = published_config("h-small")

    def counted(self, tokens):
        """Count the whole layer as prefill graphs have it, or with one token as the decode graph has it."""
        placeholder = tracer()
        with torch.device("meta"):
            layer = Mamba2(self.CONFIG, Parallel(0, 4))
        set_operators(layer, XLA)
        for name, weight in list(layer.named_parameters()):
            set_parameter(layer, name, placeholder(tuple(weight.shape), torch.bfloat16))
        conv_shape, ssm_shape = mamba_state_shapes(self.CONFIG, tp_degree=4)
        state = MambaState(placeholder((1, *conv_shape), torch.bfloat16), placeholder((1, *ssm_shape), torch.float32))
        positions, lengths, slots = (placeholder(shape, torch.int64) for shape in ((1, tokens), (1,), (1,)))
        sequences = None if tokens == 1 else slots - 1
        step = DenseStep(positions, lengths, slots, kv_length=tokens, sequences=sequences)
        hidden_states = placeholder((1, tokens, self.CONFIG.hidden_size), torch.bfloat16)
        with torch.no_grad():
            output, _ = layer(hidden_states, step, state)
        return count(hlo_proto([output, state.conv_state, state.ssm_state]))

    def test_prefill(self):
        cost = self.counted(128)
        assert cost.flops <= 7.2e9 and cost.bytes_accessed <= 2.75e8
        cost = self.counted(512)
        assert cost.flops <= 29e9 and cost.bytes_accessed <= 8.8e8
        assert self.counted(2048).instructions == cost.instructions

    def test_decode(self):
        # The weights are 5.3e7 of it, and reading and writing the state is 2.1e6.
        assert self.counted(1).bytes_accessed <= 6.81e7


class TestWholeGraphs:
    """The cost of a step of h-small on a rank of 4 in bfloat16, as a multiple of the least possible."""

    @pytest.fixture(scope="class")
    @classmethod
    def graphs(cls):
        config = published_config("h-small")
        reports = report(config, torch.bfloat16, 4, 1, (128, 512), 2048)
        return dict(zip(("128", "512", "decode"), reports, strict=True))

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls):
        """Return the graph of decode that multiplies with all experts."""
        config = published_config("h-small")

        def trace(graph):
            return trace_xla(replace(graph, experts_decode="all"))

        (decode,) = report(config, torch.bfloat16, 4, 1, (), 2048, trace_graph=trace)
        return decode

    def test_flops(self, graphs, whole):
        """One token's experts are fetched, unless all are asked for."""
        assert graphs["128"].flops_ratio <= 3.8
        assert graphs["512"].flops_ratio <= 3.8
        assert graphs["decode"].flops_ratio <= 1.02
        assert whole.flops_ratio <= 3.6

    def test_bytes(self, graphs, whole):
        """A fetched weight counts three times, because it is read, written and read again."""
        assert graphs["128"].bytes_ratio <= 2.6
        assert graphs["512"].bytes_ratio <= 6.5
        assert graphs["decode"].bytes_ratio <= 2.01
        assert whole.bytes_ratio <= 3.76

    def test_bytes_if_element_wise_work_moves_nothing(self, graphs, whole):
        assert 1 <= graphs["128"].fused_ratio <= 1.7
        assert 1 <= graphs["512"].fused_ratio <= 3.3
        assert 1 <= graphs["decode"].fused_ratio <= 1.9
        assert 1 <= whole.fused_ratio <= 3.65

    def test_parts_add_up(self, graphs):
        for graph in graphs.values():
            parts = graph.components.values()
            assert sum(part.flops for part in parts) == pytest.approx(graph.cost.flops)
            assert sum(part.bytes_accessed for part in parts) == pytest.approx(graph.cost.bytes_accessed)
            assert sum(part.fused_bytes for part in parts) == pytest.approx(graph.cost.fused_bytes)
            assert all(part.bytes_accessed > 0 and part.instructions > 0 for part in parts)

    def test_products_with_weights_are_those_of_the_live_set(self, graphs):
        """The products' operands and results hold all tokens, in bfloat16. All experts are one product here."""
        instructions = instructions_of(hlo_text(graphs["512"].few.proto))
        layouts = {"reshape", "transpose", "convert", "broadcast"}

        def is_weight(name):
            while instructions[name].opcode in layouts:
                name = instructions[name].operands[0]
            return instructions[name].opcode == "parameter"

        found = set()
        for product in (each for each in instructions.values() if each.opcode == "dot"):
            dtype, (*_, tokens, operand) = instructions[product.operands[0]].shapes[0]
            if is_weight(product.operands[1]) and tokens == 512 and dtype == "bf16":
                assert product.shapes[0][0] == "bf16"
                found.add((operand, product.shapes[0][1][-1]))
        query, key, all_experts, width = 1024, 256, 72 * 2 * 192, 192
        expected = {(each.operand, each.result) for each in products(published_config("h-small"), 4)}
        expected -= {(4096, query + 2 * key), (4096, 2 * width + 4096)}
        assert found == expected | {(4096, query), (4096, key), (4096, all_experts), (width, 4096)}
        assert [graph.prompt_tokens for graph in graphs.values()] == [128, 512, None]

    def test_graphs_avoid_what_the_neuron_compiler_handles_badly(self, graphs, whole):
        assert [graph.findings for graph in (*graphs.values(), whole)] == [()] * 4


def test_components_of_layers_of_one_part():
    """MLPs have two widths: one is a layer by itself, two are beside experts. Their FLOPs are those of the products."""
    config = nemotron_config()
    prefill, decode, verify, commit = graphs_of(config, verified_tokens=4)
    for graph in (prefill, decode, verify):
        assert set(graph.components) == {"mamba", "attention", "experts", "shared MLP", "embedding", "head", "rest"}
        assert sum(part.flops for part in graph.components.values()) == pytest.approx(graph.cost.flops)
    assert decode.components["shared MLP"].flops == pytest.approx(2 * 2 * 64 * (72 + 2 * 80), rel=0.05)
    assert set(commit.components) == {"mamba", "rest"}


def test_a_rank_does_its_share():
    config = published_config("h-350m")
    whole, part = (graphs_of(config, degree, dtype=torch.bfloat16)[0] for degree in (1, 4))
    assert 0.25 <= part.weight_bytes / whole.weight_bytes < 0.27
    assert 0.25 <= part.cost.flops / whole.cost.flops < 0.28
    with pytest.raises(UserError, match="tp_degree is 3"):
        graphs_of(config, 3)


def test_command(tmp_path, capsys):
    file = tmp_path / "graphs.json"
    arguments = ("graphs", "--model", "h-350m", "--tp-degree", "2", "--buckets", "64", "--json", str(file))
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "prefill 64" in output and "decode" in output and "one rank of 2, bfloat16" in output
    assert "live set" in output
    prefill, decode = json.loads(file.read_text())
    assert (prefill["graph"], decode["graph"], decode["live_set"]) == ("prefill 64", "decode, batch 1", None)
    assert prefill["live_set"]["live"] == 64 * 2 * (2 * 768 + 2 * 1024)
