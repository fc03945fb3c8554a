"""Constrained sequences in the engine. Expected texts come from logits that are masked here, token by token."""

import math

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.engine import DraftModel, Engine, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.engine.sampling import NoTokenLeft
from granite4_neuron.runtime.interface import Row
from granite4_neuron.runtime.prompt_cuts import Multiples
from test.support.engines import VOCAB, ChunkRuntime, generate_one, run, tokens_of
from test.support.stepping import random_tokens

PROMPT = random_tokens(VOCAB, 40, seed=1).tolist()
STOP = 5
NEW = 24


class Ladder:
    """Allows a few tokens, which depend on the last one. The sequence may stop after every sixth token."""

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

    def forced(self, most):
        copy, tokens = self.fork(), []
        while len(tokens) < most:
            allowed = [token for token in range(VOCAB) if copy.allows(token)]
            if len(allowed) != 1:
                break
            tokens += allowed
            copy.accept(*allowed)
        return tokens


class Wall(Ladder):
    """Allows two tokens and then none."""

    def fork(self):
        return Wall(self.accepted)

    def mask(self, logits):
        if len(self.accepted) == 2:
            raise NoTokenLeft("nothing fits.")
        return super().mask(logits)


class AnyTokens:
    """A drafter of the right tokens, with a wrong one after every second."""

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


class Corridor(Ladder):
    """Allows only one token in long stretches, and a few tokens between them. The text ends in a stretch."""

    def __init__(self, accepted=(), tells=True):
        super().__init__(accepted)
        self.tells = tells

    def fork(self):
        return Corridor(self.accepted, self.tells)

    def allows(self, token):
        number = len(self.accepted)
        if number % 13 < 3:
            return token % 9 == number % 9
        return token == (STOP if number == 37 else 20 + number)

    def forced(self, most):
        return super().forced(most) if self.tells else ()


CORRIDOR = {
    "greedy": {},
    "sampled": dict(temperature=1.1, seed=3),
    "log-probabilities": dict(logprobs=3),
    "top tokens": dict(temperature=0.9, top_k=9, top_p=0.9, min_p=0.01, seed=4, logprobs=0),
    "penalties": dict(frequency_penalty=0.5, repetition_penalty=1.3, min_tokens=50, logit_bias={3: 2.5, 41: -100}),
    "cut off": dict(max_tokens=30),
    "cut off before a stretch": dict(max_tokens=16),
    "stop tokens in a stretch": dict(stop_token_ids=[STOP, 47], temperature=1.0, seed=5),
    "no stop token": dict(stop_token_ids=[], max_tokens=38, snapshots_at=[7]),
    "processors": dict(logits_processors=[lambda tokens, scores: scores + tokens.shape[1] % 7]),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("drafted", [None, "n-gram", "any tokens", "model"])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_tokens_without_an_alternative_save_steps_and_change_nothing(model, num_sequences, drafted):
    """Texts, log-probabilities and snapshots stay the same bit by bit, and later tokens get the same random numbers."""
    runtime = ChunkRuntime(model, "fused")
    requests = {
        name: {"stop_token_ids": [STOP], "max_tokens": 60, **options, "tokens": PROMPT[: 20 + number]}
        for number, (name, options) in enumerate(CORRIDOR.items())
    }
    found = {}
    for tells in (False, True):
        runtime.steps.clear()
        cache = PrefixCache(runtime, None, 16)
        drafter = {
            None: lambda: None,
            "n-gram": lambda: NgramDrafter(1, 2),
            "any tokens": lambda: AnyTokens([*PROMPT[:20], *range(99, 103), *range(24, 60)]),
            "model": lambda: DraftModel(ChunkRuntime(model, "fused"), VOCAB, 4, 200),
        }[drafted]()
        engine = Engine(runtime, num_sequences, prefix_cache=cache, drafter=drafter, draft_tokens=3)
        ids = [engine.add(Request(constraint=Corridor(tells=tells), **options)) for options in requests.values()]
        outputs = run(engine)
        texts = [[output._replace(id=0) for output in outputs[id]] for id in ids]
        found[tells] = texts, snapshots_of(cache), engine.stats.generated_tokens
        assert cache.stats.in_use == 0
        if not tells:
            steps = len(runtime.steps)
    assert found[True] == found[False]
    if drafted is None:
        assert len(runtime.steps) < steps / (2 if num_sequences == 1 else 1)
        without = Engine(runtime, num_sequences)
        ids = [without.add(Request(constraint=Corridor(), **options)) for options in requests.values()]
        outputs = run(without)
        assert [tokens_of(outputs[id]) for id in ids] == [[each.token for each in text] for text in found[True][0]]


def snapshots_of(cache):
    """Return the bytes of all entries by their tokens."""
    found, nodes = {}, [(cache._root, ())]
    while nodes:
        node, tokens = nodes.pop()
        tokens += tuple(node.tokens)
        nodes += [(child, tokens) for child in node.children.values()]
        if node.entry is not None:
            tensors = [*node.entry.recurrent.values(), node.entry.logits, *node.keys_and_values.values()]
            found[tokens] = [tensor.numpy().tobytes() for tensor in tensors]
    return found


def test_on_devices_tokens_without_an_alternative_run_one_by_one(model):
    """A step of several tokens would give other bits."""
    runtime = ChunkRuntime(model)
    runtime.prompt_cuts = Multiples(8)
    generate_one(Engine(runtime, 1), Request(PROMPT[:8], 30, constraint=Corridor()))
    assert [len(row.tokens) for [row] in runtime.steps] == [8] + [1] * 29


@pytest.mark.parametrize("wrong", [None, 5, ["a"], [-1], [VOCAB], [True], [1] * 100, ZeroDivisionError("no")], ids=str)
def test_a_constraint_may_only_force_tokens(model, wrong):
    class Wrong(Ladder):
        def fork(self):
            return self

        def forced(self, most):
            if isinstance(wrong, Exception):
                raise wrong
            return wrong

    engine = Engine(ChunkRuntime(model, "fused"), 2)
    ids = [engine.add(Request(PROMPT, NEW, constraint=constraint)) for constraint in (Wrong(), None)]
    outputs = run(engine)
    assert outputs[ids[0]][-1].error.startswith("the request's constraint failed (") and len(outputs[ids[1]]) == NEW


GREEDY = {"plain": {}, "with biases": dict(logit_bias={STOP: 3, 7: 100, 20: -100})}


@pytest.mark.slow_cases
@pytest.mark.parametrize("drafted", [None, "n-gram", "any tokens", "model"])
@pytest.mark.parametrize("options", GREEDY.values(), ids=GREEDY.keys())
def test_greedy_texts_and_log_probabilities(model, runtime, options, drafted):
    """Sequences run in a batch, with a prefix cache, beside sequences without a constraint."""
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


@pytest.mark.slow_cases
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


def test_forbidden_alternatives_are_left_out_of_log_probabilities(runtime):
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


def test_a_sequence_without_an_allowed_token_ends_and_others_go_on(runtime):
    engine = Engine(runtime, 2)
    ids = [engine.add(Request(PROMPT, NEW, constraint=Wall())), engine.add(Request(PROMPT, NEW))]
    walled, free = map(run(engine).get, ids)
    assert len(walled) == 3 and walled[-1].error == "nothing fits." and walled[-1].is_requests_fault
    assert len(free) == NEW


def test_a_constraint_of_another_type_is_refused():
    with pytest.raises(UserError, match=r"^constraint is 'a', and must be a constraint"):
        Request(PROMPT, NEW, constraint="a")
