"""The rows of the next step."""

import itertools

import pytest

from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.prompt_cuts import Pieces
from test.support.engines import CHUNK, ChunkRuntime, generate_one, run, tokens_of

needs_packing = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="plain torch does not pack rows")


def scheduled(engine):
    engine._scheduler.admit()
    return engine._scheduler.schedule()


def test_an_engine_without_sequences_has_an_empty_step(runtime):
    step = scheduled(Engine(runtime, 1))
    assert not step.rows and not step.sequences and not step.has_drafts


@pytest.mark.parametrize("prompts_first", [False, True])
def test_prompts_and_decode_take_turns(runtime, prompts_first):
    engine = Engine(runtime, 3, prompts_first=prompts_first)
    engine.add(Request([1] * 5, 8))
    engine.step()
    ids = [engine.add(Request([2] * length, 8)) for length in (40, 30)]
    steps = [scheduled(engine) for _ in range(4)]
    assert [step.prompt_rows for step in steps] == ([1] * 4 if prompts_first else [0, 1, 0, 1])
    first = [step.sequences[0].id for step in steps if step.prompt_rows]
    assert first == ([ids[0]] * 4 if prompts_first else ids[::-1])
    assert all([row.start for row in step.rows] == [0 if step.prompt_rows else 5] for step in steps)


def test_short_prompts_share_a_step_within_one_chunk(runtime):
    engine = Engine(runtime, 4)
    ids = [engine.add(Request([1] * length, 8)) for length in (5, 4, 10, 1)]
    step = scheduled(engine)
    assert [sequence.id for sequence in step.sequences] == ids[:2], "the third is too long, and the fourth is behind it"
    assert [len(row.tokens) for row in step.rows] == [5, 4] and not step.all_logits


@pytest.mark.parametrize("num_logprobs", [(1, None), (None, 1)])
def test_a_prompt_with_log_probabilities_has_a_step_alone(runtime, num_logprobs):
    engine = Engine(runtime, 2)
    for num in num_logprobs:
        engine.add(Request([1] * 4, 8, prompt_logprobs=num))
    steps = [scheduled(engine) for _ in range(2)]
    assert [len(step.rows) for step in steps] == [1, 1] and steps[0].all_logits == (num_logprobs[0] is not None)


def test_a_long_prompt_is_cut_at_the_chunk(runtime):
    engine = Engine(runtime, 1)
    engine.add(Request([1] * 40, 8, prompt_logprobs=1))
    step = scheduled(engine)
    assert [len(row.tokens) for row in step.rows] == [CHUNK] and step.all_logits


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_short_prompt_does_not_wait_behind_a_long_one_and_does_not_starve_it(runtime, is_cached):
    """Short prompts come for ever: each has its token soon, and the long one still has every other step of prompts."""
    cache = PrefixCache(runtime, 2**24, CHUNK) if is_cached else None
    engine = Engine(runtime, 3, prefix_cache=cache)
    long = engine.add(Request([1] * (10 * CHUNK), 2))
    engine.add(Request([2] * 5, 100))  # decodes all the time
    came, waits, steps, first = {}, [], 0, None
    while first is None:
        steps += 1
        if len(came) == len(waits):
            came[engine.add(Request([3, steps % 7, 4], 1))] = steps
        for output in engine.step():
            if output.id in came:
                waits.append(steps - came[output.id])
            elif output.id == long:
                first = steps
        assert steps < 100
    assert max(waits) <= 4 and len(waits) > 5
    assert first <= 2 * 2 * 10 + 2, "half of the steps are decode, and half of the others are its own"


def test_waiting_prompts_are_looked_up_when_the_cache_changes(runtime, monkeypatch):
    cache, looked_up = PrefixCache(runtime, 2**24, None), []
    engine = Engine(runtime, 5, prefix_cache=cache)
    search = cache.cached_length
    monkeypatch.setattr(cache, "cached_length", lambda keys, cuts: looked_up.append(keys[0]) or search(keys, cuts))
    for token in range(1, 5):
        engine.add(Request([token] * (8 * CHUNK + token), 2))
    for _ in range(5):
        engine.step()
    assert sorted(looked_up) == [2, 3, 4], "the first runs"
    short = engine.add(Request([1] * (2 * CHUNK) + [5], 2))
    while not any(output.id == short for output in engine.step()):
        assert looked_up[3:] == [1]
    for _ in range(4):
        engine.step()
    assert sorted(looked_up[4:]) == [2, 3, 4], "for its snapshot"


