"""What a compiler will see: counted from the traced graphs."""

import json

import pytest
import torch

from granite4_neuron.cli import main
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.graphs import report
from granite4_neuron.random_weights import random_model
from test.support.checkpoints import DENSE, small_config

pytest.importorskip("torch_xla", reason="torch_xla is not installed; graphs are traced with torch 2.9")
pytest.importorskip("jax", reason="jax is not installed; it counts the graphs")


def graphs_of(config, tp_degree=1, batch_size=1, buckets=(64,), max_length=256, dtype=torch.float32):
    return list(report(config, dtype, tp_degree, batch_size, buckets, max_length))


def test_sizes_and_order():
    config = small_config()
    prefill, longer, decode = graphs_of(config, batch_size=3, buckets=(64, 128))
    assert [graph.graph for graph in (prefill, longer, decode)] == ["prefill 64", "prefill 128", "decode, batch 3"]
    weights = sum(parameter.numel() * 4 for parameter in random_model(config).parameters())
    assert prefill.weight_bytes == longer.weight_bytes == decode.weight_bytes == weights
    assert prefill.state_bytes == decode.state_bytes
    assert decode.flops < prefill.flops < longer.flops


def test_no_loop_over_tokens():
    """Within a chunk the number of instructions does not depend on the number of tokens; a chunk adds a constant."""
    one, one_too, two, three, four = graphs_of(small_config(**DENSE), buckets=(33, 64, 128, 192, 256))[:5]
    assert one.instructions == one_too.instructions
    assert four.instructions - three.instructions == three.instructions - two.instructions


def test_temporaries_grow_linearly_with_the_bucket():
    config = small_config(**DENSE)
    half, whole, double = (graph.temporary_bytes for graph in graphs_of(config, buckets=(512, 1024, 2048))[:3])
    assert double - whole <= 2.2 * (whole - half)


def test_a_rank_does_its_share():
    config = GraniteMoeHybridConfig.from_family("h-350m")
    whole, part = (graphs_of(config, degree, dtype=torch.bfloat16)[0] for degree in (1, 4))
    assert 0.25 <= part.weight_bytes / whole.weight_bytes < 0.27
    assert 0.25 <= part.flops / whole.flops < 0.28
    with pytest.raises(UserError, match="tp_degree is 3"):
        graphs_of(config, 3)


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "graphs.json"
    arguments = ("graphs", "--model", "h-350m", "--tp-degree", "2", "--buckets", "64", "--json", str(file))
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "prefill 64" in output and "decode" in output and "one rank of 2, bfloat16" in output
    assert [graph["graph"] for graph in json.loads(file.read_text())] == ["prefill 64", "decode, batch 1"]
