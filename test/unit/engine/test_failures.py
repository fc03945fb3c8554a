"""A failure in a step ends the sequences of that step, with a reason. All others get the texts that they get alone."""

import functools
import gc
import itertools
import pickle
import sys

import numpy as np
import pytest
import torch

from granite4_neuron import UserError, stream_generate
from granite4_neuron.engine import DraftModel, Engine, PrefixCache, Request
from granite4_neuron.engine.best_effort import BestEffort
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.engine.drafting.drafting import Drafting
from granite4_neuron.engine.live_sequences import LiveSequences, _Guard
from granite4_neuron.engine.prefix.reuse import PrefixReuse
from granite4_neuron.engine.prefix.slot_cache import SlotPrefixCache
from granite4_neuron.engine.prefix.tree import Node
from granite4_neuron.engine.scheduler import Scheduler
from granite4_neuron.engine.slots import Slots
from granite4_neuron.generation import loop
from test.support.engines import (
    CHUNK,
    VOCAB,
    ChunkRuntime,
    cached_bytes,
    engine_model,
    free_slots,
    generate_one,
    run,
    tokens_of,
)
from test.support.stepping import random_tokens

NEW, LONG = 8, 30
PROMPTS = [random_tokens(VOCAB, length, seed=length).tolist() for length in (5, 20, 33)]


@pytest.fixture(scope="module")
def alone(model):
    """Return the tokens of a prompt's continuation in an engine of its own."""

    @functools.cache
    def tokens(number, max_tokens=NEW):
        return generate_one(Engine(ChunkRuntime(model), 1), Request(PROMPTS[number], max_tokens))

    return tokens


def engine_of(runtime, **options):
    return Engine(runtime, 3, prefix_cache=PrefixCache(runtime, None, CHUNK), **options)


def check_goes_on(engine, alone):
    """Check that nothing is in use, and that all texts are right, also from the prefix cache."""
    assert not engine.has_work and free_slots(engine) == [1, 2, 3]
    assert engine._prefixes.cache.stats.in_use == 0
    for _ in range(2):
        ids = [engine.add(Request(prompt, NEW)) for prompt in PROMPTS]
        outputs = run(engine)
        assert [tokens_of(outputs[id]) for id in ids] == [alone(number) for number in range(3)]


def check_size(cache):
    assert cached_bytes(cache) == (cache.stats.num_bytes, cache.stats.snapshots)


def raising(error):
    def call(*arguments):
        raise error

    return call


def returning(value):
    return lambda *arguments: value


class ForbidsNothing:
    """A constraint."""

    def fork(self):
        return self

    def mask(self, logits):
        return logits

    def accept(self, token):
        pass

    def count_allowed(self, tokens):
        return len(tokens)

    def forced(self, most):
        return ()


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no")


WRONG_SCORES = {
    "an exception": (raising(ZeroDivisionError("by zero")), r"failed \(ZeroDivisionError: by zero\)\."),
    "an exception without words": (raising(MemoryError()), r"failed \(MemoryError\)\."),
    "no tensor": (returning(None), r"\(it returned None, and must return a tensor\)"),
    "an array": (returning(np.zeros((1, VOCAB))), "must return a tensor"),
    "more columns": (
        returning(torch.zeros(1, 2 * VOCAB)),
        r"a tensor \[1, 320\] of torch.float32 on cpu and must .* \[1, 160\]",
    ),
    "fewer columns": (returning(torch.zeros(1, 3)), r"a tensor \[1, 3\]"),
    "no axis": (returning(torch.tensor(1.0)), r"a tensor \[\]"),
    "another dtype": (returning(torch.zeros(1, VOCAB, dtype=torch.float64)), "of torch.float64 on cpu and must"),
    "sparse ones": (lambda tokens, scores: scores.to_sparse(), "torch.sparse_coo, and must"),
    "not numbers": (lambda tokens, scores: scores * np.nan, r"failed \(it returned NaN\)"),
    "an exception that cannot say anything": (raising(Mute()), r"failed \(Mute\)"),
    "another device": (returning(torch.zeros(1, VOCAB, device="meta")), "on meta and must"),
}


