"""Drafts with multi-token prediction are what its layers say of the whole text that the drafter has seen."""

import math

import pytest
import torch

from granite4_neuron.engine import Engine, MTPDrafter, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import DraftRequest, SeenTokens
from granite4_neuron.runtime.interface import Row
from test.support.engines import VOCAB, ChunkRuntime, generate_one, mtp_engine_model, run, tokens_of
from test.support.stepping import random_tokens

PROMPTS = [random_tokens(VOCAB, length, seed=length).tolist() for length in (1, 20, 90)]
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def model():
    return mtp_engine_model()


@pytest.fixture(params=["fused", "torch"])
def runtime(request, model):
    return ChunkRuntime(model, request.param)


@torch.inference_mode()
def drafts_of(model, tokens, most, origin=0):
    """Draft greedily from nothing: run the text, then the layers over all of it from `origin` on, for each draft."""
    runtime = ChunkRuntime(model)
    _, [hidden_states] = runtime.step_with_hidden_states(runtime.allocate(1, 300), [Row(1, 0, tokens[:-1])])
    layers, following, states = runtime.mtp, tokens[origin + 1 :], hidden_states[origin:]
    drafts = []
    while len(drafts) < most:
        result = layers.step(layers.allocate(1, 300), [Row(1, 0, [*following, *drafts])], [states])
        drafts.append(int(layers.logits(result)[0].argmax()))
        states = torch.cat([states, result])
    return drafts


class Recorded(MTPDrafter):
    """A drafter that keeps its proposals, by the text that they follow."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.drafts = {}

    def propose(self, requests):
        proposed = super().propose(requests)
        self.drafts |= {tuple(each.tokens): drafts for each, drafts in zip(requests, proposed, strict=True) if drafts}
        return proposed


def assert_right(model, drafter, origins=None):
    assert len(drafter.drafts) > 5
    for tokens, drafts in drafter.drafts.items():
        origin = (origins or {}).get(tokens[:2], 0)
        assert drafts == drafts_of(model, list(tokens), len(drafts), origin), tokens


def never_pause(engine):
    """Draft at each step, although random layers are seldom right."""
    for sequence in engine._live.running.values():
        sequence.backoff.note = lambda length, accepted: None


@pytest.mark.slow_cases
def test_several_sequences_whose_drafts_are_rejected(model, runtime):
    """More sequences than slots, one of them cancelled; drafts are seldom accepted."""
    drafter = Recorded(runtime, 2, 200)
    engine = Engine(runtime, 2, drafter=drafter, draft_tokens=3)
    ids = [engine.add(Request(prompt, MAX_TOKENS)) for prompt in (*PROMPTS, PROMPTS[1])]
    outputs = run(engine, lambda: never_pause(engine) or (engine.stats.generated_tokens > 8 and engine.cancel(ids[1])))
    assert [len(outputs.get(id, [])) for id in (ids[0], *ids[2:])] == [MAX_TOKENS] * 3
    assert engine.stats.drafted_tokens > 2 * engine.stats.accepted_tokens
    assert_right(model, drafter)
    assert not drafter._followed


@pytest.mark.slow_cases
def test_accepted_drafts(model, runtime):
    """A logits processor makes the text follow each step's first two drafts."""
    drafter = Recorded(runtime, 1, 200)
    engine = Engine(runtime, 1, drafter=drafter, draft_tokens=3)

    def agreeing(tokens, logits):
        tokens = tokens[0].tolist()
        for behind in (0, 1):
            drafts = drafter.drafts.get(tuple(tokens[: len(tokens) - behind]), [])[: 2 if behind else 1]
            if drafts[:behind] == tokens[len(tokens) - behind :] and len(drafts) > behind:
                return torch.full_like(logits, -math.inf).index_fill(1, torch.tensor(drafts[behind]), 0.0)
        return logits

    id = engine.add(Request(PROMPTS[1], 30, logits_processors=[agreeing]))
    assert len(run(engine, lambda: never_pause(engine))[id]) == 30
    assert engine.stats.accepted_tokens >= 1.5 * engine.stats.drafts > 5
    assert_right(model, drafter)


@pytest.mark.slow_cases
def test_after_a_hit_in_the_prefix_cache_the_layers_see_the_rest(model, runtime):
    cache = PrefixCache(runtime, None, None)
    prompt = PROMPTS[2]
    generate_one(Engine(runtime, 1, prefix_cache=cache), Request(prompt[:70], 1))
    text = generate_one(Engine(runtime, 1), Request(prompt, MAX_TOKENS))
    drafter = Recorded(runtime, 1, 200)
    engine = Engine(runtime, 1, drafter=drafter, draft_tokens=3, prefix_cache=cache)
    id = engine.add(Request(prompt, MAX_TOKENS))
    assert tokens_of(run(engine, lambda: never_pause(engine))[id]) == text
    assert engine.stats.cached_tokens == 70
    assert_right(model, drafter, {tuple(prompt[:2]): 70})


