"""A device chooses tokens and runs them before the engine knows them. All texts are those of the host's choice."""

import itertools
import math
from contextlib import suppress

import pytest
import torch
from transformers import GenerationConfig

from benchmarks.engine.decoding_stand_in import ChoosingRuntime, DecodingRuntime, _Decoded
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.engine.live_sequences import LiveSequences, _Guard
from granite4_neuron.engine.scheduler import Scheduler
from granite4_neuron.runtime.interface import MOST_STOPS
from test.support.engines import (
    CHUNK,
    VOCAB,
    ChunkRuntime,
    PoisonedPrefixCache,
    cached_bytes,
    engine_model,
    generate_one,
    poison_engine,
    run,
    tokens_of,
)
from test.support.stepping import random_tokens
from test.unit.engine.test_constraint import Ladder
from test.unit.engine.test_failures import Interrupt

NEW = 9
PROMPTS = [random_tokens(VOCAB, length, seed=length).tolist() for length in (5, 20, 33)]


class Runtime(DecodingRuntime):
    tokens_per_step = CHUNK

    def __init__(self, model):
        super().__init__(model, GenerationConfig(top_k=None), cpu_kernels="torch")


class Choosing(Runtime, ChoosingRuntime):
    pass


@pytest.fixture(scope="module")
def model():
    return engine_model()


@pytest.fixture(scope="module")
def alone(model):
    """Return the tokens of a request in an engine of its own, whose host chooses."""
    return lambda request: generate_one(Engine(ChunkRuntime(model), 1), request)


def test_all_but_the_first_and_the_last_run_ahead(model, alone):
    """The prompt's step gives the first token. Before the last token it is certain that the text will end."""
    runtime = Runtime(model)
    assert generate_one(Engine(runtime, 1), Request(PROMPTS[1], NEW)) == alone(Request(PROMPTS[1], NEW))
    assert runtime.ahead == NEW - 2 and runtime.stopped == 0


SAMPLED = {
    "from all": dict(temperature=0.8, seed=3),
    "with a nucleus": dict(temperature=0.3, top_p=0.8, seed=7),
    "of many options": dict(temperature=1.7, top_k=15, top_p=0.9, min_p=0.02, seed=4),
    "among 1": dict(top_k=1, seed=5),
    "of equal ones": dict(temperature=1e44, top_k=20, seed=6),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED.keys())
def test_a_sampled_token_is_drawn_on_the_device(model, alone, options, monkeypatch):
    """The host draws the undecided tokens from all logits. If most are undecided, few steps begin ahead in vain."""
    runtime, whole, steps = Runtime(model), [], []
    logits, decode = _Decoded.logits, Runtime.decode
    monkeypatch.setattr(_Decoded, "logits", lambda decoded, rows: whole.append(rows) or logits(decoded, rows))
    monkeypatch.setattr(Runtime, "decode", lambda *arguments: steps.append(1) or decode(*arguments))
    request = Request(PROMPTS[1], 4 * NEW, **options)
    assert generate_one(Engine(runtime, 1), request) == alone(request)
    assert runtime.drawn + runtime.undecided == 4 * NEW - 1 and len(whole) == runtime.undecided > 3
    if options.get("temperature") == 1e44:
        assert runtime.drawn == 0 and len(steps) == 4 * NEW - 1 + 8
    else:
        assert runtime.undecided < NEW and runtime.ahead > 2 * NEW and len(steps) <= 4 * NEW - 1 + len(whole)


def test_each_sequence_has_its_own_noise(model, alone, monkeypatch):
    """Greedy sequences run beside sampled ones. The others do not wait for one whose tokens the host must draw."""
    runtime, steps, decode = Runtime(model), [], Runtime.decode
    monkeypatch.setattr(Runtime, "decode", lambda *arguments: steps.append(1) or decode(*arguments))
    engine = Engine(runtime, 4)
    kinds = [SAMPLED["from all"], dict(temperature=0.8, seed=9), {}, SAMPLED["of many options"]]
    requests = [Request(PROMPTS[0], 3 * NEW + number, **options) for number, options in enumerate(kinds)]
    ids = [engine.add(request) for request in requests]
    outputs = run(engine, lambda: poison_engine(engine))
    assert [tokens_of(outputs[id]) for id in ids] == [alone(request) for request in requests]
    assert runtime.ahead > 6 * NEW and runtime.undecided > 5 and len(steps) < 5 * NEW


