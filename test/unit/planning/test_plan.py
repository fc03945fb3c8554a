"""The plan for a core's memory, compared with the real sizes of the model and its state."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.sharding import rank_slice
from granite4_neuron.commands.cli import main
from granite4_neuron.commands.output import fitted
from granite4_neuron.config import published_config
from granite4_neuron.config.published import published_name, published_names
from granite4_neuron.devices.neuron.compiled_graphs import GraphOptions, default_context_buckets
from granite4_neuron.devices.neuron.sdk import TRAINIUM2
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.errors import UserError
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.planning import plan
from granite4_neuron.planning.analysis.device_graphs import DeviceGraphOptions
from granite4_neuron.planning.analysis.graph_memory import MICROCODE_BYTES
from granite4_neuron.state.hybrid_state import HybridState
from test.support.checkpoints import granite_names, nemotron_config, small_config

ROOT = Path(__file__).parents[3]
FEWEST = GraphOptions(context_buckets=(512,), token_buckets=(131072,))
GIBIBYTE = 2**30


def planned(name, **changes):
    config = published_config(name)
    values = dict(instance="trn2.3xlarge", tp_degree=4, batch_size=1, context=config.max_position_embeddings)
    values["options"] = GraphOptions()
    return plan.plan(config, torch.bfloat16, **{**values, **changes})


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", granite_names())
def test_bytes_are_those_of_the_tensors(name):
    config, result = published_config(name), planned(name, batch_size=3, context=1000)
    with torch.device("meta"):
        whole = model_of(config)
        state = HybridState.allocate(config, 2, 1000, torch.bfloat16, "meta", tp_degree=4)  # and the null slot
    weights = [rank_slice(name, weight, config, 0, 4) for name, weight in whole.named_parameters()]
    if config.tie_word_embeddings:
        weights.append(weights[0])
    assert result.weights == sum(weight.numel() * 2 for weight in weights)
    assert result.state + 1000 * result.token == sum(tensor.nbytes for tensor in state.tensors()) // 3
    # What a runtime with graphs allocates for three sequences, whose cache has a null slot.
    state = HybridState.allocate(config, 3, 1024, torch.bfloat16, "meta", tp_degree=4, has_null_slot=False)
    sequences = sum(tensor.nbytes for tensor in state.tensors()) + 3 * result.logits
    on_torch = planned(name, batch_size=3, context=1000, options=DeviceGraphOptions())
    assert on_torch.tensors == on_torch.weights + sequences


def test_layers_of_one_part():
    """A rank's tensors of Nemotron 3 Nano, with routers in float32. A part's graph is half of a layer's."""
    config = published_config("nemotron-3-nano-30b-a3b")
    result = plan.plan(config, torch.bfloat16, "trn2.3xlarge", 4, 1, 1024, DeviceGraphOptions())
    with torch.device("meta"):
        model = model_of(config, Parallel(0, 4))
        state = HybridState.allocate(config, 2, 1024, torch.bfloat16, "meta", tp_degree=4)  # and the null slot
    in_float32 = model.float32_weights()
    weights = (weight.numel() * (4 if name in in_float32 else 2) for name, weight in model.named_parameters())
    assert result.weights == sum(weights)
    assert result.state + 1024 * result.token == sum(tensor.nbytes for tensor in state.tensors()) // 3
    graphs = {(each.graph.name, each.graph.tokens or each.graph.bucket): each.code for each in result.graphs}
    of_granite = planned("h-small", context=1024, options=DeviceGraphOptions()).graphs
    (mamba,) = (each.code for each in of_granite if (each.graph.name, each.graph.bucket) == ("mamba layer", 128))
    assert graphs["moe layer", 128] == graphs["mamba layer", 512] == graphs["attention layer", 128]
    assert mamba == pytest.approx(2 * graphs["mamba layer", 128], abs=1)