def test_requests_wait_for_a_slot_in_order(runtime):
    engine = Engine(runtime, 2)
    ids = [engine.add(Request([1], 8)) for _ in range(4)]
    assert [sequence.id for sequence in scheduled(engine).sequences] == ids[:2]
    assert [sequence.id for sequence in engine._live.waiting] == ids[2:]
    assert [sequence.slot for sequence in engine._live.running.values()] == [1, 2]


def test_requests_of_a_lower_priority_wait_behind_others(runtime):
    """A lower number comes first, then the earlier request. Running requests are not interrupted."""
    engine = Engine(runtime, 1)
    running = engine.add(Request([1], 4, priority=7))
    engine.step()
    last, first, second, before = (engine.add(Request([1], 4, priority=number)) for number in (1, 0, 0, -2))
    assert list(engine._live.running) == [running]
    assert list(run(engine)) == [running, before, first, second, last]


def test_drafts_follow_the_last_token(runtime):
    engine = Engine(runtime, 1, drafter=NgramDrafter(1, 2), draft_tokens=3)
    engine.add(Request([7, 8, 9] * 4, 30))
    [output] = engine.step()
    [sequence] = engine._live.running.values()
    sequence.tokens[-1] = 7  # as if it had been chosen
    step = scheduled(engine)
    assert output.token is not None and step.has_drafts and not step.prompt_rows
    assert [row.tokens for row in step.rows] == [[7, 8, 9, 7]]


@pytest.mark.parametrize("order", [1, -1])
def test_no_prompt_waits_for_one_that_leaves_no_snapshots(runtime, monkeypatch, order):
    """With cut points that depend on the length, one whose log-probabilities are asked for leaves none."""
    monkeypatch.setattr(runtime, "prompt_cuts", Pieces((CHUNK,)))
    engine = Engine(runtime, 2, max_length=100, prefix_cache=PrefixCache(runtime, None, CHUNK))
    requests = [Request([3] * 20, 2), Request([4] * 40, 2, prompt_logprobs=0)]
    ids = [engine.add(request) for request in requests[::order]]
    outputs = run(engine)
    assert [len(outputs[id]) for id in ids] == [2, 2]


class SlowRuntime(ChunkRuntime):
    """A runtime that packs rows. A step takes two seconds, and one more for each token."""

    def __init__(self, model):
        super().__init__(model, kernels="fused")
        self.now = 0.0

    def clock(self):
        return self.now

    def step(self, state, rows, all_logits=False):
        self.now += 2 + sum(len(row.tokens) for row in rows)
        return super().step(state, rows, all_logits)


@pytest.fixture
def packing(model):
    return SlowRuntime(model)


def shapes(runtime):
    return [[len(row.tokens) for row in rows] for rows in runtime.steps]