OPTIONS = {
    "many of the likeliest": dict(temperature=0.8, top_k=64, seed=3),
    "sampled log-probabilities": dict(temperature=0.8, seed=3, logprobs=1),
    "log-probabilities": dict(logprobs=1),
    "a penalty": dict(frequency_penalty=0.5),
    "a processor": dict(logits_processors=[lambda tokens, scores: scores]),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_request_that_needs_logits_has_them(model, alone, options):
    runtime = Runtime(model)
    engine = Engine(runtime, 2)
    requests = [Request(PROMPTS[0], 2 * NEW), Request(PROMPTS[1], NEW, **options)]
    ids = [engine.add(request) for request in requests]
    outputs = run(engine, lambda: poison_engine(engine))
    assert [tokens_of(outputs[id]) for id in ids] == [alone(request) for request in requests]
    assert 0 < runtime.ahead < 2 * NEW  # not beside the other
    assert all((output.logprob is None) == ("logprobs" not in options) for output in outputs[ids[1]])


CHOSEN = {
    "penalties": (dict(temperature=0.8, seed=3, repetition_penalty=1.4, frequency_penalty=0.3), True),
    "log-probabilities": (dict(logprobs=3), True),
    "a bias": (dict(temperature=0.8, seed=3, logit_bias={7: 9.0}), True),
    "the fewest tokens": (dict(min_tokens=NEW, stop_token_ids=list(range(3, VOCAB))), True),
    "single words": (dict(bad_words_ids=[[token] for token in range(3, VOCAB, 2)], presence_penalty=0.5), True),
    "words": (dict(bad_words_ids=[[number, number] for number in range(VOCAB)]), False),
    "repeated tokens": (dict(no_repeat_ngram_size=2), False),
    "a constraint": (dict(temperature=2.0, seed=3, constraint=Ladder(), logprobs=2), False),
    "typical tokens": (dict(temperature=2.0, seed=3, typical_p=0.5), None),
}


@pytest.mark.parametrize(("options", "is_ahead"), CHOSEN.values(), ids=CHOSEN.keys())
def test_a_device_chooses_by_all_options(model, options, is_ahead, monkeypatch):
    """Only undecided tokens need logits, and tokens of which the device does not know all options (None). It is told
    once how often a sequence has its tokens.
    """
    runtime, whole, logits = Choosing(model), [], _Decoded.logits
    monkeypatch.setattr(_Decoded, "logits", lambda decoded, rows: whole.extend(rows) or logits(decoded, rows))
    texts = []
    for each in (ChunkRuntime(model), runtime):
        engine = Engine(each, 2)
        ids = [engine.add(Request(prompt, 3 * NEW, **options)) for prompt in PROMPTS[:2]]
        outputs = run(engine)
        texts.append([[(output.token, output.logprob) for output in outputs[id]] for id in ids])
    assert texts[0] == texts[1] and (runtime.ahead > NEW) == bool(is_ahead)
    assert bool(runtime.drawn) == (is_ahead is not None) and (is_ahead is None or len(whole) == runtime.undecided)
    assert runtime.counted == 2 * any(name.endswith("penalty") for name in options)


def test_a_stop_token_ends_a_text_and_is_not_run(model, alone):
    runtime = Runtime(model)
    text = alone(Request(PROMPTS[0], NEW))
    request = Request(PROMPTS[0], NEW, stop_token_ids=[text[4]])
    assert generate_one(Engine(runtime, 1), request) == text[: text.index(text[4]) + 1]
    assert runtime.stopped == 1
    others = [token for token in range(VOCAB) if token not in text]
    for number in (MOST_STOPS, MOST_STOPS + 1):  # a cache keeps the state, which the device cannot leave for more
        runtime = Runtime(model)
        engine = Engine(runtime, 1, prefix_cache=PrefixCache(runtime, None, None))
        request = Request(PROMPTS[0], NEW, stop_token_ids=[*others[: number - 1], text[4]])
        assert generate_one(engine, request) == text[: text.index(text[4]) + 1]
        assert bool(runtime.ahead) == (number == MOST_STOPS)


@pytest.mark.parametrize("options", [{}, SAMPLED["from all"]], ids=["greedy", "sampled"])
def test_requests_that_come_and_go(model, alone, options):
    runtime = Runtime(model)
    engine = Engine(runtime, 2, prefix_cache=PrefixCache(runtime, None, CHUNK))
    requests = [Request(prompt, NEW + number, **options) for number, prompt in enumerate(PROMPTS)]
    outputs = {engine.add(requests[0]): []}
    cancelled = engine.add(requests[1])
    for number in range(60):
        if number == 6:
            engine.cancel(cancelled)
            outputs |= {engine.add(requests[2]): [], engine.add(requests[1]): []}
        for output in engine.step():
            if output.id != cancelled:
                outputs[output.id].append(output)
    expected = [alone(requests[number]) for number in (0, 2, 1)]
    assert [tokens_of(each) for each in outputs.values()] == expected and not engine.has_work and runtime.ahead > 0


@pytest.mark.parametrize(
    "steps, options", [(1, {}), (4, {}), (5, {}), (4, SAMPLED["from all"]), (3, SAMPLED["from all"])]
)
def test_a_finished_text_is_cached_with_all_its_tokens(model, alone, steps, options):
    """In the last case the host has drawn the last token."""
    runtime = Runtime(model)
    cache = PrefixCache(runtime, None, None)
    engine = Engine(runtime, 1, prefix_cache=cache)
    id = engine.add(Request(PROMPTS[0], NEW, **options))
    tokens = [output.token for _ in range(steps) for output in engine.step()]
    assert runtime.undecided == bool(options)
    engine.finish(id)
    further = Request([*PROMPTS[0], *tokens, 7, 8], NEW)
    hits = cache.stats.hit_tokens
    assert generate_one(engine, further) == alone(further)
    assert cache.stats.hit_tokens - hits >= len(PROMPTS[0]) + len(tokens) - 1


def test_no_step_goes_ahead_of_a_due_snapshot(model, alone):
    runtime = Runtime(model)
    cache = PrefixCache(runtime, None, CHUNK)
    engine = Engine(runtime, 1, prefix_cache=cache)
    text = [*PROMPTS[0], *generate_one(engine, Request(PROMPTS[0], 2 * CHUNK))]
    assert runtime.ahead > CHUNK
    for length in (CHUNK, 2 * CHUNK):
        hits, further = cache.stats.hit_tokens, Request([*text[:length], 7, 8], NEW)
        assert generate_one(engine, further) == alone(further)
        assert cache.stats.hit_tokens - hits == length


class Beginning(Runtime):
    """A runtime whose steps begin snapshots. It records the calls."""

    begins_snapshots = True

    def __init__(self, model):
        super().__init__(model)
        self.calls = []

    def decode(self, state, rows):
        self.calls.append("decode")
        return _RecordingDecoded(self.calls, super().decode(state, rows))

    def snapshot(self, state, slot, length, start=0):
        self.calls.append(f"snapshot of {length}")
        return super().snapshot(state, slot, length, start)


class _RecordingDecoded:
    def __init__(self, calls, decoded):
        self._calls, self._decoded = calls, decoded

    def tokens(self):
        self._calls.append("tokens")
        return self._decoded.tokens()

    def __getattr__(self, name):
        return getattr(self._decoded, name)


class RecordingCache(PoisonedPrefixCache):
    def _add(self, node, tokens, snapshot, logits):
        self._runtime.calls.append(f"entry of {snapshot.length}")
        super()._add(node, tokens, snapshot, logits)


class TestSnapshotsThatAStepBegins:
    @pytest.mark.parametrize(
        ("options", "calls"),
        [
            ({}, "decode, decode, entry of 20, tokens, decode, tokens, tokens"),
            (dict(logprobs=1), "entry of 20"),  # the host chooses
        ],
        ids=["ahead", "with reports"],
    )
    def test_they_enter_the_cache_while_the_device_runs(self, model, alone, options, calls):
        """The end of a text is kept at once, because its slot may be free. Between other steps nothing else waits."""
        runtime = Beginning(model)
        cache = RecordingCache(runtime, None, CHUNK)
        request = Request(PROMPTS[1], 4, **options)
        assert generate_one(Engine(runtime, 1, prefix_cache=cache), request) == alone(request)
        before, after = "snapshot of 16, entry of 16, snapshot of 20", "snapshot of 23, entry of 23"
        assert runtime.calls == f"{before}, {calls}, {after}".split(", ")

    def test_a_prompt_finds_those_of_the_step_before(self, model, alone):
        cache = PrefixCache(Beginning(model), None, CHUNK)
        engine = Engine(cache._runtime, 2, prefix_cache=cache)
        text = random_tokens(VOCAB, 60, seed=2).tolist()
        requests = [Request(text, NEW), Request([*text[:20], 1, 2, 3], NEW)]
        ids = [engine.add(request) for request in requests]
        outputs = run(engine)
        assert [tokens_of(outputs[id]) for id in ids] == [alone(request) for request in requests]
        assert cache.stats.hit_tokens == CHUNK

    @pytest.mark.parametrize(("num_sequences", "budget"), [(1, None), (3, None), (3, 3)])
    def test_later_prompts_find_them(self, model, alone, num_sequences, budget):
        """Hits are those of a runtime whose snapshots enter the cache at once, and each entry has the same bits."""
        text = random_tokens(VOCAB, 60, seed=2).tolist()
        others = [random_tokens(VOCAB, 20, seed=seed).tolist() for seed in range(3, 9)]
        cuts = (33, 33, 20, 47, 33, 20)
        short = random_tokens(VOCAB, 6, seed=9).tolist()  # two that begin with it share a step
        prompts = [
            [*short, 1, 2],
            [*short, 3, 4],
            *PROMPTS,
            *(text[:cut] + other for cut, other in zip(cuts, others, strict=True)),
            text,
            text,
        ]
        caches = []
        for kind in (Runtime, Beginning):
            runtime = kind(model)
            max_bytes = None if budget is None else budget * runtime.snapshot(runtime.allocate(1, 80), 1, 80).num_bytes
            cache = PoisonedPrefixCache(runtime, max_bytes, CHUNK, at_branches=True)
            engine = Engine(runtime, num_sequences, prefix_cache=cache)
            ids = [engine.add(Request(prompt, NEW)) for prompt in prompts]
            outputs = run(engine, lambda engine=engine: poison_engine(engine))
            assert [tokens_of(outputs[id]) for id in ids] == [alone(Request(prompt, NEW)) for prompt in prompts]
            assert cached_bytes(cache) == (cache.stats.num_bytes, cache.stats.snapshots)
            caches.append(cache)
        at_once, later = caches
        assert at_once.stats.hit_tokens > 100 and (budget is None or later.stats.evictions)
        if budget is None:
            assert at_once.stats == later.stats
            for prompt in prompts:
                for length in range(1, len(prompt) + 1):
                    some, other = (cache.export(prompt[:length]) for cache in caches)
                    assert (some is None) == (other is None)
                    if some is not None:
                        assert some.tensors.keys() == other.tensors.keys()
                        assert all(torch.equal(some.tensors[name], other.tensors[name]) for name in some.tensors)

    def test_one_whose_beginning_was_evicted_meanwhile_is_dropped(self, model):
        runtime = Beginning(model)
        cache = PrefixCache(runtime, None, None)
        state, logits = runtime.allocate(1, 40), torch.zeros(VOCAB)
        cache.insert(PROMPTS[2][:10], state, 1, logits)
        add = cache.take(PROMPTS[2], state, 1, logits)
        cache._forget()
        add()
        assert cached_bytes(cache) == (0, 0) == (cache.stats.num_bytes, cache.stats.snapshots)

    def test_logits_that_are_not_finite_leave_nothing(self, model, monkeypatch):
        runtime = Beginning(model)
        cache = PrefixCache(runtime, None, CHUNK)
        step = CPURuntime.step

        def failing(self, state, rows, all_logits=False):
            return step(self, state, rows, all_logits) * math.nan

        monkeypatch.setattr(CPURuntime, "step", failing)
        engine = Engine(runtime, 1, prefix_cache=cache)
        id = engine.add(Request(PROMPTS[1], NEW))
        assert [output.finish_reason for output in run(engine)[id]] == ["error"]
        assert cache.stats.snapshots == 0 and runtime.calls == ["snapshot of 16"]


class TestFailures:
    def test_a_step_ahead_that_fails(self, model, alone, monkeypatch):
        """It ends its own sequences after they got the previous step's tokens. A text that ends there is whole."""
        runtime = Runtime(model)
        engine = Engine(runtime, 2)
        ids = [engine.add(Request(PROMPTS[0], NEW)), engine.add(Request(PROMPTS[0], NEW + 5))]
        following = Scheduler.following

        def failing(scheduler, step):
            ahead = following(scheduler, step)
            if ahead is not None and len(ahead.rows) < len(step.rows):
                return ahead._replace(rows=[None])
            return ahead

        monkeypatch.setattr(Scheduler, "following", failing)
        first, second = (run_of[id] for run_of in [run(engine)] for id in ids)
        assert tokens_of(first) == alone(Request(PROMPTS[0], NEW))
        assert second[-1].finish_reason == "error" and tokens_of(second[:-1]) == tokens_of(first)
        assert engine.failed_steps == 1

    def test_a_state_that_a_failed_step_ahead_may_have_changed_is_not_cached(self, model, alone, monkeypatch):
        """The sequence has ended by then."""
        runtime = Runtime(model)
        text = alone(Request(PROMPTS[0], NEW))
        stop = next(number for number in range(3, NEW) if text[number] not in text[:number])
        cache = PrefixCache(runtime, None, None)
        engine = Engine(runtime, 1, prefix_cache=cache)
        engine.add(Request(PROMPTS[0], NEW, stop_token_ids=[text[stop]]))
        for _ in range(stop):
            engine.step()
        monkeypatch.setattr(Runtime, "decode", lambda *arguments: 1 / 0)
        [output] = engine.step()
        assert output.finish_reason == "stop" and engine.failed_steps == 1 and not engine.has_work
        monkeypatch.undo()
        hits, further = cache.stats.hit_tokens, Request([*PROMPTS[0], *text[:stop], 7], NEW)
        assert generate_one(engine, further) == alone(further) and cache.stats.hit_tokens - hits <= len(PROMPTS[0])

    def test_logits_that_are_not_finite(self, model, alone, monkeypatch):
        """They end their own sequence, and the device runs it no further."""
        runtime = Runtime(model)
        step = CPURuntime.step

        def failing(self, state, rows, all_logits=False):
            logits = step(self, state, rows, all_logits).clone()
            for row, row_logits in zip(rows, logits, strict=True):
                if row.slot == 1 and row.start == len(PROMPTS[0]) + 3:
                    row_logits[5] = math.nan
            return logits

        monkeypatch.setattr(CPURuntime, "step", failing)
        engine = Engine(runtime, 2)
        ids = [engine.add(Request(PROMPTS[0], NEW)), engine.add(Request(PROMPTS[1], NEW))]
        outputs = run(engine)
        assert outputs[ids[0]][-1].error == "no token can be chosen: the model's logits are not finite."
        assert len(outputs[ids[0]]) == 5 and runtime.stopped == 1
        monkeypatch.undo()
        assert tokens_of(outputs[ids[1]]) == alone(Request(PROMPTS[1], NEW))

    @pytest.mark.slow
    def test_interrupts_at_each_line(self, model, alone):
        """The interrupted step has begun ahead, and begins the next one ahead."""
        requests = [Request([3], 5), Request([4], 5, **SAMPLED["from all"])]
        expected = [alone(request) for request in requests]
        decode = Engine._decode, Engine._launch_following, Engine._launch
        guard = _Guard.__init__, _Guard.__enter__, _Guard.__exit__
        code = [Engine._run_step.__wrapped__, *decode, Engine._live_part, LiveSequences.count, *guard]
        ended = whole = 0
        for line in itertools.count(step=2):
            runtime = Runtime(model)
            engine = Engine(runtime, 2)
            outputs = {engine.add(request): [] for request in requests}
            while not runtime.ahead:
                for output in engine.step():
                    outputs[output.id].append(output)
            with suppress(KeyboardInterrupt), Interrupt(line, *code):
                rest = engine.step()
                break
            for output in itertools.chain.from_iterable(run(engine).values()):
                outputs[output.id].append(output)
            for each, tokens in zip(outputs.values(), expected, strict=True):
                is_whole = each[-1].error is None
                found = tokens_of(each if is_whole else each[:-1])
                assert found == tokens[: len(found)] and (not is_whole or len(found) == 5), line
                ended, whole = ended + (not is_whole), whole + is_whole
        assert rest and ended > 20 and whole > 5