class TestCodeOfARequest:
    @pytest.mark.slow_cases
    @pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
    @pytest.mark.parametrize(("wrong", "message"), WRONG_SCORES.values(), ids=WRONG_SCORES.keys())
    def test_a_processor_that_fails_ends_its_own_sequence(self, runtime, alone, wrong, message, drafted):
        calls = itertools.count()

        def processor(tokens, scores):
            return wrong(tokens, scores) if next(calls) == 3 else scores

        engine = engine_of(runtime, drafter=NgramDrafter(1, 2) if drafted else None)
        bad = engine.add(Request(PROMPTS[0], NEW, logits_processors=[processor]))
        others = {engine.add(Request(PROMPTS[number], NEW)): number for number in (1, 2)}
        outputs = run(engine)
        *before, last = outputs[bad]
        assert tokens_of(before) == alone(0)[:3] and last.finish_reason == "error" and last.is_requests_fault
        assert "the request's logits processor" in last.error and "processor failed (" in last.error
        with pytest.raises(UserError, match=message):
            raise UserError(last.error)
        assert {number: tokens_of(outputs[id]) for id, number in others.items()} == {1: alone(1), 2: alone(2)}
        check_goes_on(engine, alone)

    @pytest.mark.parametrize("method", ["step", "add", "cancel", "finish"])
    def test_a_processor_cannot_call_its_engine(self, runtime, alone, method):
        engine = engine_of(runtime)
        arguments = {"step": (), "add": (Request([1]),), "cancel": (0,), "finish": (0,)}[method]
        bad = engine.add(Request(PROMPTS[0], NEW, logits_processors=[lambda *_: getattr(engine, method)(*arguments)]))
        other = engine.add(Request(PROMPTS[1], NEW))
        outputs = run(engine)
        assert "an engine cannot be called by code that it calls itself" in outputs[bad][-1].error
        assert tokens_of(outputs[other]) == alone(1)
        check_goes_on(engine, alone)

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        ("place", "wrong"),
        [
            *((place, raising(ValueError("no"))) for place in ("fork", "mask", "accept", "count_allowed")),
            ("mask", returning(None)),
            ("mask", returning(torch.zeros(3))),
            ("mask", returning(torch.full([VOCAB], -np.inf))),
            ("mask", returning(torch.full([VOCAB], np.nan))),
            ("fork", returning(None)),
            ("count_allowed", returning("a")),
            ("count_allowed", returning(-1)),
            ("count_allowed", returning(99)),
        ],
    )
    def test_a_constraint_that_fails_ends_its_own_sequence(self, runtime, alone, place, wrong):
        class Script:
            def propose(self, requests):
                return [[1][: request.most] for request in requests]

            def end(self, id):
                pass

        engine, constraint = engine_of(runtime, drafter=Script()), ForbidsNothing()
        setattr(constraint, place, wrong)
        others = {engine.add(Request(PROMPTS[number], NEW)): number for number in (1, 2)}
        bad = engine.add(Request(PROMPTS[0], NEW, constraint=constraint))
        outputs = run(engine)
        last = outputs[bad][-1]
        allows_none = "no token can be chosen: the request's constraint allows none."
        failed = last.error.startswith("the request's constraint failed (") or last.error == allows_none
        assert failed and last.is_requests_fault
        assert {number: tokens_of(outputs[id]) for id, number in others.items()} == {1: alone(1), 2: alone(2)}
        check_goes_on(engine, alone)


