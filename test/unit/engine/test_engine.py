"""Continuous batching: a sequence's output does not depend on the others, and nobody waits for long."""

import functools
import itertools
import math
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from granite4_neuron import UserError
from granite4_neuron.engine import Engine, Request
from granite4_neuron.state.hybrid_state import MambaState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from test.support.engines import CHUNK, ChunkRuntime, free_slots, generate_one, poison_engine, run, tokens_of
from test.support.stepping import random_tokens

pytestmark = pytest.mark.versions

LENGTHS = (1, 2, 3, 15, 16, 17, 40, 70)


def request_of(number, max_tokens=8, sampled=False):
    """Return one of several requests, each with a prompt and a seed of its own."""
    tokens = random_tokens(160, LENGTHS[number % len(LENGTHS)], seed=number).tolist()
    return Request(tokens, max_tokens, temperature=0.8 if sampled else None, seed=number)


@pytest.fixture(scope="module")
def alone(model):
    """Return the tokens of a request that has an engine to itself."""

    @functools.cache
    def tokens(number, max_tokens, sampled):
        return generate_one(Engine(ChunkRuntime(model), 1), request_of(number, max_tokens, sampled))

    return tokens


arrivals = st.lists(
    st.tuples(
        st.integers(0, 30),  # the step before which it comes
        st.integers(0, 11),  # which request
        st.sampled_from([1, 2, 7, 12]),  # its new tokens
        st.booleans(),  # sampled
        st.none() | st.integers(0, 25),  # the step before which it is cancelled
    ),
    min_size=1,
    max_size=9,
)


@given(arrivals=arrivals, num_sequences=st.integers(1, 4), prompts_first=st.booleans())
def test_every_sequence_is_what_it_is_alone(model, alone, arrivals, num_sequences, prompts_first):
    engine = Engine(ChunkRuntime(model), num_sequences, prompts_first=prompts_first)
    expected, outputs, cancelled = {}, {}, set()
    for step in itertools.count():
        for start, number, max_tokens, sampled, stop in arrivals:
            if start == step:
                id = engine.add(request_of(number, max_tokens, sampled))
                expected[id] = alone(number, max_tokens, sampled), None if stop is None else step + stop
        for id, (_, stop) in expected.items():
            if stop == step and engine.cancel(id):
                cancelled.add(id)
        if not engine.has_work and step > 30:
            break
        poison_engine(engine)
        for output in engine.step():
            assert output.id not in cancelled
            outputs.setdefault(output.id, []).append(output)
    for id, (tokens, _) in expected.items():
        if id in cancelled:
            assert tokens_of(outputs.get(id, [])) == tokens[: len(outputs.get(id, []))]
        else:
            assert tokens_of(outputs[id]) == tokens and outputs[id][-1].finish_reason == "length"
    assert free_slots(engine) == list(range(1, num_sequences + 1))


def test_texts_depend_on_all_that_went_before(alone):
    """The test above relies on this: a model that repeats one token would hide the state it continues from."""
    texts = [alone(number, 12, False) for number in range(8)]
    assert all(len(set(tokens)) > 3 for tokens in texts) and len(set(map(tuple, texts))) == len(texts)


def test_a_slot_that_keeps_its_state_would_be_seen(model, alone):
    """The test above relies on this: the poison does reach a sequence that is not told to start anew."""
    engine = Engine(ChunkRuntime(model), 1)
    id = engine.add(request_of(3))
    poison_engine(engine)
    engine._scheduler.admit()
    engine._live.running[id].stored = 1
    assert run(engine)[id][-1].finish_reason == "error"