@pytest.mark.slow_cases
def test_pauses_and_long_sequences(model, runtime, caplog):
    """With drafting paused for most of the text, hidden states are read in one call; a cache that is full begins
    again."""
    drafter = Recorded(runtime, 1, 60)
    engine = Engine(runtime, 1, drafter=drafter, draft_tokens=3)
    id = engine.add(Request(PROMPTS[1], 140))
    texts = run(engine)[id]
    assert tokens_of(texts) == generate_one(Engine(runtime, 1), Request(PROMPTS[1], 140))
    short = {tokens: drafts for tokens, drafts in drafter.drafts.items() if len(tokens) <= 60}
    assert max(map(len, drafter.drafts)) > 100 and short and not caplog.text
    for tokens, drafts in short.items():
        assert drafts == drafts_of(model, list(tokens), len(drafts))


def test_a_step_longer_than_the_cache(model, runtime, caplog):
    """A step brings more tokens than the layers attend to: the last of them count."""
    tokens = PROMPTS[2]
    _, [states] = runtime.step_with_hidden_states(runtime.allocate(1, 100), [Row(1, 0, tokens[:-1])])
    engine = Engine(runtime, 1)
    engine.add(Request(tokens, 1))
    [sequence] = engine._live.waiting
    drafter = MTPDrafter(runtime, 1, 70)
    drafter.see([SeenTokens(1, 0, tokens, states)])
    [drafts] = drafter.propose([DraftRequest(1, tokens, 3, sequence.sampler)])
    assert drafts == drafts_of(model, tokens, 1, origin=len(states) - 70), "there is no room to run a draft"
    assert len(generate_one(Engine(runtime, 1, drafter=MTPDrafter(runtime, 1, 9)), Request(tokens, MAX_TOKENS))) == 16
    assert not caplog.text


def test_more_sequences_than_slots(model, runtime):
    """A new sequence displaces one that the step does not have, and no other."""
    texts = [random_tokens(VOCAB, 80, seed=seed).tolist() for seed in range(4)]
    rows = [Row(slot, 0, text[:-1]) for slot, text in enumerate(texts, start=1)]
    _, states = runtime.step_with_hidden_states(runtime.allocate(4, 100), rows)
    engine = Engine(runtime, 1)
    engine.add(Request(texts[0], 1))
    [sequence] = engine._live.waiting
    requests = [DraftRequest(id, text, 2, sequence.sampler) for id, text in enumerate(texts)]
    expected = [drafts_of(model, text, 2) for text in texts]
    drafter = MTPDrafter(runtime, 2, 200)
    drafter.see([SeenTokens(id, 0, texts[id], states[id]) for id in (0, 1, 2)])
    assert drafter.propose(requests) == [*expected[:2], [], []]
    drafter.see([SeenTokens(id, 0, texts[id], states[id]) for id in (3, 1)])
    assert drafter.propose(requests) == [[], expected[1], [], expected[3]]


def test_a_step_that_it_did_not_see_begins_anew(model, runtime):
    """Such as after a failure: what the cache has then is of no use, because tokens are missing."""
    tokens, drafter = PROMPTS[2], Recorded(runtime, 2, 200)
    _, [states] = runtime.step_with_hidden_states(runtime.allocate(1, 100), [Row(1, 0, tokens[:30])])
    engine = Engine(runtime, 1)
    engine.add(Request(tokens[:31], 1))
    [sequence] = engine._live.waiting

    def proposed():
        return drafter.propose([DraftRequest(1, tokens[:31], 3, sequence.sampler)])[0]

    drafter.see([SeenTokens(1, 0, tokens[:31], states[:10])])
    assert proposed() == []
    drafter.see([SeenTokens(1, 12, tokens[:31], states[12:])])
    assert proposed() == drafts_of(model, tokens[:31], 3, origin=12)
    drafter.see([SeenTokens(2, 0, tokens[:31], states), SeenTokens(3, 0, tokens[:31], states)])
    assert set(drafter._followed) == {2, 3}, "the one not seen for longest is forgotten"
    drafter.end(3)
    drafter.end(4)
    assert proposed() == [] and set(drafter._followed) == {2}


def test_failures_change_no_text(model, runtime, caplog):
    """If the layers fail at times, a sequence's drafts begin anew behind the tokens that are missing."""
    drafter = MTPDrafter(runtime, 3, 200)
    layers, calls = drafter._mtp, iter(range(1000))

    class Unreliable:
        allocate, logits = staticmethod(layers.allocate), staticmethod(layers.logits)

        @staticmethod
        def step(*arguments):
            if next(calls) % 5 == 2:
                raise RuntimeError("planted")
            return layers.step(*arguments)

    drafter._mtp = Unreliable()
    engine = Engine(runtime, 3, drafter=drafter, draft_tokens=2)
    ids = [engine.add(Request(prompt, MAX_TOKENS)) for prompt in PROMPTS]
    outputs = run(engine, lambda: never_pause(engine))
    for id, prompt in zip(ids, PROMPTS, strict=True):
        assert tokens_of(outputs[id]) == generate_one(Engine(runtime, 1), Request(prompt, MAX_TOKENS))
    assert "The drafter failed, and texts go on without it" in caplog.text
    assert engine.stats.drafts > 5 and not drafter._followed
