"""The whole model compiles: each kind of step is one graph of torch.compile, whatever its values."""

import pytest
import torch

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.graphs.operators import XLA
from granite4_neuron.model.step import step_of
from granite4_neuron.state.hybrid_state import HybridState
from test.support.checkpoints import CASES
from test.support.stepping import random_tokens, run_cuts

NAMED = {case.name: case for case in CASES}
SLOTS = torch.tensor([2, 1])


class Compiled:
    """Compiled steps of two sequences. Their slots are looked up, or are in order."""

    def __init__(self, model):
        self.model = model.bind(XLA)
        self.state = HybridState.allocate(model.config, 2, 40, model.dtype, has_null_slot=False)
        self.graphs = []
        options = dict(backend=self._backend, fullgraph=True, dynamic=False)
        self.step = torch.compile(self._step, **options)
        self.verify = torch.compile(self._verify, **options)
        self.advance = torch.compile(self._advance, **options)

    def _backend(self, graph, _):
        self.graphs.append(graph)
        return graph.forward

    def _step(self, ids, positions, lengths, slots):
        return self.model(ids, step_of(positions, lengths, slots, self.state), self.state, all_logits=True)

    def _verify(self, ids, positions, lengths):
        step = step_of(positions, lengths, None, self.state, verifies=True)
        hidden_states, kept_inputs = self.model.hidden_states(ids, step, self.state)
        return self.model.head(hidden_states), kept_inputs

    def _advance(self, kept_inputs, positions, lengths):
        self.model.advance(kept_inputs, step_of(positions, lengths, None, self.state), self.state)


def where(start, tokens, lengths=None):
    positions = torch.full((2, 1), start) + torch.arange(tokens)
    return positions, torch.full((2,), tokens) if lengths is None else torch.tensor(lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "moe",
        pytest.param("two_groups", marks=pytest.mark.exhaustive),
        "attention_only_rope",
    ],
)
@torch.inference_mode()
def test_each_kind_of_step_is_one_graph(name):
    model = random_model(NAMED[name].config())
    tokens = random_tokens(model.config.vocab_size, 2, 24)
    expected = run_cuts(model, tokens, [24])
    compiled = Compiled(model)

    def check(logits, start, end):
        assert (logits - expected[:, start:end]).abs().max() <= 1e-5

    check(compiled.step(tokens[SLOTS - 1][:, :8], *where(0, 8), SLOTS)[SLOTS - 1], 0, 8)
    check(compiled.step(tokens[SLOTS - 1][:, 8:16], *where(8, 8), SLOTS)[SLOTS - 1], 8, 16)
    assert len(compiled.graphs) == 1  # prefill
    for token in (16, 17):
        check(compiled.step(tokens[:, token : token + 1], *where(token, 1), None), token, token + 1)
    assert len(compiled.graphs) == 2  # decode
    for start in (18, 20):
        logits, kept_inputs = compiled.verify(tokens[:, start : start + 4], *where(start, 4))
        check(logits, start, start + 4)
        compiled.advance(kept_inputs, *where(start, 4, [2, 2]))
    assert len(compiled.graphs) == 4  # verify, commit
    check(compiled.step(tokens[:, 22:23], *where(22, 1), None), 22, 23)
    assert len(compiled.graphs) == 4


def test_a_break_would_be_seen(monkeypatch):
    """Reading a tensor's values within the step ends the graph there."""
    model = random_model(NAMED["moe"].config())
    compiled = Compiled(model)
    mamba = type(compiled.model.model.layers[0].mamba)
    original = mamba.forward

    def forward(self, hidden_states, step, state):
        return original(self, hidden_states if hidden_states.sum() > 0 else -hidden_states, step, state)

    monkeypatch.setattr(mamba, "forward", forward)
    tokens = random_tokens(model.config.vocab_size, 2, 8)
    with torch.inference_mode(), pytest.raises(torch._dynamo.exc.Unsupported):
        compiled.step(tokens, *where(0, 8), SLOTS)