class TestTheRuntime:
    @pytest.mark.parametrize("is_late", [False, True], ids=["before its work", "after its work"])
    @pytest.mark.parametrize("error", [RuntimeError("no luck"), MemoryError(), KeyboardInterrupt()], ids=repr)
    @pytest.mark.parametrize("method", ["step", "verify", "commit"])
    def test_a_step_that_fails_ends_its_sequences(self, model, alone, monkeypatch, method, error, is_late):
        class Script:
            def propose(self, requests):
                texts = [prompt + alone(number, LONG) for number, prompt in enumerate(PROMPTS)]
                found = (next(text for text in texts if text[: len(each.tokens)] == each.tokens) for each in requests)
                return [text[len(each.tokens) :][: each.most] for text, each in zip(found, requests, strict=True)]

            def end(self, id):
                pass

        runtime = ChunkRuntime(model)
        engine = engine_of(runtime, drafter=None if method == "step" else Script())
        first, waiting = [engine.add(Request(prompt, LONG)) for prompt in PROMPTS], engine.add(Request(PROMPTS[0], NEW))
        outputs = []
        while len({output.id for output in outputs}) < 3:
            outputs += engine.step()
        works = getattr(runtime, method)

        def failing(*arguments):
            monkeypatch.undo()
            if is_late:
                works(*arguments)
            raise error

        monkeypatch.setattr(runtime, method, failing)
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            assert isinstance(error, KeyboardInterrupt) and engine.has_work
        for output in itertools.chain.from_iterable(run(engine).values()):
            outputs.append(output)
        of = {id: [output for output in outputs if output.id == id] for id in (*first, waiting)}
        for number, id in enumerate(first):
            *before, last = of[id]
            assert tokens_of(before) == alone(number, LONG)[: len(before)] and last.finish_reason == "error"
            assert not last.is_requests_fault
            interrupted = "it was interrupted in the middle of a step."
            assert last.error == (
                interrupted
                if isinstance(error, KeyboardInterrupt)
                else f"a step failed ({type(error).__name__}{': no luck' if error.args else ''})."
            )
        assert tokens_of(of[waiting]) == alone(0)
        check_goes_on(engine, alone)

    def test_a_state_that_cannot_be_allocated_again(self, model, alone, monkeypatch):
        runtime = ChunkRuntime(model)
        engine = engine_of(runtime)
        monkeypatch.setattr(runtime, "step", raising(RuntimeError("the device is lost")))
        engine.add(Request(PROMPTS[0], NEW))
        assert [output.error for output in engine.step()] == ["a step failed (RuntimeError: the device is lost)."]
        assert engine.failed_steps == 1
        monkeypatch.undo()
        monkeypatch.setattr(runtime, "allocate", raising(UserError("there is no room.")))
        engine.add(Request(PROMPTS[0], NEW))
        assert [output.error for output in engine.step()] == ["there is no room."]
        assert engine.failed_steps == 2, "failures must be counted, for a watchdog"
        monkeypatch.undo()
        check_goes_on(engine, alone)
        assert engine.failed_steps == 0

    def test_the_state_of_a_failed_step_is_dropped(self, model, monkeypatch):
        """The step may have taken the memory of a device's state."""
        runtime = ChunkRuntime(model)
        engine = engine_of(runtime)
        monkeypatch.setattr(runtime, "step", raising(RuntimeError("no")))
        engine.add(Request(PROMPTS[0], NEW))
        engine.step()
        monkeypatch.undo()
        before = engine._slots.state
        generate_one(engine, Request(PROMPTS[0], NEW))
        assert engine._slots.state is not before

    def test_prefixes_in_slots_are_dropped_after_a_failed_step(self, model, alone, monkeypatch):
        """A runtime that keeps its own state returns no new state object that would show the loss."""
        runtime = ChunkRuntime(model)
        cache = SlotPrefixCache(runtime, (4, 5))
        engine = Engine(runtime, 3, prefix_cache=cache)
        assert generate_one(engine, Request(PROMPTS[1], NEW)) == alone(1)
        monkeypatch.setattr(runtime, "step", raising(RuntimeError("the device is lost")))
        engine.add(Request(PROMPTS[0], NEW))
        assert engine.step()[-1].finish_reason == "error"
        monkeypatch.undo()
        engine.add(Request(PROMPTS[1], NEW))
        engine._slots.renew()
        [first, *_] = [output for _ in range(4) for output in engine.step()]
        assert first.prompt.cached_tokens == 0 and cache._state is engine._slots.state

    def test_prefixes_in_slots_are_forgotten_before_another_state_is_used(self, model, monkeypatch):
        runtime = ChunkRuntime(model)
        cache = SlotPrefixCache(runtime, (2, 3))
        first, second = runtime.allocate(3, 60), runtime.allocate(3, 60)
        cache.insert(PROMPTS[1], first, 1, torch.zeros(VOCAB))
        monkeypatch.setattr(cache, "_forget", raising(MemoryError()))
        with pytest.raises(MemoryError):
            cache.attach(second)
        monkeypatch.undo()
        cache.attach(second)
        assert cache.match_prefix(PROMPTS[1]) is None

    def test_a_state_whose_logits_are_not_finite_is_not_kept(self, model, alone, monkeypatch):
        runtime = ChunkRuntime(model)
        engine, step, calls = engine_of(runtime), runtime.step, itertools.count()
        monkeypatch.setattr(runtime, "step", lambda *given: step(*given) * (np.nan if next(calls) == 0 else 1))
        generate_one(engine, Request(PROMPTS[2], NEW))  # nobody looks at logits in the middle of its prompt
        monkeypatch.undo()
        check_goes_on(engine, alone)

    @pytest.mark.parametrize("brings", ["a processor", "a constraint"])
    def test_a_model_whose_logits_are_not_finite_is_to_blame(self, model, brings, monkeypatch):
        runtime = ChunkRuntime(model)
        options = dict(logits_processors=[lambda tokens, scores: scores.nan_to_num()])
        if brings == "a constraint":
            options = dict(constraint=InPlace())
        engine, step = engine_of(runtime), runtime.step
        monkeypatch.setattr(runtime, "step", lambda *given: step(*given) * np.nan)
        id = engine.add(Request(PROMPTS[0], NEW, **options))
        [output] = run(engine)[id]
        assert output.error == "no token can be chosen: the model's logits are not finite."
        assert not output.is_requests_fault