class TestSchedule:
    def test_prompts_are_cut_at_multiples_of_the_chunk(self, runtime):
        engine = Engine(runtime, 3)
        for number in range(8):
            engine.add(request_of(number))
        lengths = {}
        run(engine)
        for rows in runtime.steps:
            for row in rows:
                start, stop = row.start, row.start + len(row.tokens)
                assert start % CHUNK + len(row.tokens) <= CHUNK
                if start == 0:
                    lengths[row.slot] = 0
                assert lengths[row.slot] == start, "a sequence must go on where it stopped"
                lengths[row.slot] = stop

    def test_a_long_prompt_holds_up_no_sequence_for_longer_than_a_chunk(self, runtime):
        engine = Engine(runtime, 9)
        for number in range(8):
            engine.add(Request([number + 1], max_tokens=60))
        while len(runtime.steps) < 12:
            engine.step()
        engine.add(Request(random_tokens(160, 10 * CHUNK).tolist(), max_tokens=2))
        del runtime.steps[:]
        run(engine)
        kinds = ["prompt" if len(rows) == 1 and len(rows[0].tokens) > 1 else "decode" for rows in runtime.steps]
        assert kinds[:20] == ["prompt", "decode"] * 10
        decoded = [rows for rows, kind in zip(runtime.steps, kinds, strict=True) if kind == "decode"]
        assert all(len(rows) >= 8 for rows in decoded[:9])

    def test_prompts_and_single_tokens_do_not_share_a_padded_step(self, runtime):
        engine = Engine(runtime, 8)
        for number in range(24):
            engine.add(request_of(number, max_tokens=5))
            engine.step()
        run(engine)
        for rows in runtime.steps:
            longest = max(len(row.tokens) for row in rows)
            assert len(rows) == 1 or longest == 1 or len(rows) * longest <= CHUNK

    def test_short_prompts_share_a_step(self, runtime):
        engine = Engine(runtime, 8)
        for _ in range(8):
            engine.add(Request([3, 4, 5], max_tokens=1))
        run(engine)
        assert [len(rows) for rows in runtime.steps] == [5, 3]

    def test_a_step_is_filled_and_has_no_more_rows_than_the_runtime_takes(self, runtime, monkeypatch):
        for most, length, rows in ((8, 4, [4, 4]), (8, 2, [8]), (3, 2, [3, 3, 2]), (1, 2, [1] * 8)):
            monkeypatch.setattr(ChunkRuntime, "rows_per_step", most)
            engine = Engine(runtime, 8)
            for _ in range(8):
                engine.add(Request([3] * length, max_tokens=1))
            runtime.steps.clear()
            run(engine)
            assert [len(step) for step in runtime.steps] == rows

    def test_prompts_first(self, runtime):
        engine = Engine(runtime, 3, prompts_first=True)
        for number in (6, 7, 4):
            engine.add(request_of(number))
        run(engine)
        longest = [max(len(row.tokens) for row in rows) for rows in runtime.steps]
        assert 1 not in longest[:-7] and longest[-7:] == [1] * 7

    def test_one_waits_for_a_slot_and_comes_in_order(self, runtime):
        engine = Engine(runtime, 2)
        ids = [engine.add(request_of(number, max_tokens=3)) for number in range(6)]
        outputs = [output for _ in range(200) for output in engine.step()]
        firsts = list(dict.fromkeys(output.id for output in outputs))
        assert firsts == ids and not engine.has_work
        assert engine.stats.generated_tokens == 18 and engine.stats.decode_tokens == 12
        assert engine.stats.prompt_tokens == sum(LENGTHS[:6])

    def test_nothing_to_do(self, runtime):
        engine = Engine(runtime, 2)
        assert engine.step() == [] and not engine.has_work and runtime.steps == []


class TestMemory:
    def size(self, runtime, *lengths):
        return sum(
            sequence_bytes(runtime.config, runtime.dtype.itemsize)
            + n * token_bytes(runtime.config, runtime.dtype.itemsize)
            for n in lengths
        )

    def test_requests_that_do_not_fit_wait_in_order(self, runtime, alone):
        """The second request is too large beside the first. The third would fit but does not overtake it."""
        engine = Engine(runtime, 3, memory_bytes=self.size(runtime, 48, 48))
        ids = [engine.add(request_of(number, max_tokens=8)) for number in (6, 7, 4)]  # 48, 78 and 24 tokens
        outputs, running = {}, set()
        while engine.has_work:
            for output in engine.step():
                outputs.setdefault(output.id, []).append(output)
            running.add(frozenset(engine._live.running))
        assert running == {frozenset(), frozenset(ids[:1]), frozenset(ids[1:2]), frozenset(ids[2:])}
        assert [tokens_of(outputs[id]) for id in ids] == [alone(number, 8, False) for number in (6, 7, 4)]

    def test_a_request_takes_the_slot_with_the_least_new_memory(self, runtime):
        engine = Engine(runtime, 4, memory_bytes=self.size(runtime, 78, 48))
        for number in (7, 6, 7, 6, 7):
            engine.add(request_of(number, max_tokens=8))
            run(engine)
        assert sorted(engine._slots._lengths.values()) == [0, 0, 0, 78]

    def test_memory_of_empty_slots_is_freed_when_it_is_needed(self, runtime):
        engine = Engine(runtime, 2, memory_bytes=self.size(runtime, 78))
        for number in (0, 1):
            engine.add(request_of(number, max_tokens=8))
        run(engine)
        first = engine._slots.state
        id = engine.add(request_of(7, max_tokens=8))
        assert len(run(engine)[id]) == 8 and engine._slots.state is not first

    def test_a_request_that_never_fits_is_refused_at_once(self, runtime):
        budget = self.size(runtime, 50)
        engine = Engine(runtime, 3, memory_bytes=budget)
        engine.add(Request([1] * 40, max_tokens=10))
        needed = self.size(runtime, 51)
        with pytest.raises(UserError, match=rf"51 tokens, prompt and new ones, needs {needed:,} .* are {budget:,}"):
            engine.add(Request([1] * 40, max_tokens=11))
        with pytest.raises(UserError, match="the prompt has 200 tokens; sequences here have at most 200"):
            engine.add(Request([1] * 200))
        with pytest.raises(UserError, match="num_sequences is 0"):
            Engine(runtime, 0)


