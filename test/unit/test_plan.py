"""What fits into a core's memory, against what the model and its state really hold."""

from dataclasses import replace

import pytest
import torch

from granite4_neuron import graphs, plan
from granite4_neuron.checkpoint import rank_slice
from granite4_neuron.cli import main
from granite4_neuron.config import GraniteMoeHybridConfig, family_names
from granite4_neuron.errors import UserError
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.state import HybridState


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch):
    """Temporaries take a minute to find; they have a test of their own."""

    def missing(*arguments):
        raise graphs.ToolsMissing("torch_xla is not installed")
        yield

    monkeypatch.setattr(graphs, "report", missing)


def planned(name, **changes):
    config = GraniteMoeHybridConfig.from_family(name)
    values = dict(instance="trn2.3xlarge", tp_degree=4, batch_size=1, context=config.max_position_embeddings)
    return plan.plan(config, torch.bfloat16, **{**values, **changes})


@pytest.mark.parametrize("name", family_names())
def test_bytes_are_those_of_the_tensors(name):
    result = planned(name, batch_size=3, context=1000)
    with torch.device("meta"):
        whole = GraniteMoeHybridForCausalLM(result.config)
        state = HybridState.allocate(result.config, 2, 1000, torch.bfloat16, "meta", tp_degree=4)  # and the null slot
    weights = [rank_slice(name, weight, result.config, 0, 4) for name, weight in whole.named_parameters()]
    if result.config.tie_word_embeddings:
        weights.append(weights[0])
    assert result.weights == sum(weight.numel() * 2 for weight in weights)
    assert result.state + result.cache == sum(tensor.nbytes for tensor in state.tensors())


def test_h_small_has_room_for_its_whole_context():
    result = planned("h-small")
    assert result.context == 131072 and result.fits and result.longest_context == 131072
    assert result.verdict().startswith("It fits")


@pytest.mark.parametrize("batch_size", [1, 16, 40])
def test_limits_are_the_largest_that_fit(batch_size):
    result = planned("1b", batch_size=batch_size)
    longest = planned("1b", batch_size=batch_size, context=result.longest_context)
    assert longest.fits
    if result.longest_context < result.config.max_position_embeddings:
        assert not planned("1b", batch_size=batch_size, context=result.longest_context + 1).fits
        assert str(f"{result.longest_context:,}") in result.verdict()
    assert planned("1b", batch_size=result.largest_batch).fits
    assert not planned("1b", batch_size=result.largest_batch + 1).fits


def test_more_ranks_than_key_heads_hold_them_several_times():
    halves, quarters = (planned("h-small", instance="trn2.48xlarge", tp_degree=degree) for degree in (8, 16))
    assert quarters.cache == halves.cache and quarters.state < halves.state


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


def test_temporaries_are_part_of_the_sum():
    result = replace(planned("h-small"), temporaries=3 * 10**9)
    assert result.total == planned("h-small").total + 3 * 10**9


def test_temporaries_come_from_the_graphs(monkeypatch):
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it tells what a step needs")
    monkeypatch.undo()
    assert 0 < planned("h-350m", context=2048).temporaries < 2e9


def test_command(capsys):
    assert main(["plan", "--model", "h-small"]) == 0
    output = capsys.readouterr().out
    assert "It fits" in output and "131,072" in output and "unknown without torch_xla" in output
    assert main(["plan", "--model", "h-small", "--tp-degree", "2"]) == 1
    assert "It does not fit" in capsys.readouterr().out
    assert main(["plan", "--instance", "trn2.48xlarge", "--tp-degree", "16", "--context", "4096"]) == 0
    output = capsys.readouterr().out
    assert "h-small" in output and "can be split by" in output
    assert main(["plan", "--model", "h-small", "--batch-size", "0"]) == 2