class InPlace(ForbidsNothing):
    """It writes to its argument."""

    def mask(self, logits):
        kept = logits.clone()
        logits.fill_(7.0)
        return kept


def test_a_constraint_that_writes_to_logits_changes_nobody_elses(runtime, alone):
    engine = engine_of(runtime)
    for _ in range(3):
        id = engine.add(Request(PROMPTS[1], NEW, constraint=InPlace()))
        assert tokens_of(run(engine)[id]) == alone(1)
    check_goes_on(engine, alone)


def test_an_error_of_several_prompts_can_be_sent_to_another_process():
    error = loop.GenerationError({1: "no.", 2: "neither."}, 3)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errors) == (str(error), error.errors)


class TestCachesAndDrafts:
    @pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError(), UserError("no.")], ids=repr)
    @pytest.mark.parametrize("is_late", [False, True], ids=["before its work", "after its work"])
    @pytest.mark.parametrize("method", ["snapshot", "restore", "prepare_snapshot"])
    @pytest.mark.parametrize("begins", [False, True], ids=["", "begun in a step"])
    def test_without_a_snapshot_texts_go_on(self, model, alone, monkeypatch, caplog, method, error, is_late, begins):
        monkeypatch.setattr(ChunkRuntime, "begins_snapshots", begins)
        runtime = ChunkRuntime(model)
        engine = engine_of(runtime)
        works, calls = getattr(runtime, method), itertools.count()

        def failing(*arguments):
            if next(calls) % 2:
                return works(*arguments)
            if is_late:
                works(*arguments)
            raise error

        monkeypatch.setattr(runtime, method, failing)
        for _ in range(3):
            ids = [engine.add(Request(prompt, NEW)) for prompt in PROMPTS]
            outputs = run(engine)
            assert [tokens_of(outputs[id]) for id in ids] == [alone(number) for number in range(3)]
        assert len(caplog.records) == 1 and "The prefix cache failed, and texts go on without it" in caplog.text
        caplog.clear()
        monkeypatch.undo()
        check_goes_on(engine, alone)
        check_size(engine._prefixes.cache)

    @pytest.mark.parametrize("begins", [False, True], ids=["", "begun in a step"])
    def test_memory_that_is_full_is_made_free(self, model, monkeypatch, begins):
        """Where there is room for three snapshots and no more, the oldest gives way to the next."""
        monkeypatch.setattr(ChunkRuntime, "begins_snapshots", begins)
        runtime = ChunkRuntime(model)
        one = runtime.snapshot(runtime.allocate(1, 40), 1, CHUNK).num_bytes
        cache = PrefixCache(runtime, 4 * one, None)
        take = runtime.snapshot

        def in_little_memory(*arguments):
            if cache.stats.snapshots == 3:
                raise torch.OutOfMemoryError
            return take(*arguments)

        monkeypatch.setattr(runtime, "snapshot", in_little_memory)
        cache.max_bytes = 3 * one + one // 2
        engine = Engine(runtime, 1, prefix_cache=cache)
        for token in range(1, 6):
            generate_one(engine, Request([token] * CHUNK, 2))
        assert cache.stats.evictions > 3

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        "drafts",
        [
            raising(RuntimeError("no")),
            returning(None),
            returning([]),
            returning([[]]),
            *(
                lambda requests, each=each: [each for _ in requests]
                for each in (None, 1, [-1], [VOCAB], ["a"], [1] * 99)
            ),
        ],
    )
    def test_without_drafts_texts_go_on(self, runtime, alone, drafts, caplog):
        class Faulty:
            propose = staticmethod(drafts)
            end = staticmethod(raising(RuntimeError("no")))

        engine = engine_of(runtime, drafter=Faulty())
        ids = [engine.add(Request(prompt, NEW)) for prompt in PROMPTS]
        outputs = run(engine)
        assert [tokens_of(outputs[id]) for id in ids] == [alone(number) for number in range(3)]
        assert engine.stats.drafted_tokens == 0 and len(caplog.records) == 1
        check_goes_on(engine, alone)

    def test_a_draft_model_forgets_what_it_was_reading(self, runtime, model, alone, monkeypatch):
        small = ChunkRuntime(model)
        drafter = DraftModel(small, VOCAB, 3, 200, PrefixCache(small, None, None))
        engine = engine_of(runtime, drafter=drafter)
        ids = [engine.add(Request(prompt, NEW)) for prompt in PROMPTS]
        commit, calls = small.commit, itertools.count()

        def failing(*arguments):
            commit(*arguments)
            if next(calls) == 1:
                raise RuntimeError("no")

        monkeypatch.setattr(small, "commit", failing)
        outputs = run(engine)
        assert [tokens_of(outputs[id]) for id in ids] == [alone(number) for number in range(3)]
        assert engine.stats.acceptance_rate == 1, "its state must never be that of other tokens"
        check_goes_on(engine, alone)
        assert engine.stats.acceptance_rate == 1 and drafter._free == [1, 2, 3]

    def test_a_draft_model_reuses_the_slots_of_an_engine_that_is_gone(self, runtime, model, alone):
        drafter = DraftModel(ChunkRuntime(model), VOCAB, 3, 200)
        for _ in range(3):
            engine = engine_of(runtime, drafter=drafter)
            for prompt in PROMPTS:
                engine.add(Request(prompt, NEW))
            for _ in range(7):
                engine.step()
        engine = engine_of(runtime, drafter=drafter)
        check_goes_on(engine, alone)
        assert engine.stats.acceptance_rate == 1 and engine.stats.drafted_tokens > 10