class TestEnds:
    def test_logits_that_are_not_finite_end_their_sequence_only(self, runtime, alone):
        engine = Engine(runtime, 3)
        ids = [engine.add(request_of(number, max_tokens=12)) for number in (0, 1, 2)]
        outputs = {id: [] for id in ids}
        while engine.has_work:
            for output in engine.step():
                outputs[output.id].append(output)
            if len(outputs[ids[1]]) == 4 and ids[1] in engine._live.running:
                for layer in engine._slots.state.layers:
                    if isinstance(layer, MambaState):
                        layer.ssm_state[engine._live.running[ids[1]].slot] = math.nan
        *before, last = outputs[ids[1]]
        assert tokens_of(before) == alone(1, 12, False)[:4]
        assert last.finish_reason == "error" and last.token is None and not last.is_requests_fault
        assert last.error == "no token can be chosen: the model's logits are not finite."
        for number in (0, 2):
            assert tokens_of(outputs[ids[number]]) == alone(number, 12, False)
        again = engine.add(request_of(1, max_tokens=12))
        assert tokens_of(run(engine)[again]) == alone(1, 12, False), "the slot must work as before"

    def test_cancel(self, runtime):
        engine = Engine(runtime, 1)
        running, waiting, last = (engine.add(request_of(number)) for number in (6, 1, 2))
        engine.step()
        assert engine.cancel(running) and engine.cancel(waiting)
        assert not engine.cancel(running) and not engine.cancel(99)
        assert set(run(engine)) == {last}

    def test_stop_tokens_and_limits_are_each_requests_own(self, runtime, alone):
        engine = Engine(runtime, 2)
        free = alone(5, 12, False)
        stopped = engine.add(Request(request_of(5).tokens, 12, stop_token_ids=frozenset(free[4:5])))
        limited = engine.add(request_of(5, max_tokens=3))
        outputs = run(engine)
        end = free.index(free[4]) + 1
        assert tokens_of(outputs[stopped]) == free[:end] and outputs[stopped][-1].finish_reason == "stop"
        assert tokens_of(outputs[limited]) == free[:3] and outputs[limited][-1].finish_reason == "length"

    def test_the_engines_length_ends_a_sequence(self, runtime):
        engine = Engine(runtime, 1, max_length=20)
        id = engine.add(Request([5] * 17, max_tokens=50))
        assert len(run(engine)[id]) == 3

    @pytest.mark.parametrize(
        "fields, message",
        [
            (dict(tokens=[]), "the prompt is empty"),
            (dict(tokens=[160]), "outside the vocabulary"),
            (dict(max_tokens=0), "max_tokens is 0"),
            (dict(max_tokens=2.5), "max_tokens is 2.5, and must be a whole number"),
            (dict(stop=[""]), "stop is .*, and must be a string or a list of strings, none of them empty"),
            (dict(stop=["x"]), "need an engine with a tokenizer"),
            (dict(seed=-1), "seed is -1"),
            (dict(top_p=2.0), "top_p"),
        ],
        ids=str,
    )
    def test_bad_requests_are_refused(self, runtime, fields, message):
        engine = Engine(runtime, 1)
        with pytest.raises(UserError, match=message):
            engine.add(Request(**{"tokens": [1], **fields}))
        assert not engine.has_work


