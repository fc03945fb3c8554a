"""Drafts that keep being rejected pause for a while, are tried again, and never change a text."""

import pytest

from granite4_neuron.engine import Engine, Request
from granite4_neuron.engine.drafting.backoff import DraftBackoff
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from test.support.engines import ChunkRuntime, engine_model, generate_one, poison_engine, run, tokens_of
from test.support.stepping import random_tokens

NEW_TOKENS = 900
DRAFTS = 3


class Scripted:
    """A drafter that is right or wrong by the sequence's length. It records the lengths at which it may draft."""

    def __init__(self, text, is_right):
        self.text, self.is_right = text, is_right
        self.asked = []

    def propose(self, requests):
        return [self._propose(len(request.tokens), request.most) for request in requests]

    def _propose(self, length, most):
        if most:
            self.asked.append(length)
        ahead = self.text[length : length + most]
        return ahead if self.is_right(length) else [(token + 1) % 160 for token in ahead]

    def end(self, id):
        pass


@pytest.fixture(scope="module")
def model():
    return engine_model(max_position_embeddings=1000)


@pytest.fixture(scope="module")
def request_():
    return Request(random_tokens(160, 20, seed=5).tolist(), NEW_TOKENS)


@pytest.fixture(scope="module")
def text(model, request_):
    return [*request_.tokens, *generate_one(Engine(ChunkRuntime(model), 1), request_)]


def drafted(model, request, drafter):
    """Return (the text with a drafter, the engine's stats)."""
    engine = Engine(ChunkRuntime(model), 1, drafter=drafter, draft_tokens=DRAFTS)
    id = engine.add(request)
    outputs = run(engine, lambda: poison_engine(engine))
    return [*request.tokens, *tokens_of(outputs[id])], engine.stats


@pytest.mark.slow
def test_drafts_that_are_always_wrong(model, request_, text):
    drafter = Scripted(text, lambda length: False)
    got, stats = drafted(model, request_, drafter)
    assert got == text and stats.accepted_tokens == 0
    first = len(request_.tokens) + 1
    assert drafter.asked[:8] == list(range(first, first + 8))
    assert [length - first for length in drafter.asked[8::8]] == [40, 112, 248, 512, 776], "32, 64, 128, 256, 256 later"
    assert len(drafter.asked) < 0.07 * NEW_TOKENS


@pytest.mark.slow
def test_drafts_that_become_right_are_taken_again(model, request_, text):
    drafter = Scripted(text, lambda length: length > 300)
    got, stats = drafted(model, request_, drafter)
    assert got == text
    assert max(drafter.asked) > 900 and stats.accepted_tokens > 0.6 * (NEW_TOKENS - 512)


def test_right_drafts_never_pause(model, request_, text):
    drafter = Scripted(text, lambda length: True)
    got, stats = drafted(model, request_, drafter)
    assert got == text and stats.acceptance_rate == 1
    assert stats.decode_tokens_per_row > DRAFTS


def test_a_draft_accepted_in_every_other_verification_is_enough():
    backoff, length = DraftBackoff(), 0
    for accepted in [0, 1] * 20:
        assert backoff.allows(length)
        length += 1 + accepted
        backoff.note(length, accepted)


def test_after_accepted_drafts_the_next_pause_is_short():
    backoff = DraftBackoff()
    for _ in range(8):
        backoff.note(100, 0)
    assert not backoff.allows(131) and backoff.allows(132)
    for accepted in (1,) * 8 + (0,) * 5:
        assert backoff.allows(200)
        backoff.note(200, accepted)
    assert not backoff.allows(231) and backoff.allows(232)


@pytest.mark.slow
def test_each_sequence_of_a_batch_pauses_on_its_own(model, request_, text):
    other = Request(random_tokens(160, 30, seed=6).tolist(), 200)
    alone = generate_one(Engine(ChunkRuntime(model), 1), other)
    right, wrong = Scripted(text, lambda length: True), Scripted([*other.tokens, *alone], lambda length: False)

    class Both:
        def propose(self, requests):
            return [
                (right if request.id == ids[0] else wrong)._propose(len(request.tokens), request.most)
                for request in requests
            ]

        def end(self, id):
            pass

    engine = Engine(ChunkRuntime(model), 2, drafter=Both(), draft_tokens=DRAFTS)
    ids = [engine.add(request_), engine.add(other)]
    outputs = run(engine, lambda: poison_engine(engine))
    assert tokens_of(outputs[ids[0]]) == text[20:] and tokens_of(outputs[ids[1]]) == alone
    assert len(wrong.asked) < 40 and len(right.asked) > 200


def test_ngrams(model, request_, text):
    assert drafted(model, request_, NgramDrafter())[0] == text