def tokens_in(runtime, cache):
    """Return the tokens of all prompts in one call of `stream_generate`."""
    tokens = [[] for _ in PROMPTS]
    for response in stream_generate(runtime, None, PROMPTS, max_tokens=NEW, ignore_eos=True, prefix_cache=cache):
        tokens[response.index].append(response.token)
    return tokens


PARTS_OF_ENGINE = (Engine, Scheduler, LiveSequences, _Guard, PrefixReuse, Drafting, BestEffort)


def functions_of_engine():
    """Return the engine's functions except `step`: no signal is handled between its last two lines."""
    functions = [each for part in PARTS_OF_ENGINE for each in vars(part).values() if hasattr(each, "__code__")]
    return [getattr(each, "__wrapped__", each) for each in functions if each is not Engine.step]


class Interrupt:
    """Raises KeyboardInterrupt at a line of functions."""

    def __init__(self, lines, *functions):
        self.lines = lines
        self.codes = {function.__code__ for function in functions}

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if frame.f_code not in self.codes:
            return self._trace if frame.f_code.co_filename.endswith(".py") else None
        if event == "line":
            self.lines -= 1
            if self.lines == -1:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


class TestInterrupts:
    @pytest.mark.slow
    @pytest.mark.parametrize("first", [0, *(pytest.param(line, marks=pytest.mark.exhaustive) for line in (7, 14))])
    def test_at_each_line_of_the_engine(self, runtime, alone, first):
        """Sequences that the interrupt does not end get their texts. No token is lost or comes twice."""
        code = [*functions_of_engine(), Slots.take, Slots._allocate]
        ended, interrupted = 0, 0
        for line in range(first, 900, 21):
            engine = engine_of(runtime, drafter=NgramDrafter(1, 2))
            ids = [engine.add(Request(prompt, NEW)) for prompt in PROMPTS]
            outputs = {id: [] for id in ids}
            with Interrupt(line, *code) as _:
                try:
                    while engine.has_work:
                        for output in engine.step():
                            outputs[output.id].append(output)
                except KeyboardInterrupt:
                    interrupted += 1
            for id, rest in run(engine).items():
                outputs[id] += rest
            for number, id in enumerate(ids):
                *before, last = outputs[id]
                ended += last.error is not None
                tokens = tokens_of(before) if last.error is not None else tokens_of(outputs[id])
                assert tokens == alone(number)[: len(tokens)] and (last.error is not None or len(tokens) == NEW)
            check_goes_on(engine, alone)
        assert interrupted > 20 and 0 < ended < 2 * interrupted

    @pytest.mark.slow
    @pytest.mark.parametrize("first", [0, *(pytest.param(line, marks=pytest.mark.exhaustive) for line in (3, 6))])
    @pytest.mark.parametrize("begins", [False, True], ids=["", "begun in a step"])
    def test_at_each_line_of_the_prefix_cache(self, runtime, alone, first, begins, monkeypatch):
        monkeypatch.setattr(ChunkRuntime, "begins_snapshots", begins)
        code = [value for value in vars(PrefixCache).values() if hasattr(value, "__code__")] + [Node.split]
        interrupted = 0
        for line in range(first, 400, 9):
            engine = engine_of(runtime)
            ids = [engine.add(Request(PROMPTS[2][:length] + [7] * 3, 2)) for length in (33, 20, 25)]
            try:
                with Interrupt(line, *code):
                    run(engine)
            except KeyboardInterrupt:
                interrupted += 1
            for id in ids:
                engine.cancel(id)
            check_goes_on(engine, alone)
            check_size(engine._prefixes.cache)
        assert interrupted > 20

    def test_outputs_of_an_interrupted_step_come_from_the_next_one(self, runtime, alone):
        engine = engine_of(runtime)
        id = engine.add(Request(PROMPTS[0], NEW))
        outputs = []
        while len(outputs) < NEW:
            try:
                with Interrupt(1, Engine.step):  # after the step has run
                    engine.step()
            except KeyboardInterrupt:
                pass
            assert engine.has_work
            kept, engine._live.outputs = engine._live.outputs, []
            outputs += kept
        assert [output.id for output in outputs] == [id] * NEW and tokens_of(outputs) == alone(0)

    def test_generate_that_is_interrupted_holds_nothing(self, model, alone):
        runtime = ChunkRuntime(model)
        cache = PrefixCache(runtime, None, CHUNK)
        expected = tokens_in(runtime, cache)
        code = functions_of_engine()
        for line in range(0, 300, 11):
            with pytest.raises(KeyboardInterrupt), Interrupt(line, *code, loop._run):
                tokens_in(runtime, cache)
            assert cache.stats.in_use == 0
        assert tokens_in(runtime, cache) == expected

    def test_an_engine_that_is_dropped_holds_nothing(self, runtime):
        cache = PrefixCache(runtime, None, CHUNK)
        generate_one(Engine(runtime, 1, prefix_cache=cache), Request(PROMPTS[2], NEW))
        engine = Engine(runtime, 1, prefix_cache=cache)
        engine.add(Request(PROMPTS[2], NEW))
        engine.step()
        assert cache.stats.in_use == 1
        del engine
        gc.collect()
        assert cache.stats.in_use == 0


def test_a_cancelled_sequence_gives_nothing_more(runtime, monkeypatch):
    """This holds also if an interrupted step has ended it."""
    engine = engine_of(runtime)
    bad, good = engine.add(Request(PROMPTS[0], NEW)), engine.add(Request(PROMPTS[2], NEW))
    monkeypatch.setattr(runtime, "step", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert engine.cancel(bad) and not engine.cancel(bad)
    outputs = run(engine)
    assert set(outputs) == {good}


def test_memory_that_runs_out_beside_a_step_ends_nobody(runtime, alone, monkeypatch):
    engine = engine_of(runtime)
    ids = [engine.add(Request(prompt, NEW)) for prompt in PROMPTS]
    room = Scheduler._room
    monkeypatch.setattr(Scheduler, "_room", raising(MemoryError()))
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.setattr(Scheduler, "_room", room)
    outputs = run(engine)
    assert [tokens_of(outputs[id]) for id in ids] == [alone(number) for number in range(3)]


def test_texts_of_these_tests_depend_on_all_earlier_tokens(alone):
    assert all(len(set(alone(number))) > 3 for number in range(3))
    assert engine_model().config.vocab_size == VOCAB