def test_h_small_at_its_whole_context():
    """It fits with one graph of each kind. With all graphs the verdict is open: it fits if the estimates are right."""
    result = planned("h-small", options=FEWEST)
    assert result.context == 131072 and result.outcome == plan.FITS and result.longest_context == 131072
    assert result.verdict().startswith("It fits: weights and sequences take 15.8 of a core's 23.5 GiB, and ")
    result = planned("h-small")
    assert [len(result.graphs), len(result.with_fewest_graphs.graphs)] == [21, 3]
    assert result.with_fewest_graphs.total == planned("h-small", options=FEWEST).total
    assert result.total < TRAINIUM2.core_bytes < result.at_most and result.outcome == plan.OPEN
    assert result.verdict().startswith(
        "It is open whether it fits: weights and sequences take 15.8 of a core's 23.5 GiB, and "
    )
    assert "With fewer graphs it does, at most" in result.verdict()
    assert "--context-buckets 512 --token-buckets 131072" in result.verdict()


def test_another_port_of_h_small(monkeypatch):
    """Pull request 69 of NxD Inference, by its README, in GiB: on four ranks inputs and outputs are 15.4, and with a
    scan of 256 tokens it needs 24.46. On two ranks they are 30, which is too much by itself.

    It keeps the state of all heads in bfloat16 on each rank. Its scan's temporaries are those of XLA's compiler, which
    the next test counts. A plan with these does not say yes.
    """
    ours = planned("h-small", context=256, options=GraphOptions(max_context_length=256))
    state = 36 * 2 * (128 * 64 * 128 + 3 * (128 * 64 + 256))
    assert (ours.weights + state + 2048 * ours.token) / GIBIBYTE == pytest.approx(15.4, abs=0.1)
    assert ours.outcome == plan.FITS
    theirs = replace(ours, state=state)
    with monkeypatch.context() as patch:
        patch.setattr(plan.Plan, "temporaries", round(2.05 * GIBIBYTE))
        assert theirs.total < TRAINIUM2.core_bytes < theirs.at_most and theirs.outcome == plan.OPEN
        assert theirs.at_most / GIBIBYTE == pytest.approx(24.46, rel=0.1)
    halves = planned("h-small", tp_degree=2, context=256)
    assert halves.weights / GIBIBYTE == pytest.approx(30, abs=0.5)
    assert halves.outcome == plan.DOES_NOT_FIT and "Split it over more ranks" in halves.verdict()


def test_the_temporaries_of_another_ports_scan():
    """XLA's compiler needs 2.05 GiB for a scan that makes [tokens, heads, head_dim, d_state] of 256 tokens."""
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it traces graphs")
    from granite4_neuron.planning.analysis.hlo_cost import hlo_proto, temporary_bytes, tracer

    placeholder, tokens, heads = tracer(), 256, 128
    x, dt = placeholder((tokens, heads, 64), torch.float32), placeholder((tokens, heads), torch.float32)
    B, C = (placeholder((tokens, 1, 128), torch.float32).expand(-1, heads, -1) for _ in range(2))
    updates = (dt[..., None] * B)[:, :, None] * x[..., None]
    decay = torch.exp(dt.cumsum(0)[:, None] - dt.cumsum(0)[None])
    states = torch.einsum("tih,ihds->thds", decay, updates)
    y = torch.einsum("lhs,lhds->lhd", C, states)
    assert temporary_bytes(hlo_proto([y, states[-1].clone()])) / GIBIBYTE == pytest.approx(2.05, abs=0.05)


@pytest.mark.parametrize("batch_size", [1, 16, 40])
def test_limits_are_the_largest_that_fit(batch_size):
    result = planned("1b", batch_size=batch_size)
    longest = planned("1b", batch_size=batch_size, context=result.longest_context)
    assert longest.outcome == plan.FITS
    if result.longest_context < result.max_context:
        assert planned("1b", batch_size=batch_size, context=result.longest_context + 1).outcome != plan.FITS
        assert str(f"{result.longest_context:,}") in result.verdict()
    if result.largest_batch:
        assert planned("1b", batch_size=result.largest_batch).outcome == plan.FITS
    assert planned("1b", batch_size=result.largest_batch + 1).outcome != plan.FITS


def test_more_ranks_than_key_heads_hold_them_several_times():
    halves, quarters = (planned("h-small", instance="trn2.48xlarge", tp_degree=degree) for degree in (8, 16))
    assert quarters.token == halves.token and quarters.state < halves.state


