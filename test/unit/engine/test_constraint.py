"""Constrained sequences in the engine. Expected texts come from logits that are masked here, token by token."""

import math

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.engine import DraftModel, Engine, PrefixCache, Request
from granite4_neuron.engine.drafters import NgramDrafter
from granite4_neuron.engine.sampling import NoTokenLeft
from granite4_neuron.runtime.interface import Row
from test.support.engines import VOCAB, ChunkRuntime, generate_one, run, tokens_of
from test.support.stepping import random_tokens

PROMPT = random_tokens(VOCAB, 40, seed=1).tolist()
STOP = 5
NEW = 24


class Ladder:
    """Allows a few tokens, others after each token. The sequence may stop after every sixth."""

    def __init__(self, accepted=()):
        self.accepted = list(accepted)

    def fork(self):
        return Ladder(self.accepted)

    def allows(self, token):
        number, last = len(self.accepted), self.accepted[-1] if self.accepted else 0
        if token == STOP:
            return number % 6 == 5
        return token % 9 in (number % 9, (number + last) % 9)

    def mask(self, logits):
        return torch.tensor([value if self.allows(token) else -math.inf for token, value in enumerate(logits.tolist())])

    def accept(self, token):
        assert self.allows(token)
        self.accepted.append(token)

    def count_allowed(self, tokens):
        copy = self.fork()
        for count, token in enumerate(tokens):
            if not copy.allows(token):
                return count
            copy.accept(token)
        return len(tokens)


class Wall(Ladder):
    """Allows two tokens and then none."""

    def fork(self):
        return Wall(self.accepted)

    def mask(self, logits):
        if len(self.accepted) == 2:
            raise NoTokenLeft("nothing fits.")
        return super().mask(logits)


class AnyTokens:
    """A drafter of the right tokens, and of a wrong one after each two."""

    def __init__(self, text):
        self.text = text

    def propose(self, requests):
        drafts = [list(self.text[len(request.tokens) :][: request.most]) for request in requests]
        return [[*each[:2], *(VOCAB - 1 - token for token in each[2:3])] for each in drafts]

    def end(self, id):
        pass


def by_hand(runtime, prompt, options):
    """Return a greedy text, and the log-probabilities of each token and of two alternatives."""
    tokens, reports, ladder = list(prompt), [], Ladder()
    while len(reports) < NEW and tokens[-1] != STOP:
        logits = runtime.step(runtime.allocate(1, 200), [Row(1, 0, tokens)])[0].double()
        allowed = [token for token in range(VOCAB) if ladder.allows(token)]
        total = torch.logsumexp(logits[allowed], 0)
        ranked = sorted(allowed, key=lambda token: -logits[token])
        biased = max(allowed, key=lambda token: logits[token] + options.get("logit_bias", {}).get(token, 0))
        reports.append([(token, float(logits[token] - total)) for token in (biased, *ranked[:2])])
        tokens.append(biased)
        ladder.accept(biased)
    return tokens[len(prompt) :], reports


GREEDY = {"plain": {}, "with biases": dict(logit_bias={STOP: 3, 7: 100, 20: -100})}


@pytest.mark.parametrize("drafted", [None, "n-gram", "any tokens", "model"])
@pytest.mark.parametrize("options", GREEDY.values(), ids=GREEDY.keys())
def test_greedy_texts_and_log_probabilities(model, runtime, options, drafted):
    """In a batch, with a prefix cache, next to sequences without a constraint."""
    expected, reports = by_hand(runtime, PROMPT, options)
    free = generate_one(Engine(runtime, 1), Request(PROMPT, NEW))
    drafter = {
        None: lambda: None,
        "n-gram": lambda: NgramDrafter(1, 2),
        "any tokens": lambda: AnyTokens([*PROMPT, *expected]),
        "model": lambda: DraftModel(ChunkRuntime(model), VOCAB, 3, 200),
    }[drafted]()
    cache = PrefixCache(runtime, None, 16)
    engine = Engine(runtime, 3, prefix_cache=cache, drafter=drafter, draft_tokens=3)
    constraint = Ladder()
    limited = Request(PROMPT, NEW, constraint=constraint, logprobs=2, stop_token_ids=[STOP], **options)
    for _ in range(2):  # the second time with the whole prompt in the cache
        ids = [engine.add(request) for request in (limited, Request(PROMPT, NEW), limited)]
        outputs = run(engine)
        assert tokens_of(outputs[ids[1]]) == free
        for id in (ids[0], ids[2]):
            assert tokens_of(outputs[id]) == expected
            found = [[(out.token, out.logprob.logprob), *out.logprob.top] for out in outputs[id]]
            for pairs, wanted in zip(found, reports, strict=True):
                assert [token for token, _ in pairs] == [token for token, _ in wanted]
                assert [value for _, value in pairs] == pytest.approx([value for _, value in wanted], abs=1e-4)
    assert not constraint.accepted, "a request's own constraint stays where it was"
    if drafted in ("any tokens", "model"):
        assert engine.stats.accepted_tokens >= len(expected)
    if drafted == "model" and not options:
        assert engine.stats.acceptance_rate == 1, "drafts obey the constraint too"


@pytest.mark.parametrize("drafted", ["n-gram", "any tokens", "model"])
def test_sampled_texts_do_not_depend_on_drafts(model, runtime, drafted):
    options = dict(temperature=0.9, constraint=Ladder(), stop_token_ids=[STOP])
    requests = [Request(PROMPT, NEW, seed=seed, **options) for seed in range(6)]
    alone = [generate_one(Engine(runtime, 1), request) for request in requests]
    assert len({tuple(text) for text in alone}) > 3
    for text in alone:
        assert Ladder().count_allowed(text) == len(text)
    drafter = {
        "n-gram": lambda: NgramDrafter(1, 2),
        "any tokens": lambda: AnyTokens([*PROMPT, *alone[0]]),
        "model": lambda: DraftModel(ChunkRuntime(model), VOCAB, 4, 200),
    }[drafted]()
    engine = Engine(runtime, 4, drafter=drafter)
    ids = [engine.add(request) for request in requests]
    outputs = run(engine)
    assert [tokens_of(outputs[id]) for id in ids] == alone


def test_alternatives_that_are_forbidden_are_left_out(runtime):
    [output] = run_one(runtime, Request(PROMPT, 1, constraint=OneToken(), logprobs=5))
    assert output.token == 3 and output.logprob.logprob == 0 and output.logprob.top == [(3, 0.0)]


class OneToken(Ladder):
    def fork(self):
        return OneToken(self.accepted)

    def allows(self, token):
        return token == 3


def run_one(runtime, request):
    engine = Engine(runtime, 1)
    id = engine.add(request)
    return run(engine)[id]


def test_where_nothing_may_follow_the_sequence_ends_and_others_go_on(runtime):
    engine = Engine(runtime, 2)
    ids = [engine.add(Request(PROMPT, NEW, constraint=Wall())), engine.add(Request(PROMPT, NEW))]
    walled, free = map(run(engine).get, ids)
    assert len(walled) == 3 and walled[-1].error == "nothing fits." and walled[-1].is_requests_fault
    assert len(free) == NEW


def test_a_constraint_is_one():
    with pytest.raises(UserError, match=r"^constraint is 'a', and must be a constraint"):
        Request(PROMPT, NEW, constraint="a")
