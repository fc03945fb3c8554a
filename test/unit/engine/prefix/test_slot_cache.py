"""Sequences that continue from prefixes in reserved slots."""

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.engine import Engine, Request, SlotPrefixCache
from granite4_neuron.state.hybrid_state import HybridState
from test.support.engines import VOCAB, generate_one, poison_engine, run, tokens_of
from test.support.stepping import random_tokens

TOKENS = random_tokens(VOCAB, 150).tolist()
OTHERS = random_tokens(VOCAB, 150, seed=1).tolist()


def engine_of(runtime, slots=(3, 4, 5), num_sequences=2, **options):
    return Engine(runtime, num_sequences, prefix_cache=SlotPrefixCache(runtime, slots, **options))


def plain(runtime, prompt, max_tokens=6):
    return generate_one(Engine(runtime, 1), Request(prompt, max_tokens))


def tokens_run(runtime):
    """Return how many tokens were run since the last call."""
    count = sum(len(row.tokens) for rows in runtime.steps for row in rows)
    runtime.steps.clear()
    return count


def test_only_the_rest_of_a_prompt_is_run(runtime):
    prompts = [TOKENS[:40], TOKENS[:40] + OTHERS[:9], TOKENS[:40] + OTHERS[:20], TOKENS[:40]]
    expected = [plain(runtime, prompt) for prompt in prompts]
    engine = engine_of(runtime, slots=range(3, 11))
    for prompt, tokens, found in zip(prompts, expected, (0, 40, 49, 40), strict=True):
        tokens_run(runtime)
        before = engine.stats.cached_tokens
        poison_engine(engine)
        assert generate_one(engine, Request(prompt, 6)) == tokens
        assert engine.stats.cached_tokens - before == found
        assert tokens_run(runtime) == len(prompt) - found + 5


def test_the_next_turn_goes_on_from_an_answer(runtime):
    engine = engine_of(runtime)
    answer = generate_one(engine, Request(TOKENS[:30], 6))
    prompt = TOKENS[:30] + answer + OTHERS[:5]
    expected = plain(runtime, prompt)
    before = engine.stats.cached_tokens
    assert generate_one(engine, Request(prompt, 6)) == expected
    assert engine.stats.cached_tokens - before == 35  # the answer's last token was not run


def test_a_prompt_is_cut_where_it_diverges(runtime):
    """The third prompt is cut where it diverges from the first, and the last one goes on from there. The second one is
    as long as the first, and shares nothing with the others.
    """
    branches = [TOKENS[:30] + OTHERS[start : start + 10] for start in (0, 20, 40)]
    prompts = [branches[0], OTHERS[100:140], *branches[1:]]
    expected = [plain(runtime, prompt) for prompt in prompts]
    engine = engine_of(runtime, slots=range(3, 11))
    assert [generate_one(engine, Request(prompt, 6)) for prompt in prompts] == expected
    assert engine.stats.cached_tokens == 30


def test_sequences_at_a_time(runtime):
    prompts = [TOKENS[:20], TOKENS[:20] + OTHERS[:7], OTHERS[:25], TOKENS[:20] + OTHERS[:30], OTHERS[:25]]
    expected = [plain(runtime, prompt) for prompt in prompts]
    engine = engine_of(runtime, slots=(3, 4))
    ids = [engine.add(Request(prompt, 6)) for prompt in prompts]
    outputs = run(engine)
    assert [tokens_of(outputs[id]) for id in ids] == expected
    assert engine._prefixes.cache.stats.evictions > 0 and engine._prefixes.cache.stats.in_use == 0


def test_the_least_recently_used_makes_room_and_the_pinned_do_not(runtime):
    pinned = TOKENS[:20]
    engine = engine_of(runtime, slots=(3, 4), pinned=[pinned])
    first = Request(pinned + OTHERS[:4], 2)
    generate_one(engine, first)
    for start in range(0, 50, 10):
        generate_one(engine, Request(OTHERS[start : start + 10], 2))
    before = engine.stats.cached_tokens
    prompt = pinned + OTHERS[30:36]
    assert generate_one(engine, Request(prompt, 6)) == plain(runtime, prompt)
    assert engine.stats.cached_tokens - before == 20
    assert engine._prefixes.cache.stats.snapshots == 2


def test_a_new_state_has_no_prefixes(runtime):
    cache = SlotPrefixCache(runtime, (2, 3))
    for _ in range(2):
        engine = Engine(runtime, 1, prefix_cache=cache)
        assert generate_one(engine, Request(TOKENS[:20], 6)) == plain(runtime, TOKENS[:20])
        assert engine.stats.cached_tokens == 0


def test_refusals(runtime):
    with pytest.raises(UserError, match="1 slots for 1 pinned prefixes; at least one more is needed"):
        SlotPrefixCache(runtime, (2,), pinned=[TOKENS[:4]])
    with pytest.raises(UserError, match="slot 2 is set aside and 2 sequences take the first 2"):
        Engine(runtime, 2, prefix_cache=SlotPrefixCache(runtime, (2, 3)))


def test_a_copy_that_forgets_the_window_is_seen(runtime, monkeypatch):
    prompt = TOKENS[:40] + OTHERS[:9]
    expected = plain(runtime, prompt)
    correct = HybridState.copy

    def copy(self, source, destination, length):
        windows = [(layer, layer.conv_state.clone()) for layer in self.layers if hasattr(layer, "conv_state")]
        correct(self, source, destination, length)
        for layer, before in windows:
            layer.conv_state.copy_(before)

    engine = engine_of(runtime)
    generate_one(engine, Request(TOKENS[:40], 6))
    monkeypatch.setattr(HybridState, "copy", copy)
    logits = []
    step = runtime.step
    monkeypatch.setattr(runtime, "step", lambda *arguments: logits.append(step(*arguments)) or logits[-1])
    tokens = generate_one(engine, Request(prompt, 6))
    monkeypatch.undo()
    runtime.logits.clear()
    plain(runtime, prompt)
    assert tokens != expected or (logits[0][0] - runtime.logits[len(prompt)]).abs().max() > 1e-3
    assert torch.isfinite(logits[0]).all()