def test_a_core_has_23_and_a_half_gibibytes(monkeypatch):
    """One byte more is too much. Between the sum and its upper bound the verdict is open."""
    monkeypatch.setattr(plan, "graph_memory", lambda *arguments: plan.GraphMemory(arguments[0], 0, 0, 0))
    sizes = dict(state=1, token=0, logits=0, options=GraphOptions(), chip=TRAINIUM2)
    plan_with = partial(plan.Plan, small_config(), torch.bfloat16, 1, 1, 10, **sizes)
    estimated = plan_with(weights=0).temporaries
    assert estimated > 0
    free = int(23.5 * GIBIBYTE) - MICROCODE_BYTES - 1
    surely, over = (plan_with(weights=free - round(plan.TEMPORARIES_AT_MOST * estimated) + more) for more in (0, 1))
    assert [surely.outcome, over.outcome] == [plan.FITS, plan.OPEN] and over.largest_batch == 0
    hardly, not_at_all = (plan_with(weights=free - estimated + more) for more in (0, 1))
    assert [hardly.outcome, not_at_all.outcome] == [plan.OPEN, plan.DOES_NOT_FIT]
    assert not_at_all.verdict().startswith("By estimate it does not fit")
    assert plan_with(weights=free + MICROCODE_BYTES + 1).verdict().startswith("It does not fit: weights and sequences")
    cores = {name: instance.logical_cores for name, instance in plan.INSTANCES.items()}
    assert cores == {"trn2.3xlarge": 4, "trn2.48xlarge": 64, "trn3.3xlarge": 4}


def test_a_trainium3_has_half_as_much_again():
    config, options = published_config("h-small"), GraphOptions()
    sizes = config, torch.bfloat16, "trn3.3xlarge", 4, 1, 131072, options
    result, before = plan.plan(*sizes), planned("h-small")
    assert (result.total, result.at_most) == (before.total, before.at_most)
    assert (before.outcome, result.outcome) == (plan.OPEN, plan.FITS)
    assert "of a core's 35.5 GiB" in result.verdict() and result.largest_batch > before.largest_batch


TABLE = re.findall(
    r"^\| (\S+) \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([a-z ]+) \| ([\d,]+) \|$",
    "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))),
    re.MULTILINE,
)


def test_the_published_table_has_the_family():
    assert {f"granite-4.0-{row[0]}" for row in TABLE} == set(granite_names())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_published_table(row):
    name, weights, context, sequence, graphs, total, at_most, outcome, largest_batch = row
    result = planned(f"granite-4.0-{name}")
    assert f"{result.weights / GIBIBYTE:.2f}" == weights
    assert f"{result.max_context:,}" == context
    assert f"{(result.state + result.context * result.token) / GIBIBYTE:.2f}" == sequence
    assert str(len(result.graphs)) == graphs
    assert [f"{count / GIBIBYTE:.1f}" for count in (result.total, result.at_most)] == [total, at_most]
    assert result.outcome == outcome and f"{result.largest_batch:,}" == largest_batch


