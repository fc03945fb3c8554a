"""The plan for a core's memory, compared with the real sizes of the model and its state."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from granite4_neuron.checkpoint.sharding import rank_slice
from granite4_neuron.cli import main
from granite4_neuron.config import GraniteMoeHybridConfig, family_names
from granite4_neuron.errors import UserError
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.neuron.analysis import hlo_cost, plan
from granite4_neuron.neuron.analysis.graph_memory import MICROCODE_BYTES
from granite4_neuron.neuron.analysis.plan import find_temporaries
from granite4_neuron.neuron.compiled_graphs import GraphOptions
from granite4_neuron.state.hybrid_state import HybridState
from test.support.checkpoints import small_config

ROOT = Path(__file__).parents[4]
FEWEST = GraphOptions(context_buckets=(2048,), token_buckets=(131072,))
TEMPORARIES = plan.Temporaries(prefill=2 * 10**9, decode=10**8, decode_of_a_sequence=10**8)


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch):
    """Leave the graphs out. They take a minute to trace and have a test of their own."""
    monkeypatch.setattr(plan, "find_temporaries", lambda *arguments: None)


@pytest.fixture(params=[None, TEMPORARIES], ids=["no graphs", "graphs"])
def temporaries(request, no_graphs, monkeypatch):
    """Return the temporaries that the graphs report, if there are any."""
    monkeypatch.setattr(plan, "find_temporaries", lambda *arguments: request.param)
    return request.param


def planned(name, **changes):
    config = GraniteMoeHybridConfig.from_family(name)
    values = dict(instance="trn2.3xlarge", tp_degree=4, batch_size=1, context=config.max_position_embeddings)
    values["options"] = GraphOptions()
    return plan.plan(config, torch.bfloat16, **{**values, **changes})


@pytest.mark.parametrize("name", family_names())
def test_bytes_are_those_of_the_tensors(name):
    config, result = GraniteMoeHybridConfig.from_family(name), planned(name, batch_size=3, context=1000)
    with torch.device("meta"):
        whole = GraniteMoeHybridForCausalLM(config)
        state = HybridState.allocate(config, 2, 1000, torch.bfloat16, "meta", tp_degree=4)  # and the null slot
    weights = [rank_slice(name, weight, config, 0, 4) for name, weight in whole.named_parameters()]
    if config.tie_word_embeddings:
        weights.append(weights[0])
    assert result.weights == sum(weight.numel() * 2 for weight in weights)
    assert result.state + 1000 * result.token == sum(tensor.nbytes for tensor in state.tensors()) // 3


@pytest.mark.usefixtures("temporaries")
def test_h_small_has_room_for_its_whole_context():
    """It has with one graph of each kind. All of NxD Inference's own are too much beside a step's temporaries."""
    result = planned("h-small", options=FEWEST)
    assert result.context == 131072 and result.fits and result.longest_context == 131072
    assert result.verdict().startswith("It fits")
    result = planned("h-small")
    assert [len(result.graphs), len(result.with_fewest_graphs.graphs)] == [24, 3]
    assert result.with_fewest_graphs.total == planned("h-small", options=FEWEST).total
    if result.temporaries is not None:
        assert "with fewer graphs it does" in result.verdict()
        assert "--context-buckets 2048 --token-buckets 131072" in result.verdict()


@pytest.mark.usefixtures("temporaries")
@pytest.mark.parametrize("batch_size", [1, 16, 40])
def test_limits_are_the_largest_that_fit(batch_size):
    result = planned("1b", batch_size=batch_size)
    longest = planned("1b", batch_size=batch_size, context=result.longest_context)
    assert longest.fits
    if result.longest_context < result.max_context:
        assert not planned("1b", batch_size=batch_size, context=result.longest_context + 1).fits
        assert str(f"{result.longest_context:,}") in result.verdict()
    assert planned("1b", batch_size=result.largest_batch).fits
    assert not planned("1b", batch_size=result.largest_batch + 1).fits


def test_more_ranks_than_key_heads_hold_them_several_times():
    halves, quarters = (planned("h-small", instance="trn2.48xlarge", tp_degree=degree) for degree in (8, 16))
    assert quarters.token == halves.token and quarters.state < halves.state


def test_a_core_has_24_gigabytes(temporaries, monkeypatch):
    """A core has a quarter of a Trainium2 chip's 96 GB: LNC=2 makes four logical cores. A byte more is too much."""
    none = plan.Temporaries(0, 0, 0)
    monkeypatch.setattr(plan, "graph_memory", lambda *arguments: plan.GraphMemory(arguments[0], 0, 0, 0))
    sizes = dict(state=1, token=0, logits=0, scores=0, temporaries=none, options=GraphOptions())
    plan_with = partial(plan.Plan, small_config(), 4, 1, 10, **sizes)
    free = 96 * 10**9 // 4 - MICROCODE_BYTES
    full, over = plan_with(weights=free - 1), plan_with(weights=free)
    assert full.fits and full.total == 24 * 10**9
    assert not over.fits and over.largest_batch == 0
    assert plan.INSTANCES == {"trn2.3xlarge": 4, "trn2.48xlarge": 64}  # one chip and sixteen chips


