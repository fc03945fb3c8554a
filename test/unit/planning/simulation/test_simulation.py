"""A simulation serves as an engine does, step by step. Small cases take the times calculated by hand."""

import logging
import random
from functools import partial

import numpy as np
import pytest
import torch

from granite4_neuron.engine import Engine, PrefixCache, Request, SlotPrefixCache
from granite4_neuron.planning.simulation import replicas
from granite4_neuron.planning.simulation.engine import SimulatedEngine
from granite4_neuron.planning.simulation.replicas import simulate
from granite4_neuron.planning.simulation.runtime import SimulatedRuntime
from granite4_neuron.planning.simulation.traffic import Arrival, Part
from granite4_neuron.runtime.interface import Row
from granite4_neuron.runtime.prompt_cuts import ANYWHERE, Multiples, Pieces
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from test.support.checkpoints import DENSE, small_config

CONFIG = small_config(**{**DENSE, "vocab_size": 4096, "max_position_embeddings": 4096})
CHUNK = 16


class Linear:
    """Step times that depend on all that a step consists of. A plain one: 10 s, and 1 s for each row or token."""

    def __init__(self, context=0.0, copy=0.0):
        self.context, self.of_copy = context, copy

    def step(self, rows):
        return sum(10 / len(rows) + len(row.tokens) + self.context * row.start for row in rows)

    def decode(self, starts, steps):
        return [self.step([Row(1, start + at, [0]) for start in starts]) for at in range(steps)]

    def snapshot(self, tokens):
        return self.of_copy * (1 + tokens)

    restore = copy = snapshot


def runtime_of(steps, *, own_slots=0, **changes):
    sizes = dict(tokens_per_step=CHUNK, rows_per_step=2, prompt_cuts=ANYWHERE, max_length=4096)
    return SimulatedRuntime(CONFIG, steps, dtype=torch.float32, own_slots=own_slots, **{**sizes, **changes})


def new_engine(
    steps,
    num_sequences=4,
    cache_bytes=0,
    *,
    spare_slots=0,
    max_length=200,
    max_gap=None,
    kind=SimulatedEngine,
    **changes,
):
    runtime = runtime_of(steps, own_slots=num_sequences + spare_slots if spare_slots else 0, **changes)
    cache = None
    if spare_slots:
        cache = SlotPrefixCache(runtime, range(num_sequences + 1, num_sequences + spare_slots + 1))
    elif cache_bytes:
        cache = PrefixCache(runtime, cache_bytes, CHUNK, at_branches=True)
    clock = {} if kind is SimulatedEngine else dict(clock=lambda: runtime.clock)
    return kind(runtime, num_sequences, max_length=max_length, prefix_cache=cache, max_gap=max_gap, **clock)


def step_by_step(arrivals, engine):
    """Serve traffic with the engine itself; return times to first tokens, gaps, cached tokens, and the end time."""
    runtime, left, asked, last = engine.runtime, list(arrivals), {}, {}
    first_tokens, gaps = [], []
    while left or engine.has_work:
        if not engine.has_work:
            runtime.clock = max(runtime.clock, left[0].time)
        while left and left[0].time <= runtime.clock:
            arrival = left.pop(0)
            request = Request(arrival.tokens(), max_tokens=arrival.answer, temperature=0, stop_token_ids=[])
            asked[engine.add(request)] = arrival.time
        for output in engine.step():
            assert output.error is None and output.token == 0
            if output.id in last:
                gaps.append(runtime.clock - last[output.id])
            else:
                first_tokens.append(runtime.clock - asked[output.id])
            last[output.id] = runtime.clock
    return first_tokens, gaps, engine.stats.cached_tokens, runtime.clock


def drawn_traffic(seed, number=60):
    """Conversations, shared prefixes and single questions, close together and far apart."""
    chance = random.Random(seed)
    arrivals, time, first = [], 0.0, 100
    conversations: dict[int, tuple[Part, ...]] = {}
    for _ in range(number):
        time += chance.choice([0, 1, 30, 400]) * chance.random()
        conversation, prefix = chance.randrange(8), Part(1 + chance.randrange(3), chance.choice([5, 16, 40]))
        before = conversations.get(conversation, (prefix,))
        if sum(part.length for part in before) > 120:
            before = (prefix,)
        parts = (*before, Part(first, chance.randint(1, 40)))
        answer, first = chance.randint(1, 30), first + 1
        conversations[conversation] = (*parts, Part(0, answer))
        arrivals.append(Arrival(time, sum(part.length for part in parts), answer, conversation, parts))
    return arrivals


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(cache_bytes=2**40),
        dict(cache_bytes=12 * (sequence_bytes(CONFIG, 4) + 4 * CONFIG.vocab_size) + 300 * token_bytes(CONFIG, 4)),
        dict(spare_slots=3),
        dict(cache_bytes=2**40, prompt_cuts=Pieces((8, CHUNK)), rows_per_step=1),
        dict(cache_bytes=2**40, prompt_cuts=Multiples(4), rows_per_step=1),
        dict(cache_bytes=2**40, max_length=100),
        dict(cache_bytes=2**40, packs_rows=True),
        dict(cache_bytes=2**40, packs_rows=True, max_gap=25.0),
        dict(cache_bytes=2**40, max_gap=60.0),
    ],
    ids=["plain", "cache", "full-cache", "slots", "pieces", "multiples", "cut-off", "packed", "packed-pace", "pace"],
)
def test_it_serves_as_the_engine_does(changes, caplog):
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            longest = changes.get("max_length", 200)
            arrivals = [each for each in drawn_traffic(seed) if each.prompt < longest]
            steps = Linear(context=0.01, copy=0.02)
            first_tokens, gaps, cached, end = step_by_step(arrivals, new_engine(steps, kind=Engine, **changes))
            [result] = simulate(arrivals, partial(new_engine, steps, **changes), [(1, False)])
            assert result.cached_tokens == cached and (cached > 0) == bool(changes)
            assert arrivals[0].time + result.seconds == pytest.approx(end, rel=1e-12)
            for found, histogram in ((first_tokens, result.first_tokens), (gaps, result.gaps)):
                assert histogram.count == len(found)
                for percent in (0.001, 25, 50, 90, 95, 100):
                    right = np.percentile(found, percent, method="inverted_cdf")
                    assert histogram.percentile(percent) == pytest.approx(right, rel=0.006)
    assert not caplog.records  # the engine goes on without its prefix cache if that fails