@needs_packing
class TestStepsOfBoth:
    def test_a_prompt_runs_beside_the_tokens_of_others(self, packing):
        engine = Engine(packing, 3, clock=packing.clock)
        for length in (5, 3):
            engine.add(Request([1] * length, 20))
        engine.step()
        engine.add(Request([2] * 20, 20))
        for _ in range(3):
            engine.step()
        assert shapes(packing) == [[5, 3], [1, 1, 16], [1, 1, 4], [1, 1, 1]]
        stats = engine.stats
        assert (stats.prompt_tokens, stats.decode_tokens, stats.decode_rows) == (28, 7, 7)
        assert stats.prompt_seconds + stats.decode_seconds == packing.now

    def test_short_prompts_fill_a_step(self, packing):
        engine = Engine(packing, 4)
        for length in (5, 4, 10, 1):
            engine.add(Request([1] * length, 8))
        engine.step()
        engine.step()
        assert shapes(packing) == [[5, 4, 7], [1, 1, 1, 3]], "in the second step the shortest is first"

    def test_pieces_are_as_long_as_there_is_time(self, packing):
        """The first prompt has whole chunks, since there are no others, and another's time begins behind it."""
        packing.tokens_per_step = 100
        engine = Engine(packing, 2, max_gap=40.0, clock=packing.clock)
        engine.add(Request([1] * 50, 20))
        engine.step()
        engine.add(Request([2] * 39, 1))
        engine.step()
        engine.step()
        assert shapes(packing) == [[50], [1, 38], [1, 1]]
        packing.tokens_per_step = 20
        packing.steps.clear()
        engine = Engine(packing, 2, max_gap=60.0, clock=packing.clock)
        engine.add(Request([1] * 5, 20))
        engine.step()
        engine.step()
        engine.add(Request([2] * 90, 1, prompt_logprobs=0))
        for _ in range(7):
            engine.step()
        assert shapes(packing)[2:] == [[20], [20], [1], [20], [20], [1], [10]], "steps of its own"
        packing.tokens_per_step = 100
        packing.steps.clear()
        engine = Engine(packing, 2, max_gap=40.0, clock=packing.clock)
        engine.add(Request([1] * 50, 20))
        for _ in range(3):
            engine.step()
        engine.add(Request([2] * 90, 20))
        for _ in range(4):
            engine.step()
        assert shapes(packing) == [[50], [1], [1], [1, 35], [1, 36], [1, 19], [1, 1]]

    @pytest.mark.parametrize("max_gap", [None, 30.0])
    def test_pieces_do_not_change_the_places_of_snapshots(self, packing, max_gap):
        packing.tokens_per_step = 32
        cache = PrefixCache(packing, None, 32)
        engine = Engine(packing, 2, prefix_cache=cache, max_gap=max_gap, clock=packing.clock)
        engine.add(Request([1] * 5, 20))
        for _ in range(3):
            engine.step()
        engine.add(Request([2] * 40, 2))
        run(engine)
        pieces = [rows[-1] for rows in shapes(packing)[3:] if rows[-1] > 1]
        assert pieces == ([32, 8] if max_gap is None else [19, 13, 8])
        found = [cache.match_prefix([2] * length) for length in range(1, 41)]
        assert {prefix.length for prefix in found if prefix is not None} == {32, 40}

    def test_log_probabilities_of_a_prompt_have_steps_of_their_own(self, packing):
        engine = Engine(packing, 4)
        engine.add(Request([1] * 5, 20))
        engine.step()
        ids = [engine.add(Request([2] * 4, 2, prompt_logprobs=logprobs)) for logprobs in (None, 1, None)]
        outputs = run(engine)
        assert shapes(packing)[1:5] == [[1, 4], [1, 1], [4], [1, 1, 4]]
        alone = Engine(packing, 1)
        id = alone.add(Request([2] * 4, 2, prompt_logprobs=1))
        assert outputs[ids[1]][0].prompt == run(alone)[id][0].prompt

    def test_a_failing_processor_ends_only_its_own_request(self, packing):
        """The choice of one request's third token and of another's first token fail in the same step."""

        def failing_after(calls):
            left = itertools.count(calls, -1)

            def process(tokens, scores):
                if next(left) == 0:
                    raise ZeroDivisionError
                return scores

            return process

        alone = generate_one(Engine(packing, 1), Request([1] * 5, 9))
        engine = Engine(packing, 3)
        good = engine.add(Request([1] * 5, 9))
        bad = [engine.add(Request([2] * 3, 9, logits_processors=[failing_after(2)]))]
        engine.step()
        bad.append(engine.add(Request([3] * 20, 9, logits_processors=[failing_after(0)])))
        outputs = run(engine)
        assert [1, 1, 4] in shapes(packing)
        assert [[each.error is None for each in outputs[id]] for id in bad] == [[True, False], [False]]
        assert tokens_of(outputs[good]) == alone[1:]

    @pytest.mark.parametrize("is_late", [False, True], ids=["before its work", "after its work"])
    def test_a_step_that_fails_ends_its_sequences(self, packing, monkeypatch, is_late):
        """A waiting sequence does not end."""
        alone = generate_one(Engine(packing, 1), Request([1] * 5, 9))
        engine = Engine(packing, 2)
        engine.add(Request([1] * 5, 9))
        engine.step()
        ended, waiting = engine.add(Request([2] * 20, 9)), engine.add(Request([1] * 5, 9))
        works = packing.step

        def failing(*arguments):
            monkeypatch.undo()
            if is_late:
                works(*arguments)
            raise RuntimeError("no luck")

        monkeypatch.setattr(packing, "step", failing)
        outputs = engine.step()
        assert [each.error for each in outputs] == ["a step failed (RuntimeError: no luck)."] * 2
        assert ended in {each.id for each in outputs}
        assert tokens_of(run(engine)[waiting]) == alone

    def test_drafts_have_steps_of_their_own(self, packing):
        engine = Engine(packing, 2, drafter=NgramDrafter())
        engine.add(Request([1, 2, 3] * 3, 20))
        engine.step()
        engine.add(Request([2] * 20, 2))
        for _ in range(4):
            engine.step()
        assert all(len({row.start > 8 for row in rows}) == 1 or len(rows) == 1 for rows in packing.steps)