TABLE = re.findall(
    r"^\| (\S+) \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \| ([\d,]+) \|$",
    "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))),
    re.MULTILINE,
)


def test_the_published_table_has_the_family():
    assert {f"granite-4.0-{row[0]}" for row in TABLE} == set(family_names())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_published_table(row):
    """Sum and largest batch need temporaries, see below."""
    name, weights, context, sequence, graphs, *_ = row
    result = planned(f"granite-4.0-{name}")
    assert f"{result.weights / 1e9:.2f}" == weights
    assert f"{result.max_context:,}" == context
    assert f"{(result.state + result.context * result.token) / 1e9:.2f}" == sequence
    assert str(len(result.graphs)) == graphs


@pytest.mark.parametrize("name", ["h-350m", "h-small"])
def test_the_published_sums(name, monkeypatch):
    """The sums include temporaries from the graphs. The small and the large model stand for the family."""
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it tells what a step needs")
    monkeypatch.setattr(plan, "find_temporaries", find_temporaries)
    (row,) = (row for row in TABLE if row[0] == name)
    result = planned(f"granite-4.0-{name}")
    assert f"{result.total / 1e9:.1f}" == row[5]
    assert f"{result.largest_batch:,}" == row[6]


@pytest.mark.usefixtures("temporaries")
def test_weights_alone_may_be_too_much():
    result = planned("h-small", tp_degree=1)
    assert not result.fits and "more ranks" in result.verdict()


def test_refusals():
    with pytest.raises(UserError, match="has 4 logical cores"):
        planned("h-small", tp_degree=8)
    with pytest.raises(UserError, match="the model's longest is 131072"):
        planned("h-small", context=131073)
    with pytest.raises(UserError, match="can be split by"):
        planned("h-small", tp_degree=3)


def test_the_sum_by_hand(temporaries):
    """h-small has 36 Mamba layers of 32 heads a rank, and 4 attention layers of 2 key and 8 query heads a rank."""
    result = planned("h-small", batch_size=30, context=10000)
    state = 36 * ((32 * 64 + 256) * 3 * 2 + 32 * 64 * 128 * 4)
    sequence = state + 10000 * 4 * 2 * 2 * 128 * 2 + 100352 * 4 * 2
    step = 8 * 512 * 10000 * 4 + (max(2 * 10**9, 31 * 10**8) if temporaries else 0)
    graphs = sum(graph.total for graph in result.graphs)
    assert result.total == result.weights + 30 * sequence + step + graphs + 2 * 96 * 2**20


def test_the_memory_of_graphs_by_hand():
    """A token's graph of a model like Qwen3-8B has what was reported of that; a prompt's grows with the layers only."""
    whole, quarter = planned("h-small", tp_degree=1), planned("h-small", batch_size=2, options=FEWEST)
    token = next(graph for graph in whole.graphs if graph.graph.kind == "token")
    assert token.total / whole.weights == pytest.approx((126 + 4 + 12) * 2**20 / 15.1e9, rel=1e-3)
    assert token.collectives == 0
    context, continuation, token, copy = quarter.graphs
    assert context.code == pytest.approx(146.67 * 2**20, rel=1e-4)  # 40 of 45 layers
    assert context.dma_rings == pytest.approx(43.556 * 2**20, rel=1e-4)
    assert context.collectives == 71 * 1024
    assert (continuation.total, token.graph.bucket) == (context.total, 131072)
    assert copy.total == copy.dma_rings == token.dma_rings
    assert planned("h-micro").graphs[0].total == context.total  # 40 layers too