ON_TORCH = re.findall(
    r"^\| (\S+) \| ([148]) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$",
    (ROOT / "docs" / "trainium.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


ON_CHIPS = re.findall(
    r"^\| (\S+) \| (bfloat16|8 bits) \| (\d+) \| (Trainium\d) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| "
    r"([\d,]+) \|$",
    (ROOT / "docs" / "trainium.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_the_published_table_of_a_pytorch_device():
    assert len(ON_TORCH) == 10 and len(ON_CHIPS) == 8
    for name, ranks, context, *figures in ON_TORCH:
        sizes = "trn2.3xlarge", int(ranks), 1, int(context.replace(",", ""))
        result = plan.plan(published_config(name), torch.bfloat16, *sizes, DeviceGraphOptions())
        bytes_of = result.weights, result.total, result.at_most
        assert figures == [*(f"{count / GIBIBYTE:.1f}" for count in bytes_of), f"{result.largest_batch:,}"], name
    for name, format, state, chip, *figures in ON_CHIPS:
        config = published_config(name)
        assert f"{plan.sequence_bytes(config, 2) / 2**20:.0f}" == state
        sizes = f"trn{chip[-1]}.3xlarge", 4, 1, 4096
        result = plan.plan(config, torch.bfloat16, *sizes, DeviceGraphOptions())
        result = (result if format == "bfloat16" else result.quantized("int8")).fewest_ranks
        counts = [f"{count / GIBIBYTE:.1f}" for count in (result.weights, result.total, result.at_most)]
        assert figures == [str(result.tp_degree), str(result.chips), *counts, f"{result.largest_batch:,}"], name


@pytest.mark.parametrize("name", ["h-tiny", "nemotron-3-nano-30b-a3b"])
def test_weights_in_a_format(name):
    """Every matrix but the embedding and the routers has a byte for each number, and four for each row's scale."""
    config = published_config(name)
    plain = plan.plan(config, torch.bfloat16, "trn2.3xlarge", 4, 1, 4096, DeviceGraphOptions())
    quantized = plain.quantized("int8")
    with torch.device("meta"):
        matrices = [
            module.weight
            for module in model_of(config, Parallel(0, 4)).modules()
            if getattr(module, "may_be_quantized", False)
        ]
    saved = sum(matrix.numel() - 4 * matrix.shape[:-1].numel() for matrix in matrices)
    assert (
        plain.weights - quantized.weights == saved and plain.fewest_ranks.tp_degree >= quantized.fewest_ranks.tp_degree
    )
    assert (plain.state, plain.token) == (quantized.state, quantized.token)


def test_refusals():
    with pytest.raises(UserError, match="has 4 logical cores"):
        planned("h-small", tp_degree=8)
    with pytest.raises(UserError, match="the model's longest is 131072"):
        planned("h-small", context=131073)
    with pytest.raises(UserError, match="can be split by"):
        planned("h-small", tp_degree=3)


def test_the_sum_by_hand():
    """h-small has 36 Mamba layers of 32 heads a rank, and 4 attention layers of 2 key and 8 query heads a rank."""
    result = planned("h-small", batch_size=30, context=10000)
    state = 36 * ((32 * 64 + 256) * 3 * 2 + 32 * 64 * 128 * 4)
    assert result.tensors == result.weights + 30 * (state + 10000 * 4 * 2 * 2 * 128 * 2 + 100352 * 4 * 2)
    live = 512 * 2 * (3 * 4096 + 2 * 192)
    decode = 30 * 1.05 * 2 * 8192 * 2 * 128 * 4 + 1.5 * 10 * 3 * 192 * 4096 * 4
    assert result.temporaries == round(decode) > 25 * live
    assert planned("h-small", batch_size=1, context=10000).temporaries == 25 * live
    assert planned("h-micro", context=128).temporaries == 25 * 128 * 2 * (2 * 2048 + 2 * 2048)
    graphs = sum(graph.total for graph in result.graphs)
    assert result.total == result.tensors + result.temporaries + graphs + 2 * 96 * 2**20
    more = graphs + (plan.TEMPORARIES_AT_MOST - 1) * result.temporaries
    assert result.at_most == pytest.approx(result.total + more)


def test_the_memory_of_graphs_by_hand():
    """The graph of a token has the size reported for Qwen3-8B. A prompt's graph grows with the layers only."""
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
    of_draft = draft.tensors + sum(graph.total for graph in draft.graphs)
    assert both.total == plain.total + of_draft and both.max_context == 32768
    assert 0 < both.largest_batch < plain.largest_batch


@pytest.mark.parametrize(("longest", "buckets"), [(100, [100]), (128, [128]), (300, [128, 300]), (512, [128, 512])])
def test_default_graphs_of_prompts(longest, buckets):
    assert default_context_buckets(longest) == buckets
    assert default_context_buckets(2048) == [128, 512, 1024, 2048]


@pytest.mark.exhaustive
def test_the_estimate_of_temporaries_covers_what_xla_counts():
    """One layer of each kind needs as much as a step of all layers, because layers run one after another."""
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; it tells what a step needs")
    from granite4_neuron.planning.analysis.graphs import report

    config = published_config("h-350m")
    result = plan.plan(config, torch.bfloat16, "trn2.3xlarge", 4, 1, 2048, GraphOptions())
    few = replace(config, layer_types=("mamba", "attention"), num_hidden_layers=2, vocab_size=4)
    prompt, decode = report(few, torch.float32, 4, 1, (512,), 2048)
    assert decode.temporary_bytes < prompt.temporary_bytes <= result.temporaries < 6 * prompt.temporary_bytes


def test_command(capsys):
    nxdi = ["--backend", "nxdi"]
    fewest = [*nxdi, "--context-buckets", "512", "--token-buckets", "131072", "8192", "8192"]
    assert main(["plan", "--model", "h-small", *fewest]) == 0
    output = capsys.readouterr().out
    assert "To compile: 5 graphs: 1 context, 2 continuation, 2 token." in output
    assert re.search("2 continuation graphs: 8,192, 131,072 .* each: code 0[.]1.*, DMA rings 0[.]0.*, coll", output)
    assert "microcode" in output and "of 48 MiB of SBUF, by estimate: 12.38 MiB for 512 tokens." in output
    assert main(["plan", "--model", "h-small", *nxdi]) == 3
    assert "It is open whether it fits" in capsys.readouterr().out
    assert main(["plan", "--model", "h-small", "--tp-degree", "2"]) == 1
    assert "It does not fit" in capsys.readouterr().out
    assert main(["plan", "--instance", "trn2.48xlarge", "--tp-degree", "16", "--context", "4096"]) == 0
    output = capsys.readouterr().out
    assert "h-small" in output and "can be split by" in output
    assert main(["plan"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{len(published_names()) - 2} of {len(published_names())} models fit")
    assert "super-120b-a12b: does not fit; over more ranks 16 fit, on 4 chips." in output
    super_in_8_bits = ["plan", "--model", "nemotron-3-super-120b-a12b", "--quantize", "int8", "--context", "4096"]
    assert main(super_in_8_bits) == 1
    output = capsys.readouterr().out
    assert "Split it over more ranks: 8 fit, on 2 chips." in output and "in int8, which no backend" in output
    assert main([*super_in_8_bits, "--latency"]) == 2
    assert "--quantize is about memory" in capsys.readouterr().err
    assert main(["plan", *nxdi]) == 0
    output = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "fits with fewer graphs" in output and output.startswith("8 of 9 models fit")
    arguments = ["plan", "--model", "h-tiny", "--context", "4096", *nxdi]
    assert main([*arguments, "--verify", "4", "--draft-model", "micro"]) == 0
    output = capsys.readouterr().out
    assert "To compile: 18 graphs: 2 context, 3 continuation, 6 token, 6 verification, 1 commit." in output
    assert "Also those of micro: 17 graphs" in output and "17 graphs of micro" in output
    assert main([*arguments, "--draft-model", "micro"]) == 2
    assert "--draft-model needs --model, and --verify" in capsys.readouterr().err
    assert main([*arguments, "--latency", "--verify", "4"]) == 2
    assert "--verify is about memory" in capsys.readouterr().err
    assert main(["plan", "--model", "h-small", "--batch-size", "0"]) == 2
    assert main(["plan", "--model", "h-small", "--context", "0"]) == 2
    assert main(["plan", "--tp-degree", "8"]) == 2
    assert "has 4 logical cores" in capsys.readouterr().err


def test_all_published_models(capsys):
    """Each has a row or a reason."""
    granite = {name.removeprefix("granite-4.0-") for name in granite_names()}
    planned = _planned_names(capsys)
    assert planned > granite and sorted(map(published_name, planned)) == published_names()
    assert _planned_names(capsys, "--backend", "nxdi") == granite


def test_a_terminal_of_80_columns_has_a_row_for_each_model(monkeypatch):
    tables = []
    monkeypatch.setattr("granite4_neuron.commands.plan.print_table", tables.append)
    assert main(["plan"]) == 0
    assert fitted(tables[0], Console(width=80)) is tables[0], "not blocks"


def _planned_names(capsys, *options):
    assert main(["plan", "--context", "4096", *options]) == 0
    return set(re.findall(r"^│ (\S+) +│ [\d.]+ +│ 4,096 +│", capsys.readouterr().out, re.MULTILINE))


def test_a_config_without_weights(tmp_path, capsys):
    """A folder with config.json alone is enough. compile does not take Nemotron."""
    shutil.copy(ROOT / "src/granite4_neuron/config/family/nemotron-3-nano-30b-a3b.json", tmp_path / "config.json")
    arguments = ["plan", "--model", str(tmp_path)]
    assert main([*arguments, "--context", "1024"]) == 0
    output = capsys.readouterr().out
    assert "To compile: 12 graphs: 2 embedding, 2 mamba layer, 2 moe layer, 2 attention layer, 1 token," in output
    assert main(["info", "--model", str(tmp_path)]) == 0
    output = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "parameters 31,577,940,288 active per token 3,580,076,352 weights 58.83 GiB in bfloat16" in output
    assert main([*arguments, "--latency"]) == 0
    assert "token, experts: all" in capsys.readouterr().out
    assert main([*arguments, "--backend", "nxdi"]) == 2
    assert "compile does not take NemotronHForCausalLM; --backend torch plans it." in capsys.readouterr().err


def test_the_verdict_comes_first(capsys):
    assert main(["plan", "--model", "h-350m", "--context", "512"]) == 0
    assert capsys.readouterr().out.startswith("It fits")


def test_graphs_of_prompts_that_spill_are_named(capsys):
    assert (
        main(["plan", "--model", "h-small", "--context", "4096", "--backend", "nxdi", "--max-context-length", "2048"])
        == 3
    )
    output = capsys.readouterr().out
    assert "3.094 MiB for 128, 12.38 MiB for 512, 24.75 MiB for 1,024, 49.5 MiB for 2,048 tokens." in output
    assert output.count("it spills by estimate") == 1 and "Prompts of 2,048: it spills by estimate: 49.5 MiB" in output


def test_graphs_of_a_pytorch_device(capsys):
    """A tied head is stored a second time. The cache has a null slot, and a length for which there are graphs."""
    config = published_config("h-tiny")
    assert config.tie_word_embeddings
    ours, theirs = (
        planned("h-tiny", context=5000, options=options) for options in (DeviceGraphOptions(), GraphOptions())
    )
    assert theirs.weights == ours.weights
    assert ours.tensors - ours.weights - (theirs.tensors - theirs.weights) == (2 * 16384 - 5000) * ours.token
    arguments = ["plan", "--backend", "torch", "--model", "h-small"]
    assert main([*arguments, "--context", "16384", "--context-buckets", "512", "128", "--verify", "4"]) == 0
    output = capsys.readouterr().out
    assert "3 attention layer graphs of 128: 1,024, 4,096, 16,384" in output
    counted = "2 embedding, 2 mamba layer, 6 attention layer, 3 token, 3 verification, 1 commit, 2 head, 1 draw"
    assert f"To compile: 20 graphs: {counted}." in output
    assert main([*arguments, "--batch-size", "10"]) == 3
    assert "or 8 sequences of this context." in capsys.readouterr().out
    assert main([*arguments, "--token-buckets", "512"]) == 2
    assert "--token-buckets belongs to --backend nxdi" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer_types, length, verified_tokens",
    [
        (("mamba", "attention"), 900, 3),
        pytest.param(("mamba", "attention"), 3000, 5, marks=pytest.mark.exhaustive),
        pytest.param(("mamba", "mamba"), 3000, 5, marks=pytest.mark.exhaustive),
        pytest.param(("attention", "attention"), 3000, 0, marks=pytest.mark.exhaustive),
        (("mamba", "moe", "attention", "mlp"), 900, 3),
    ],
)
def test_graphs_of_a_pytorch_device_are_those_that_a_server_makes(layer_types, length, verified_tokens):
    """The server makes all of them before the first request."""
    make = nemotron_config if "moe" in layer_types else small_config
    model = random_model(make(layer_types=layer_types, max_position_embeddings=5000))
    runtime = TorchRuntime(model, GenerationConfig(), (16, 64), compiler="eager", graphs="model")
    runtime.warm_up(runtime.allocate(2, length), verified_tokens)
    listed = DeviceGraphOptions((16, 64), verified_tokens).graphs(model.config, 2, length)
    assert [graph.kind for graph in listed].count("draw") == 1  # the CPU draws without a graph
    assert runtime.num_compilations + 1 == len(listed) == len(set(listed))