@pytest.mark.parametrize("max_gap", [0, -1.0, float("nan"), "1", True])
def test_an_invalid_gap_is_refused(runtime, max_gap):
    with pytest.raises(UserError, match="must be a number of seconds above 0"):
        Engine(runtime, 1, max_gap=max_gap)


class LongRuntime(SlowRuntime):
    """The same runtime with long steps, which does not pack rows."""

    tokens_per_long_step = 4 * CHUNK

    def __init__(self, model):
        ChunkRuntime.__init__(self, model)
        self.now = 0.0


class TestLongSteps:
    """Steps of four chunks."""

    @pytest.fixture
    def long(self, model):
        return LongRuntime(model)

    @pytest.mark.parametrize(
        ("length", "cuts", "rows", "places"),
        [
            (150, [], [64, 64, 16, 6], {64, 128, 144, 150}),
            (128, [], [64, 64], {64, 128}),
            (63, [], [16, 16, 16, 15], {16, 32, 48, 63}),
            (150, [40], [16, 16, 8, 24, 64, 16, 6], {16, 32, 40, 64, 128, 144, 150}),
            (150, [64, 130], [64, 64, 2, 14, 6], {64, 128, 130, 144, 150}),
        ],
    )
    def test_a_prompt_alone_has_them_up_to_their_last_multiple(self, long, length, cuts, rows, places):
        """A cache keeps snapshots at their ends, where the rest is cut as elsewhere, and where they are asked for."""
        tokens = [2 + place % 50 for place in range(length)]
        cache = PrefixCache(long, None, CHUNK)
        engine = Engine(long, 2, prefix_cache=cache)
        text = generate_one(engine, Request(tokens, 3, snapshots_at=cuts))
        assert shapes(long)[: len(rows)] == [[row] for row in rows]
        assert {row.start + len(row.tokens) for [row] in long.steps if row.is_kept} >= places
        found = [cache.match_prefix(tokens[:place]) for place in range(1, length + 1)]
        assert {prefix.length for prefix in found if prefix is not None} == places
        assert text == generate_one(Engine(ChunkRuntime(long.model), 1), Request(tokens, 3))

    @pytest.mark.parametrize("max_gap", [None, 30.0, 80.0, 1000.0])
    def test_others_do_not_wait_for_them(self, long, max_gap):
        """Chunks run in a row while there is time, and then decode."""
        engine = Engine(long, 2, max_gap=max_gap, clock=long.clock)
        stream = engine.add(Request([1] * 5, 100))
        engine.step()
        engine.step()
        long.steps.clear()
        other, ids, times = engine.add(Request([2] * 160, 1)), [], [long.now]
        while other not in ids or ids[-1] != stream:
            for output in engine.step():
                ids.append(output.id)
                times += [long.now] * (output.id == stream)
        assert [row for [row] in shapes(long) if row > 1] == [CHUNK] * 10
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert max_gap is None or max(gaps) <= max_gap

    def test_log_probabilities_of_a_prompt_have_no_long_steps(self, long):
        engine = Engine(long, 1)
        engine.add(Request([1] * 70, 1, prompt_logprobs=0))
        run(engine)
        assert shapes(long) == [[16]] * 4 + [[6]]

    def test_only_one_prompt_is_long(self, long):
        engine = Engine(long, 4, prompts_first=True)
        long.rows_per_step = 4
        for length in (150, 20, 5):
            engine.add(Request([length] * length, 1))
        run(engine)
        assert shapes(long) == [[64], [64], [16], [6], [16], [4, 5]]

    def test_a_prompt_that_waits_for_a_snapshot_gets_it(self, long):
        """Two prompts share their first 40 tokens. The second begins with 32 of them, as without long steps."""
        engine = Engine(long, 2, prefix_cache=PrefixCache(long, None, CHUNK))
        for last in (3, 4):
            engine.add(Request([2] * 40 + [last] * 100, 1))
        run(engine)
        assert engine.stats.cached_tokens == 32
        assert [row.start for [row] in long.steps[:3]] == [0, 16, 32] and [64] in shapes(long)
