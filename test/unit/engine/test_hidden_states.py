"""What a drafter sees of the model's hidden states: those of every token that steps add to a sequence, each once."""

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.runtime.interface import Row
from test.support.engines import ENGINE_MODELS, VOCAB, ChunkRuntime, run, tokens_of
from test.support.stepping import random_tokens

PROMPTS = [random_tokens(VOCAB, length, seed=length).tolist() for length in (1, 16, 39)]
MAX_TOKENS = 20


class Watcher:
    """Drafts tokens of an earlier run, and a wrong one; keeps what it sees."""

    def __init__(self, texts):
        self.texts = texts
        self.seen = {}

    def propose(self, requests):
        return [self._drafts(list(request.tokens), request.most) for request in requests]

    def _drafts(self, tokens, most):
        text = next(text for text in self.texts if text[: len(tokens)] == tokens)
        return [*text[len(tokens) :][:2], 5][:most]

    def see(self, steps):
        for step in steps:
            earlier = self.seen.setdefault(step.id, [])
            assert not earlier or step.start == earlier[-1].start + len(earlier[-1].hidden_states)
            assert step.start + len(step.hidden_states) <= len(step.tokens)
            earlier.append(step._replace(tokens=list(step.tokens)))

    def end(self, id):
        pass


@pytest.fixture(scope="module", params=ENGINE_MODELS)
def model(request):
    return ENGINE_MODELS[request.param]()


@pytest.fixture(params=["fused", "torch"])
def runtime(request, model):
    return ChunkRuntime(model, request.param)


@torch.inference_mode()
def hidden_states_of(model, tokens):
    """Run a text in one step, with a hook on the last norm."""
    runtime, found = ChunkRuntime(model), []
    hook = runtime.model.model.norm.register_forward_hook(lambda norm, inputs, output: found.append(output[0]))
    runtime.step(runtime.allocate(1, len(tokens)), [Row(1, 0, tokens)], all_logits=True)
    hook.remove()
    return found[0].float()


def test_a_step_has_the_same_logits(runtime):
    """Rows of different lengths, with and without the logits of all tokens; then a verification."""
    rows = [Row(slot, 0, tokens) for slot, tokens in enumerate(PROMPTS, start=1)]
    for all_logits in (False, True):
        expected = runtime.step(runtime.allocate(3, 60), rows, all_logits)
        state = runtime.allocate(3, 60)
        logits, hidden_states = runtime.step_with_hidden_states(state, rows, all_logits)
        assert [each.shape for each in hidden_states] == [(len(tokens), 32) for tokens in PROMPTS]
        for row, mine, theirs in zip(rows, logits, expected, strict=True):
            real = slice(0, len(row.tokens) if all_logits else None)
            assert torch.equal(mine[real], theirs[real]) or not runtime.packs_rows
            torch.testing.assert_close(mine[real], theirs[real], rtol=0, atol=1e-5)
    rows = [Row(slot, len(tokens), [7] * slot) for slot, tokens in enumerate(PROMPTS, start=1)]
    verification = runtime.verify(state, rows)
    with torch.inference_mode():
        again = runtime.model.head(verification.hidden_states)
    torch.testing.assert_close(again, verification.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("caches", [False, True], ids=["", "prefix cache"])
def test_every_token_is_seen_once(runtime, model, caches):
    """Without rejected drafts, and without the tokens that a prefix cache has."""
    plain = Engine(runtime, 3)
    ids = [plain.add(Request(prompt, MAX_TOKENS)) for prompt in PROMPTS]
    outputs = run(plain)
    texts = [prompt + tokens_of(outputs[id]) for prompt, id in zip(PROMPTS, ids, strict=True)]
    cache = PrefixCache(runtime, None, None) if caches else None
    if caches:
        begun = Engine(runtime, 1, prefix_cache=cache)
        begun.add(Request(PROMPTS[2][:20], 1))
        run(begun)
    watcher = Watcher(texts)
    engine = Engine(runtime, 3, drafter=watcher, draft_tokens=3, prefix_cache=cache)
    ids = [engine.add(Request(prompt, MAX_TOKENS)) for prompt in PROMPTS]
    run(engine)
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
    for id, text in zip(ids, texts, strict=True):
        steps = watcher.seen[id]
        assert steps[0].start == (20 if caches and len(text) == 59 else 0)
        assert all(step.tokens == text[: len(step.tokens)] for step in steps)
        seen = torch.cat([step.hidden_states for step in steps])
        expected = hidden_states_of(model, text)[steps[0].start :][: len(seen)]
        # The tokens of the last step are not seen: the sequence has ended.
        assert len(text) - 5 <= steps[0].start + len(seen) < len(text)
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-4)


def test_a_runtime_without_them_is_refused(runtime):
    runtime.cannot = {"hidden_states": "there are none here."}
    Engine(runtime, 1, drafter=NgramDrafter())
    with pytest.raises(UserError, match=r"^there are none here\.$"):
        Engine(runtime, 1, drafter=Watcher([]))
