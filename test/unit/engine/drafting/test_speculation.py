"""Speculation in the engine: whatever is drafted, texts are those of decode one token at a time."""

import functools
import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from granite4_neuron import UserError
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.engine import DraftModel, Engine, MTPDrafter, Request
from granite4_neuron.engine.drafting.drafters import DraftRequest, NgramDrafter
from granite4_neuron.runtime.interface import Row
from test.support.engines import (
    CHUNK,
    ENGINE_MODELS,
    VOCAB,
    ChunkRuntime,
    PoisonedPrefixCache,
    cached_bytes,
    engine_model,
    generate_one,
    mtp_engine_model,
    poison_engine,
    poison_state,
    run,
    tokens_of,
)
from test.support.stepping import random_tokens

OPTIONS = {"greedy": {}, "sampled": dict(temperature=0.8, top_k=20), "penalized": dict(repetition_penalty=1.3)}
BASES = [random_tokens(VOCAB, 60, seed=seed).tolist() for seed in range(2)]
MODELS = {**ENGINE_MODELS, "nemotron, mtp": mtp_engine_model}
LENGTHS = (1, 2, 3, 15, 16, 17, 33, 50)
MAX_TOKENS = 24


def prompt_of(number):
    """Return one of 16 prompts; some of them begin alike."""
    base = BASES[number % 2]
    return [*base[: LENGTHS[number // 2]], *([] if number % 3 else [number])]


def request_of(number, max_tokens=MAX_TOKENS, options="greedy", **more):
    return Request(prompt_of(number), max_tokens, **OPTIONS[options], seed=number, **more)


@pytest.fixture(scope="module")
def model(request):
    """Return the engine's small model of a family; of Granite if the test names none."""
    return MODELS[getattr(request, "param", "granite")]()


@pytest.fixture(scope="module")
def other_model():
    return engine_model(seed=1, layer_types=("attention", "mamba", "mamba"))


@pytest.fixture(scope="module")
def alone(model):
    """Return the tokens of a request that has an engine to itself, without drafts or cache."""

    @functools.cache
    def tokens(number, max_tokens=MAX_TOKENS, options="greedy"):
        return generate_one(Engine(ChunkRuntime(model), 1), request_of(number, max_tokens, options))

    return tokens


class Script:
    """A drafter of the right tokens up to a position that differs from call to call, and of wrong ones after it."""

    def __init__(self, texts, seed=0):
        self.texts = texts
        self.random = random.Random(seed)
        self.ended = []

    def propose(self, requests):
        return [self._drafts(request) for request in requests]

    def _drafts(self, request):
        text = next((text for text in self.texts if text[: len(request.tokens)] == list(request.tokens)), None)
        if text is None:
            return []
        right = text[len(request.tokens) :][: self.random.randint(0, request.most)]
        wrong = self.random.randint(0, request.most - len(right))
        return [*right, *(self.random.randrange(VOCAB) for _ in range(wrong))]

    def end(self, id):
        self.ended.append(id)


class ReadRuntime(ChunkRuntime):
    """A runtime that counts the tokens that its sequences gain."""

    read = 0

    def step(self, state, rows, all_logits=False):
        self.read += sum(len(row.tokens) for row in rows)
        return super().step(state, rows, all_logits)

    def commit(self, state, verification, accepted):
        self.read += sum(accepted)
        super().commit(state, verification, accepted)


class PoisonedDraftModel(DraftModel):
    """A draft model that writes NaN into the state of uncertain tokens before each call."""

    def propose(self, requests):
        stored = {followed.slot: followed.stored for followed in self._followed.values()}
        poison_state(self._state, self._free, stored)
        return super().propose(requests)


class PoisonedMTPDrafter(MTPDrafter):
    """A drafter that writes NaN into its cache behind accepted tokens, and into free slots, before each call."""

    def propose(self, requests):
        self._poison()
        return super().propose(requests)

    def see(self, steps):
        self._poison()
        super().see(steps)

    def _poison(self):
        stored = {followed.slot: followed.stored for followed in self._followed.values()}
        free = [slot for slot in range(1, self._num_sequences + 1) if slot not in stored]
        poison_state(self._state, free, stored)


def drafter_of(kind, model, other_model, alone, num_sequences=4, options=tuple(OPTIONS)):
    if kind == "n-gram":
        return NgramDrafter(1, 3)
    if kind == "mtp":
        return PoisonedMTPDrafter(ChunkRuntime(model), num_sequences, 200)
    if kind == "script":
        numbers = itertools.product(range(16), options)
        return Script([prompt_of(number) + alone(number, MAX_TOKENS, option) for number, option in numbers])
    runtime = ChunkRuntime(other_model if kind == "other model" else model)
    cache = PoisonedPrefixCache(runtime, 100_000, None) if kind == "same model, cached" else None
    return PoisonedDraftModel(runtime, VOCAB, num_sequences, 200, cache)


KINDS = ["n-gram", "script", "same model", "same model, cached", "other model"]


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("model", "kind"),
    [*(("granite", kind) for kind in KINDS), ("nemotron", "same model, cached"), ("nemotron, mtp", "mtp")],
    indirect=["model"],
)
def test_drafts_change_no_text(runtime, model, other_model, alone, kind, options):
    drafter = drafter_of(kind, model, other_model, alone)
    engine = Engine(runtime, 4, drafter=drafter, draft_tokens=3)
    ids = {engine.add(request_of(number, options=options)): number for number in range(16)}
    outputs = run(engine, lambda: poison_engine(engine))
    for id, number in ids.items():
        assert tokens_of(outputs[id]) == alone(number, MAX_TOKENS, options)
        assert outputs[id][-1].finish_reason == "length"
    stats = engine.stats
    assert stats.decode_tokens == 16 * (MAX_TOKENS - 1) and stats.decode_rows <= stats.decode_tokens
    assert stats.accepted_tokens == stats.decode_tokens - stats.decode_rows
    if kind.startswith("same model"):
        assert stats.acceptance_rate == 1 and stats.decode_tokens_per_row > 3.5
    elif kind == "script":
        assert 0.2 < stats.acceptance_rate < 0.9


@pytest.mark.slow
def test_a_wrong_number_of_accepted_tokens_would_be_seen(model, other_model, alone, monkeypatch):
    commit = ChunkRuntime.commit

    def generous(self, state, verification, accepted):
        rows = verification.rows
        commit(self, state, verification, [min(n + 1, len(row.tokens)) for n, row in zip(accepted, rows, strict=True)])

    monkeypatch.setattr(ChunkRuntime, "commit", generous)
    engine = Engine(ChunkRuntime(model), 1, drafter=drafter_of("script", model, other_model, alone), draft_tokens=4)
    wrong = [number for number in range(16) if generate_one(engine, request_of(number)) != alone(number)]
    assert len(wrong) > 4


@pytest.mark.parametrize(("model", "kind"), [("granite", "same model"), ("nemotron, mtp", "mtp")], indirect=["model"])
def test_a_drafters_state_is_for_the_sequences_of_its_engine(runtime, model, other_model, alone, kind):
    drafter = drafter_of(kind, model, other_model, alone, num_sequences=3)
    for sizes in ((2, 80), (1, 80), (4, 100), (3, 300)):
        engine = Engine(runtime, sizes[0], max_length=sizes[1], drafter=drafter, draft_tokens=3)
        state = drafter._state
        assert (state.num_sequences, state.max_length) == (min(sizes[0], 3), min(sizes[1], 200))
        assert generate_one(engine, request_of(13)) == alone(13)
        assert engine.stats.drafted_tokens > 10 and (kind == "mtp" or engine.stats.acceptance_rate == 1)
    assert Engine(runtime, 3, max_length=200, drafter=drafter) and drafter._state is state


class TestDraftModel:
    """The drafts themselves are the tokens that the small model gives alone."""

    def requests(self, runtime, numbers, most):
        engine = Engine(runtime, 1)
        return [engine.add(request_of(number)) for number in numbers] and [
            DraftRequest(number, prompt_of(number), count, sequence.sampler)
            for number, count, sequence in zip(numbers, most, engine._live.waiting, strict=True)
        ]

    def test_equal_the_text_of_the_draft_model_alone(self, runtime, alone):
        drafter = DraftModel(runtime, VOCAB, 3, 200)
        requests = self.requests(runtime, [13, 0, 4], [5, 2, 0])
        assert drafter.propose(requests) == [alone(13)[:5], alone(0)[:2], []]
        # The target chose other tokens, or the whole draft and one token more.
        for request, took in ((requests[0], [9, 8, 7]), (requests[1], alone(0)[:3])):
            tokens = [*request.tokens, *took]
            [drafts] = drafter.propose([DraftRequest(request.id, tokens, 4, request.chooser)])
            assert drafts == generate_one(Engine(runtime, 1), Request(tokens, 4))

    def test_tokens_in_its_prefix_cache_are_not_read_again(self, runtime, model, alone):
        """A sequence continues from the end of an earlier one, or of its prompt. Drafts are those without the cache."""
        small = ReadRuntime(model)
        drafter = PoisonedDraftModel(small, VOCAB, 1, 200, PoisonedPrefixCache(small, None, None))
        engine = Engine(runtime, 1, drafter=drafter, draft_tokens=3)

        def read_for(tokens, **options):
            small.read = 0
            new = generate_one(engine, Request(tokens, MAX_TOKENS, **options))
            assert new == generate_one(Engine(ChunkRuntime(model), 1), Request(tokens, MAX_TOKENS))
            assert engine.stats.acceptance_rate == 1
            return small.read, new

        prompt = prompt_of(13)
        read, new = read_for(prompt)
        assert len(prompt) + MAX_TOKENS - 4 <= read <= len(prompt) + MAX_TOKENS
        for tokens, unread in ((prompt, 0), ([*prompt, *new, 5, 6, 7], 8)):
            assert MAX_TOKENS - 4 <= read_for(tokens)[0] <= MAX_TOKENS + unread
        assert read_for(prompt, cache_salt="another")[0] >= len(prompt) + MAX_TOKENS - 4

    def test_sequences_without_room_get_no_drafts(self, runtime):
        drafter = DraftModel(runtime, VOCAB, 1, 20)
        assert list(map(len, drafter.propose(self.requests(runtime, [6, 5, 13], [4, 4, 4])))) == [4, 0, 0]
        drafter.end(6)
        drafter.end(99)
        # Prompts have 17 and 50 tokens. The last draft is never run and so needs no room.
        assert list(map(len, drafter.propose(self.requests(runtime, [11], [9])))) == [4]
        drafter.end(11)
        assert drafter.propose(self.requests(runtime, [14], [4])) == [[]]

    def test_a_draft_model_with_logits_that_are_not_finite_drafts_nothing(self, runtime, alone):
        broken = engine_model(seed=2)
        with torch.no_grad():
            broken.model.norm.weight.fill_(torch.nan)
        engine = Engine(runtime, 2, drafter=DraftModel(ChunkRuntime(broken), VOCAB, 2, 200))
        assert generate_one(engine, request_of(3)) == alone(3) and engine.stats.drafted_tokens == 0

    def test_refusals(self, runtime, monkeypatch):
        with pytest.raises(UserError, match="a vocabulary of 160 tokens and the model one of 1,000; they must"):
            DraftModel(runtime, 1000, 1, 200)
        with pytest.raises(UserError, match="draft_tokens is 0"):
            Engine(runtime, 1, drafter=NgramDrafter(), draft_tokens=0)
        monkeypatch.setattr(ChunkRuntime, "cannot", {"verify": "It cannot verify."})
        for refused in (lambda: DraftModel(runtime, VOCAB, 1, 200), lambda: Engine(runtime, 1, drafter=NgramDrafter())):
            with pytest.raises(UserError, match=r"It cannot verify\."):
                refused()


class TestEnds:
    def engine(self, runtime, model, other_model, alone, num_sequences=2, **options):
        script = Script([prompt_of(number) + alone(number) for number in range(16)])
        return Engine(runtime, num_sequences, drafter=script, draft_tokens=6, **options)

    def test_within_the_accepted_tokens(self, runtime, model, other_model, alone):
        text = alone(9)
        for count in range(1, 12):
            engine = self.engine(runtime, model, other_model, alone)
            limited = engine.add(request_of(9, max_tokens=count))
            stopped = engine.add(request_of(9, stop_token_ids=frozenset([text[count]])))
            outputs = run(engine, lambda engine=engine: poison_engine(engine))
            assert tokens_of(outputs[limited]) == text[:count] and outputs[limited][-1].finish_reason == "length"
            end = text.index(text[count]) + 1
            assert tokens_of(outputs[stopped]) == text[:end] and outputs[stopped][-1].finish_reason == "stop"
            assert sorted(engine._scheduler._drafting.drafter.ended) == [limited, stopped]

    def test_cancelled_between_steps_and_the_slot_used_again(self, runtime, model, other_model, alone):
        engine = self.engine(runtime, model, other_model, alone, num_sequences=2)
        first, second = engine.add(request_of(10)), engine.add(request_of(11))
        for _ in range(4):
            engine.step()
        engine.cancel(first)
        third = engine.add(request_of(12))
        outputs = run(engine, lambda: poison_engine(engine))
        assert first not in outputs and tokens_of(outputs[third]) == alone(12)
        assert tokens_of(outputs[second]) == alone(11)[-len(outputs[second]) :]

    def test_given_up_between_verification_and_commit(self, runtime, alone):
        """No token of the sequence is accepted, and its slot goes to another one."""
        state = runtime.allocate(2, 200)
        prompts = [prompt_of(12), prompt_of(13)]
        runtime.step(state, [Row(1, 0, prompts[0])])
        runtime.step(state, [Row(2, 0, prompts[1])])
        drafts = alone(13)[:4]
        rows = [Row(1, len(prompts[0]), [5, 6, 7]), Row(2, len(prompts[1]), drafts)]
        verification = runtime.verify(state, rows)
        runtime.commit(state, verification, [0, 4])
        poison_state(state, [1], {2: len(prompts[1]) + 4})
        runtime.step(state, [Row(1, 0, prompt_of(14))])
        for slot, length, number in ((1, len(prompt_of(14)), 14), (2, len(prompts[1]) + 4, 13)):
            text = alone(number)[length - len(prompt_of(number)) :]
            for at, token in enumerate(text[:4]):
                logits = runtime.step(state, [Row(slot, length + at, [token])])
                assert int(logits[0].argmax()) == text[at + 1]

    def test_logits_that_are_not_finite(self, runtime, model, other_model, alone):
        engine = self.engine(runtime, model, other_model, alone)
        bad, good = engine.add(request_of(10)), engine.add(request_of(11))
        outputs = {bad: [], good: []}
        while engine.has_work:
            if len(outputs[bad]) > 6 and bad in engine._live.running:
                with torch.inference_mode():
                    engine._slots.state.layers[0].ssm_state[engine._live.running[bad].slot] = torch.nan
            for output in engine.step():
                outputs[output.id].append(output)
        assert outputs[bad][-1].finish_reason == "error" and tokens_of(outputs[good]) == alone(11)
        assert tokens_of(outputs[bad][:-1]) == alone(10)[: len(outputs[bad]) - 1]

    def test_stop_strings(self, texting):
        runtime, tokenizer = texting
        tokens = tokenizer.encode("The quick brown fox")
        plain = Engine(runtime, 1, tokenizer=tokenizer)
        id = plain.add(Request(tokens, 30))
        text = "".join(output.text for output in run(plain)[id])
        whole = tokens + generate_one(plain, Request(tokens, 30))
        for at in range(2, 20, 3):
            stop = text[at : at + 2]
            engine = Engine(runtime, 1, tokenizer=tokenizer, drafter=Script([whole]), draft_tokens=7)
            id = engine.add(Request(tokens, 30, stop=[stop]))
            outputs = run(engine)[id]
            assert "".join(output.text for output in outputs) == text[: text.index(stop)]
            assert outputs[-1].finish_reason == "stop"


@pytest.mark.slow
def test_snapshots_within_accepted_tokens_are_exact(runtime, model, other_model, alone):
    """Accepted drafts reach a place that the cache wants, and never go beyond it in one step."""
    cache = PoisonedPrefixCache(runtime, None, CHUNK)
    script = drafter_of("script", model, other_model, alone)
    engine = Engine(runtime, 1, drafter=script, draft_tokens=9, prefix_cache=cache)
    text = prompt_of(13) + generate_one(engine, request_of(13))
    plain = ChunkRuntime(model)
    state = plain.allocate(1, 200)
    for length in range(CHUNK, len(text), CHUNK):
        plain.step(state, [Row(1, length - CHUNK, text[length - CHUNK : length])])
        expected, kept = plain.snapshot(state, 1, length), cache.export(text[:length])
        for name, tensor in expected.tensors.items():
            assert (tensor - kept.tensors[name]).abs().max() <= 1e-5
    assert engine.stats.acceptance_rate > 0.2


@pytest.mark.slow
def test_sampled_texts_have_the_targets_distribution(model, other_model):
    """The second token of many sequences, each with random numbers of its own, follows one that was drafted."""
    counts = {}
    for kind in ("plain", "n-gram", "other model"):
        drafter = None if kind == "plain" else drafter_of(kind, model, other_model, None, 50)
        engine = Engine(ChunkRuntime(model), 50, drafter=drafter)
        ids = [engine.add(Request([3, 4, 3], 4, temperature=0.7, top_k=6, seed=seed)) for seed in range(200)]
        outputs = run(engine)
        counts[kind] = Counter(tuple(tokens_of(outputs[id])) for id in ids)
    assert counts["plain"] == counts["n-gram"] == counts["other model"] and len(counts["plain"]) > 20


arrivals = st.lists(
    st.tuples(
        st.integers(0, 25),  # the step before which it comes
        st.integers(0, 15),  # which request
        st.sampled_from([1, 2, 7, MAX_TOKENS]),
        st.sampled_from(sorted(OPTIONS)),
        st.none() | st.integers(0, 20),  # the steps after which it is cancelled
        st.frozensets(st.integers(1, 17), max_size=2),  # tokens after which the caller wants snapshots
    ),
    min_size=1,
    max_size=9,
)
cases = Counter()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kinds"),
    [("granite", (None, *KINDS)), ("nemotron, mtp", ("mtp",))],
    indirect=["model"],
)
@given(
    arrivals=arrivals,
    num_sequences=st.integers(1, 4),
    choice=st.integers(0, len(KINDS)),
    draft_tokens=st.integers(1, 9),
    budget=st.sampled_from([0, 30_000, 200_000, None]),
    interval=st.sampled_from([None, CHUNK, 2 * CHUNK]),
    kernels=st.sampled_from(["torch", "fused"]),
)
def test_every_text_is_that_of_the_sequence_alone(
    model, kinds, other_model, alone, arrivals, num_sequences, choice, draft_tokens, budget, interval, kernels
):
    """Sequences come and go, and memory that must not be read holds NaN. With the fused kernels a step has pieces of
    prompts beside tokens of others.
    """
    kind = kinds[choice % len(kinds)]
    runtime = ChunkRuntime(model, kernels)
    cache = PoisonedPrefixCache(runtime, budget, interval)
    drafter = kind and drafter_of(kind, model, other_model, alone, num_sequences)
    engine = Engine(runtime, num_sequences, prefix_cache=cache, drafter=drafter, draft_tokens=draft_tokens)
    expected, outputs, cancelled = {}, {}, set()
    for step in itertools.count():
        for start, number, max_tokens, options, stop, positions in arrivals:
            if start == step:
                positions = frozenset(at for at in positions if at <= len(prompt_of(number)))
                id = engine.add(request_of(number, max_tokens, options, snapshots_at=positions))
                expected[id] = alone(number, MAX_TOKENS, options)[:max_tokens], None if stop is None else step + stop
        cancelled |= {id for id, (_, stop) in expected.items() if stop == step and engine.cancel(id)}
        if not engine.has_work and step > 25:
            break
        poison_engine(engine)
        for output in engine.step():
            assert output.id not in cancelled and output.error is None
            outputs.setdefault(output.id, []).append(output)
    for id, (tokens, _) in expected.items():
        got = tokens_of(outputs.get(id, []))
        assert got == (tokens[: len(got)] if id in cancelled else tokens)
    assert cached_bytes(cache) == (cache.stats.num_bytes, cache.stats.snapshots)
    assert budget is None or cache.stats.num_bytes <= budget
    assert cache.stats.in_use == 0
    assert not isinstance(drafter, DraftModel) or len(drafter._free) == num_sequences
    assert not isinstance(drafter, MTPDrafter) or not drafter._followed
    cases.update(
        runs=1,
        sequences=len(expected),
        cancelled=len(cancelled),
        cached_tokens=engine.stats.cached_tokens,
        mixed=sum(runtime.packs_rows and len({len(row.tokens) == 1 for row in rows}) == 2 for rows in runtime.steps),
        evictions=cache.stats.evictions,
        drafted=engine.stats.drafted_tokens,
        accepted=engine.stats.accepted_tokens,
    )


def test_the_random_cases_covered_enough():
    """The number of cases is printed, with -s or -rP."""
    print(dict(cases))
    if cases:  # the test above was selected, too
        names = ("cancelled", "cached_tokens", "evictions", "drafted", "accepted")
        assert min(cases[name] for name in names) > 0
        assert cases["mixed"] > 0 or not cpu.has_fused_kernels()
