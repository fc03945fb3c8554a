"""All ranks of a split model compile the same graph: its StableHLO has the collectives and no rank's number."""

import re
from dataclasses import replace

import pytest
import torch

from granite4_neuron.config import ATTENTION, MAMBA, LayerParts, published_config
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel, VocabParallelEmbedding
from granite4_neuron.planning.analysis import hlo_lint
from granite4_neuron.planning.analysis.graphs import COMMIT, DECODE, PREFILL, VERIFY, Graph, report
from granite4_neuron.planning.analysis.hlo_cost import hlo_text
from granite4_neuron.planning.analysis.torch_graphs import lower_torch, trace_torch
from granite4_neuron.planning.analysis.torch_lowering import hlo_proto_of
from test.support.checkpoints import DENSE, nemotron_config, small_config
from test.support.stablehlo import text_findings

pytest.importorskip("torch_mlir", reason="torch_mlir is not installed; the extra dev has it")
pytest.importorskip("jax", reason="jax is not installed; the extra dev has it")

TOKENS = {PREFILL: 128, DECODE: 1, VERIFY: 4, COMMIT: 4}
CONFIGS = {
    "h-small": published_config("h-small"),
    "h-tiny": published_config("h-tiny"),
    "nano": published_config("nemotron-3-nano-30b-a3b"),
    "super": published_config("nemotron-3-super-120b-a12b"),
}
FAST = [
    ("h-small", 4, DECODE, (0, 3)),
    ("h-tiny", 2, COMMIT, (0, 1)),
    ("nano", 2, DECODE, (0, 1)),
    ("super", 16, DECODE, (0, 15)),
]
CASES = [
    *FAST,
    *(
        pytest.param(name, degree, kind, range(degree), marks=pytest.mark.exhaustive)
        for name in CONFIGS
        for degree in (2, 4)
        for kind in TOKENS
    ),
]


def graph_of(config, kind, degree):
    return Graph(kind, TOKENS[kind], config, torch.bfloat16, degree, num_sequences=4, max_length=1024)


def sent(text):
    """Return {collective: [(ranks, dtype), ...]} of a graph's text."""
    sums = re.findall(
        r'"stablehlo.all_reduce".*?dense<(\[\[.*?\]\])>.*?\}\) : \(tensor<[\dx]*x(\w+)>\)', text, re.DOTALL
    )
    parts = re.findall(r'"stablehlo.all_gather".*?dense<(\[\[.*?\]\])>.*? : \(tensor<[\dx]*x(\w+)>\)', text)
    return {"all_reduce": sums, "all_gather": parts}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "degree", "kind", "ranks"), CASES)
def test_one_graph_for_all_ranks(name, degree, kind, ranks):
    """A layer of each kind, of real widths. Nothing is run."""
    layers = tuple(dict.fromkeys(CONFIGS[name].layer_types))
    config = replace(CONFIGS[name], layer_types=layers, num_hidden_layers=len(layers))
    lowered, *others = (lower_torch(graph_of(config, kind, degree), rank) for rank in ranks)
    text = lowered.text
    assert all(other.text == text for other in others)
    assert text_findings(text) == []
    assert hlo_lint.findings(hlo_text(hlo_proto_of(text)), True, states=tuple(lowered.donated)) == []
    everyone = str([list(range(degree))]), "f32"
    # Sums: one for each mixer, one for each feed-forward block, one for the embedding, one for each norm whose groups
    # ranks share. A gather for the logits.
    norms = config.layers_with(MAMBA) if degree > config.mamba_n_groups > 1 else 0
    expected = (0, 0) if kind == COMMIT else (config.num_parts + 1 + norms, 1)
    assert sent(text) == {"all_reduce": [everyone] * expected[0], "all_gather": [everyone] * expected[1]}


KINDS = ("mamba", "moe", "attention", "mlp")
DENSE_LAYER = small_config(layer_types=(ATTENTION,), **DENSE)


@pytest.mark.slow
def test_a_rank_as_a_constant_is_seen(monkeypatch):
    def forward(self, ids):
        local = ids - self.parallel.rank * self.num_embeddings
        here = (local >= 0) & (local < self.num_embeddings)
        rows = self.operators.embedding(local.where(here, 0), self.weight)
        return self.parallel.all_reduce(rows.masked_fill(~here[..., None], 0.0))

    monkeypatch.setattr(VocabParallelEmbedding, "forward", forward)
    first, second = (lower_torch(graph_of(DENSE_LAYER, DECODE, 2), rank).text for rank in (0, 1))
    assert first != second


@pytest.mark.slow
def test_the_report_counts_collectives(monkeypatch):
    """Collectives are counted, and a layer with more of them than it needs is a finding."""
    monkeypatch.setattr(LayerParts, "count", 1)
    (decode,) = report(DENSE_LAYER, torch.bfloat16, 2, 1, (), 64, trace_graph=trace_torch)
    hidden, part = 4 * DENSE_LAYER.hidden_size, 4 * DENSE_LAYER.vocab_size // 2
    assert (decode.cost.collectives, decode.cost.collective_bytes) == (2 + 2, 3 * hidden + part)
    assert decode.findings == ("attention layers have 2 collectives each, and need 1.",)
    assert decode.notes == (
        "a rank gives 0.001088 MB to 4 collectives: 1 all-gather of f32, 1 all-reduce of f32 outside of layers; "
        "2 all-reduce of f32 in each attention layer.",
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("latent", [0, 40])
def test_the_report_of_layers_of_one_part(latent):
    """Each kind of layer has its weights and one all-reduce; routers stay in float32; nothing breaks a rule."""
    config = nemotron_config(moe_latent_size=latent)
    decode, commit = (
        each for each in report(config, torch.bfloat16, 2, 1, (), 64, 4, trace_torch) if "verify" not in each.graph
    )
    with torch.device("meta"):
        model = model_of(config, Parallel(0, 2))
    in_float32 = model.float32_weights()
    weights = (weight.numel() * (4 if name in in_float32 else 2) for name, weight in model.named_parameters())
    assert decode.weight_bytes == sum(weights)
    assert decode.cost.collectives == len(config.layer_types) + 2
    assert decode.notes[0].endswith("; ".join(f"1 all-reduce of f32 in each {kind} layer" for kind in KINDS) + ".")
    assert decode.findings == commit.findings == () and commit.cost.collectives == 0