def test_more_graphs_take_more_memory():
    sizes = dict(context=16384, batch_size=2)
    plain, verified = planned("h-tiny", **sizes), planned("h-tiny", **sizes, options=GraphOptions(verified_tokens=4))
    assert len(verified.graphs) == len(plain.graphs) + 8 + 1
    assert verified.total > plain.total and verified.longest_context <= plain.longest_context
    draft = planned("h-350m", **sizes)
    both = planned("h-tiny", **sizes, draft=draft)
    assert both.total == plain.total + draft.resident and both.max_context == 32768
    assert 0 < both.largest_batch < plain.largest_batch


def test_temporaries_come_from_the_graphs():
    """Prefill's temporaries hardly grow with the context, decode's almost only with the number of sequences."""
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it tells what a step needs")
    config = small_config(max_position_embeddings=32768)
    short, long = (find_temporaries(config, 2, context) for context in (16384, 32768))
    assert 0 < short.prefill <= long.prefill < 1.1 * short.prefill
    assert 0 < short.decode_of_a_sequence <= long.decode_of_a_sequence < 1.1 * short.decode_of_a_sequence


def test_graphs_may_be_missing():
    def missing(*arguments):
        raise hlo_cost.ToolsMissing("torch_xla is not installed")
        yield

    assert find_temporaries(small_config(), 1, 100, missing) is None


def test_command(capsys, temporaries):
    fewest = ["--context-buckets", "2048", "--token-buckets", "131072", "8192", "8192"]
    assert main(["plan", "--model", "h-small", *fewest]) == 0
    output = capsys.readouterr().out
    assert "It fits" in output and "To compile: 5 graphs: 1 context, 2 continuation, 2 token." in output
    assert len(re.findall("graph, estimated: .* code 0[.]1.*, DMA rings 0[.]0.*, collectives 0", output)) == 5
    assert "with --kernels nki" in output
    assert "continuation 131,072" in output and "microcode, at most" in output
    assert ("unknown without torch_xla" in output) == (temporaries is None)
    assert main(["plan", "--model", "h-small", "--tp-degree", "2"]) == 1
    assert "It does not fit" in capsys.readouterr().out
    assert main(["plan", "--instance", "trn2.48xlarge", "--tp-degree", "16", "--context", "4096"]) == 0
    output = capsys.readouterr().out
    assert "h-small" in output and "can be split by" in output
    assert main(["plan"]) == 0
    assert ("fits with fewer graphs" in capsys.readouterr().out) == (temporaries is not None)
    arguments = ["plan", "--model", "h-tiny", "--context", "4096"]
    assert main([*arguments, "--verify", "4", "--draft-model", "micro"]) == 0
    output = capsys.readouterr().out
    assert "To compile: 21 graphs: 5 context, 3 continuation, 6 token, 6 verification, 1 commit." in output
    assert "Also those of micro: 20 graphs" in output and "micro, with its graphs" in output
    assert main([*arguments, "--draft-model", "micro"]) == 2
    assert "--draft-model needs --model, and --verify" in capsys.readouterr().err
    assert main([*arguments, "--latency", "--verify", "4"]) == 2
    assert "--verify is about memory" in capsys.readouterr().err
    assert main(["plan", "--model", "h-small", "--batch-size", "0"]) == 2
    assert main(["plan", "--model", "h-small", "--context", "0"]) == 2
    assert main(["plan", "--tp-degree", "8"]) == 2
    assert "has 4 logical cores" in capsys.readouterr().err


def test_the_verdict_comes_first(capsys):
    assert main(["plan", "--model", "h-350m", "--context", "512"]) == 0
    assert capsys.readouterr().out.startswith("It fits")
