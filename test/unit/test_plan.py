"""The plan for a core's memory, compared with the real sizes of the model and its state."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from granite4_neuron.checkpoint.loading import rank_slice
from granite4_neuron.cli import main
from granite4_neuron.config import GraniteMoeHybridConfig, family_names
from granite4_neuron.errors import UserError
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.state import HybridState
from granite4_neuron.neuron.analysis import graphs, hlo_cost, plan
from granite4_neuron.neuron.analysis.plan import _temporaries as find_temporaries
from test.support.checkpoints import small_config

ROOT = Path(__file__).parents[2]
TEMPORARIES = plan.Temporaries(prefill=2 * 10**9, decode=10**8, decode_of_a_sequence=10**8)


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch):
    """Leave the graphs out. They take a minute to trace and have a test of their own."""
    monkeypatch.setattr(plan, "_temporaries", lambda *arguments: None)


@pytest.fixture(params=[None, TEMPORARIES], ids=["no graphs", "graphs"])
def temporaries(request, no_graphs, monkeypatch):
    """Return the temporaries that the graphs report, if there are any."""
    monkeypatch.setattr(plan, "_temporaries", lambda *arguments: request.param)
    return request.param


def planned(name, **changes):
    config = GraniteMoeHybridConfig.from_family(name)
    values = dict(instance="trn2.3xlarge", tp_degree=4, batch_size=1, context=config.max_position_embeddings)
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
    result = planned("h-small")
    assert result.context == 131072 and result.fits and result.longest_context == 131072
    assert result.verdict().startswith("It fits")


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


def test_a_core_has_24_gigabytes(temporaries):
    """A core has a quarter of a Trainium2 chip's 96 GB: LNC=2 makes four logical cores. A byte more is too much."""
    none = plan.Temporaries(0, 0, 0)
    plan_with = partial(plan.Plan, 1000, 4, 1, 10, state=1, token=0, logits=0, scores=0, temporaries=none)
    full, over = plan_with(weights=96 * 10**9 // 4 - 1), plan_with(weights=96 * 10**9 // 4)
    assert full.fits and full.total == 24 * 10**9
    assert not over.fits and over.largest_batch == 0
    assert plan.INSTANCES == {"trn2.3xlarge": 4, "trn2.48xlarge": 64}  # one chip and sixteen chips


TABLE = re.findall(
    r"^\| (\S+) \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$",
    "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))),
    re.MULTILINE,
)


def test_the_published_table_has_the_family():
    assert {f"granite-4.0-{row[0]}" for row in TABLE} == set(family_names())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_published_table(row):
    """Weights, context, and a sequence's state and cache are checked. Sum and largest batch need graphs, see below."""
    name, weights, context, sequence, *_ = row
    result = planned(f"granite-4.0-{name}")
    assert f"{result.weights / 1e9:.2f}" == weights
    assert f"{result.max_context:,}" == context
    assert f"{(result.state + result.context * result.token) / 1e9:.2f}" == sequence


@pytest.mark.parametrize("name", ["h-350m", "h-small"])
def test_the_published_sums(name, monkeypatch):
    """The sums include temporaries from the graphs. The small and the large model stand for the family."""
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it tells what a step needs")
    monkeypatch.setattr(plan, "_temporaries", find_temporaries)
    (row,) = (row for row in TABLE if row[0] == name)
    result = planned(f"granite-4.0-{name}")
    assert f"{result.total / 1e9:.1f}" == row[4]
    assert f"{result.largest_batch:,}" == row[5]


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
    assert result.total == result.weights + 30 * sequence + step


def test_temporaries_come_from_the_graphs():
    """Prefill's temporaries hardly grow with the context, decode's almost only with the number of sequences."""
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it tells what a step needs")
    config = small_config(max_position_embeddings=32768)
    short, long = (find_temporaries(config, 2, context) for context in (16384, 32768))
    assert 0 < short.prefill <= long.prefill < 1.1 * short.prefill
    assert 0 < short.decode_of_a_sequence <= long.decode_of_a_sequence < 1.1 * short.decode_of_a_sequence


def test_graphs_may_be_missing(monkeypatch):
    def missing(*arguments):
        raise hlo_cost.ToolsMissing("torch_xla is not installed")
        yield

    monkeypatch.setattr(graphs, "report", missing)
    assert find_temporaries(small_config(), 1, 100) is None


def test_command(capsys, temporaries):
    assert main(["plan", "--model", "h-small"]) == 0
    output = capsys.readouterr().out
    assert "It fits" in output and "131,072" in output
    assert ("unknown without torch_xla" in output) == (temporaries is None)
    assert main(["plan", "--model", "h-small", "--tp-degree", "2"]) == 1
    assert "It does not fit" in capsys.readouterr().out
    assert main(["plan", "--instance", "trn2.48xlarge", "--tp-degree", "16", "--context", "4096"]) == 0
    output = capsys.readouterr().out
    assert "h-small" in output and "can be split by" in output
    assert main(["plan", "--model", "h-small", "--batch-size", "0"]) == 2
    assert main(["plan", "--model", "h-small", "--context", "0"]) == 2
    assert main(["plan", "--tp-degree", "8"]) == 2
    assert "has 4 logical cores" in capsys.readouterr().err