class TestArguments:
    def test_tokens_of_any_kind(self, runtime, alone):
        tokens, expected = request_of(5).tokens, alone(5, 8, False)
        for tokens_ in (list(tokens), torch.tensor(tokens), np.array(tokens), np.array(tokens, np.uint16)):
            assert generate_one(Engine(runtime, 1), Request(tokens_, 8)) == expected

    def test_none_means_the_default(self, runtime, alone):
        options = dict(stop=None, stop_token_ids=None, snapshots_at=None, logit_bias=None, frequency_penalty=None)
        request = Request(request_of(5).tokens, 8, **options)
        assert generate_one(Engine(runtime, 1), request) == alone(5, 8, False)
        with_bias = Request(request_of(5).tokens, 8, logit_bias={3: None}, presence_penalty=2.0, frequency_penalty=None)
        same = Request(request_of(5).tokens, 8, presence_penalty=2.0)
        assert generate_one(Engine(runtime, 1), with_bias) == generate_one(Engine(runtime, 1), same)

    def test_the_engine_copies_the_callers_list(self, runtime, alone):
        tokens = list(request_of(5).tokens)
        engine = Engine(runtime, 1)
        engine.add(Request(tokens, 8))
        new = []
        while engine.has_work:
            for output in engine.step():
                new.append(output.token)
                tokens.append(output.token)
        assert new == alone(5, 8, False) and engine.stats.prompt_tokens == len(tokens) - 8


class SlowRuntime(ChunkRuntime):
    """A runtime that lets other threads run within a step and counts the most steps at a time."""

    num_within = most_within = 0

    def step(self, state, rows, all_logits=False):
        self.num_within += 1
        self.most_within = max(self.most_within, self.num_within)
        time.sleep(0.001)
        logits = super().step(state, rows, all_logits)
        self.num_within -= 1
        return logits


def test_steps_of_several_threads_take_turns(model, alone):
    runtime = SlowRuntime(model)
    engine = Engine(runtime, 3)
    outputs, errors, cancelled = [], [], engine.add(request_of(11, max_tokens=100))

    def work(numbers):
        try:
            for number in numbers:
                ids[engine.add(request_of(number))] = number
            while engine.has_work:
                outputs.extend(engine.step())
                engine.cancel(cancelled)
        except Exception as error:
            errors.append(error)

    ids = {}
    threads = [threading.Thread(target=work, args=(range(start, 8, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and runtime.most_within == 1
    for id, number in ids.items():
        # Threads may append their outputs in another order than that of their steps.
        assert sorted(tokens_of(each for each in outputs if each.id == id)) == sorted(alone(number, 8, False))


def test_limits_from_the_prompt_and_the_vocabulary():
    """Each limit allows its last value."""
    Request([1, 2, 3], snapshots_at=[1, 3], logprobs=10, prompt_logprobs=10, logit_bias={9: 1}).check(10)
    for options, message in (
        (dict(snapshots_at=[4]), r"snapshots are asked for at \[4\] tokens; the prompt has 3"),
        (dict(snapshots_at=[0]), r"snapshots are asked for at \[0\] tokens; the prompt has 3"),
        (dict(logprobs=11), "logprobs is 11, and must be from 0 to 10"),
        (dict(prompt_logprobs=11), "prompt_logprobs is 11, and must be from 0 to 10"),
        (dict(logit_bias={10: 1}), "logit_bias has a token id outside the vocabulary, which is 0 to 9"),
    ):
        with pytest.raises(UserError, match=message):
            Request([1, 2, 3], **options).check(10)


def test_text_and_stop_strings(texting):
    runtime, tokenizer = texting
    engine = Engine(runtime, 2, tokenizer=tokenizer)
    tokens = tokenizer.encode("The quick brown fox")
    free = engine.add(Request(tokens, 20))
    text = "".join(output.text for output in run(engine)[free])
    stop = text[3:5]
    stopped, other = engine.add(Request(tokens, 20, stop=[stop])), engine.add(Request(tokens, 20))
    by_one_text = engine.add(Request(tokens, 20, stop=stop))
    outputs = run(engine)
    for id in (stopped, by_one_text):
        assert "".join(output.text for output in outputs[id]) == text[: text.index(stop)]
        assert outputs[id][-1].finish_reason == "stop"
    assert "".join(output.text for output in outputs[other]) == text


def test_the_recurrent_state_of_a_free_slot_may_be_nan(runtime):
    """The recurrent state's own tensors are poisoned, and the null slot stays zeros."""
    engine = Engine(runtime, 2)
    for number in range(4):
        engine.add(request_of(number))
    run(engine, lambda: poison_engine(engine))
    for layer in engine._slots.state.layers:
        if isinstance(layer, MambaState):
            assert torch.count_nonzero(layer.ssm_state[0]) == 0
