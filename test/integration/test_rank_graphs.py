"""Ranks of a split model compile one graph: its text in StableHLO has the collectives, and no rank's number."""

import re
from dataclasses import replace

import pytest
import torch

from granite4_neuron.config import ATTENTION, MAMBA, GraniteMoeHybridConfig
from granite4_neuron.model.parallel import VocabParallelEmbedding
from granite4_neuron.neuron.analysis import hlo_lint
from granite4_neuron.neuron.analysis.graphs import COMMIT, DECODE, PREFILL, VERIFY, Graph, report
from granite4_neuron.neuron.analysis.torch_graphs import lower_torch, trace_torch
from test.support.checkpoints import DENSE, small_config
from test.support.stablehlo import text_findings

pytest.importorskip("torch_mlir", reason="torch_mlir is not installed; the extra dev has it")
pytest.importorskip("jax", reason="jax is not installed; the extra dev has it")

TOKENS = {PREFILL: 128, DECODE: 1, VERIFY: 4, COMMIT: 4}
FAST = [("h-small", 4, DECODE, (0, 3)), ("h-tiny", 2, COMMIT, (0, 1))]
CASES = [
    *FAST,
    *(
        pytest.param(name, degree, kind, range(degree), marks=pytest.mark.slow)
        for name in ("h-small", "h-tiny")
        for degree in (2, 4)
        for kind in TOKENS
    ),
]


def graph_of(config, kind, degree):
    return Graph(kind, TOKENS[kind], config, torch.bfloat16, degree, num_sequences=4, max_length=1024)


def sent(text):
    """Return how many collectives of each kind a graph has, by name and dtype; all are among all ranks."""
    sums = re.findall(
        r'"stablehlo.all_reduce".*?dense<(\[\[.*?\]\])>.*?\}\) : \(tensor<[\dx]*x(\w+)>\)', text, re.DOTALL
    )
    parts = re.findall(r'"stablehlo.all_gather".*?dense<(\[\[.*?\]\])>.*? : \(tensor<[\dx]*x(\w+)>\)', text)
    return {"all_reduce": sums, "all_gather": parts}


@pytest.mark.parametrize(("name", "degree", "kind", "ranks"), CASES)
def test_one_graph_for_all_ranks(name, degree, kind, ranks):
    """A Mamba layer and an attention layer of real widths. Nothing is run."""
    layers = (MAMBA, ATTENTION)
    config = replace(GraniteMoeHybridConfig.from_family(name), layer_types=layers, num_hidden_layers=len(layers))
    text, *others = (lower_torch(graph_of(config, kind, degree), rank).text for rank in ranks)
    assert all(other == text for other in others)
    assert text_findings(text) == []
    everyone = str([list(range(degree))]), "f32"
    # Of a layer one for its mixer, and one for MLP and experts; then the embedding; then the logits.
    expected = (0, 0) if kind == COMMIT else (2 * len(layers) + 1, 1)
    assert sent(text) == {"all_reduce": [everyone] * expected[0], "all_gather": [everyone] * expected[1]}


DENSE_LAYER = small_config(layer_types=(ATTENTION,), **DENSE)


def test_a_rank_as_a_constant_is_seen(monkeypatch):
    def forward(self, ids):
        local = ids - self.parallel.rank * self.num_embeddings
        here = (local >= 0) & (local < self.num_embeddings)
        rows = self.operators.embedding(local.where(here, 0), self.weight)
        return self.parallel.all_reduce(rows.masked_fill(~here[..., None], 0.0))

    monkeypatch.setattr(VocabParallelEmbedding, "forward", forward)
    first, second = (lower_torch(graph_of(DENSE_LAYER, DECODE, 2), rank).text for rank in (0, 1))
    assert first != second


def test_the_report(monkeypatch):
    """Collectives are counted; and a layer with more of them than it may have is a finding."""
    monkeypatch.setattr(hlo_lint, "MOST_COLLECTIVES", 1)
    (decode,) = report(DENSE_LAYER, torch.bfloat16, 2, 1, (), 64, trace_graph=trace_torch)
    hidden, part = 4 * DENSE_LAYER.hidden_size, 4 * DENSE_LAYER.vocab_size // 2
    assert (decode.cost.collectives, decode.cost.collective_bytes) == (2 + 2, 3 * hidden + part)
    assert decode.findings == ("attention layers have 2 collectives each, and need 1.",)
    assert decode.notes == (
        "a rank gives 0.001088 MB to 4 collectives: 1 all-gather of f32, 1 all-reduce of f32 outside of layers; "
        "2 all-reduce of f32 in each attention layer.",
    )