def alone(time, first, prompt, answer, conversation=None):
    return Arrival(time, prompt, answer, conversation, (Part(first, prompt),))


def test_hand_computed():
    # The first prompt of 20 tokens is a step of 16 (26 s) and one of 4 (14 s), which gives its first token at 40. It
    # decodes alone until the other arrives at 45: 40 + 11 = 51. The other's prompt of 6 takes 16 s, to 67; then both
    # decode for 12 s, to 79, where the second ends. The first has two more tokens, at 90 and 101.
    arrivals = [alone(0, 10, 20, 5), alone(45, 11, 6, 2)]
    [result] = simulate(arrivals, partial(new_engine, Linear()), [(1, False)])
    assert (result.requests, result.new_tokens, result.seconds) == (2, 7, 101)
    assert [result.first_tokens.percentile(percent) for percent in (50, 95)] == [67 - 45, 40]
    # Of the first: 11, 28 (the other's prompt lies between), 11, 11; of the second: 12.
    assert [result.gaps.percentile(percent) for percent in (20, 60, 80, 100)] == [11, 11, 12, 28]
    assert result.tokens_per_second == pytest.approx(7 / 101)
    assert result.million_tokens(3.6) == pytest.approx(3.6 * 101 / 3600 / 7 * 1e6)
    assert result.hit_rate == result.waiting == result.most_waiting == 0


def test_the_queue_and_refused_requests():
    # One sequence at a time: each takes a prompt of 5 (15 s) and one more token (11 s). The second waits for 26 s.
    arrivals = [alone(0, 10, 5, 2), alone(0, 11, 5, 2), alone(1, 12, 200, 2)]
    [result] = simulate(arrivals, partial(new_engine, Linear(), 1), [(1, False)])
    assert (result.requests, result.refused, result.seconds, result.prompt_tokens) == (2, 1, 52, 10)
    assert result.first_tokens.percentile(100) == 41
    assert result.waiting == pytest.approx(26 / 52) and result.most_waiting == 1


def test_requests_wait_while_all_slots_decode():
    # The first has a prompt of 5 (15 s) and three more tokens (11 s each). Two come in its first step of decode, which
    # ends at 26, and wait for one and for two others, each of which then takes 26 s.
    arrivals = [alone(0, 10, 5, 4), alone(20, 11, 5, 2), alone(21, 12, 5, 2)]
    [result] = simulate(arrivals, partial(new_engine, Linear(), 1), [(1, False)])
    assert result.seconds == 48 + 26 + 26 and result.most_waiting == 2
    assert result.waiting * result.seconds == pytest.approx((48 - 26) + (74 - 26))


def test_conversations_stay_on_their_replica():
    # Four turns, far apart: each prompt is the one before, its answer, and 10 more. A state after a prompt of n tokens
    # and an answer of 4 has seen n + 3 of them.
    parts, arrivals = (), []
    for turn in range(4):
        parts = (*parts, Part(10 + turn, 10))
        arrivals.append(Arrival(1000.0 * turn, sum(part.length for part in parts), 4, 7, parts))
        parts = (*parts, Part(0, 4))
    prompts = [10, 24, 38, 52]
    spread, kept = simulate(arrivals, partial(new_engine, Linear(), 4, 2**40), [(2, False), (2, True)])
    assert spread.prompt_tokens == kept.prompt_tokens == sum(prompts)
    assert kept.cached_tokens == 13 + 27 + 41
    # With prompts spread in turns, the third one finds the first, and the fourth finds the second.
    assert spread.cached_tokens == 13 + 27
    assert kept.hit_rate == 81 / 124


def test_the_time_of_snapshots_counts():
    [without] = simulate([alone(0, 10, 5, 3)], partial(new_engine, Linear(), 4, 2**40), [(1, False)])
    [with_copies] = simulate([alone(0, 10, 5, 3)], partial(new_engine, Linear(copy=1.0), 4, 2**40), [(1, False)])
    assert without.seconds == 15 + 11 + 11
    # A copy after the prompt has 5 tokens, and one at the end has the two that follow.
    assert with_copies.seconds == without.seconds + (1 + 5) + (1 + 2)
    assert [with_copies.gaps.percentile(percent) for percent in (50, 100)] == [11 + 1 + 2, 11 + 1 + 5]


@pytest.mark.exhaustive
def test_several_processes_give_the_same_results(monkeypatch):
    monkeypatch.setattr(replicas, "_WORTH_PROCESSES", 1)
    arrivals, fleets = drawn_traffic(5, 30), [(2, False), (2, True)]
    one, two = (simulate(arrivals, partial(new_engine, Linear(), 4, 2**40), fleets, each) for each in (1, 2))
    for here, there in zip(one, two, strict=True):
        for name in ("seconds", "new_tokens", "cached_tokens", "waiting"):
            assert getattr(here, name) == getattr(there, name)
        assert here.gaps.percentile(50) == there.gaps.percentile(50)
