"""The rows of the next step."""

import pytest

from granite4_neuron.engine import Engine, Request
from granite4_neuron.engine.drafters import NgramDrafter
from test.support.engines import CHUNK


def scheduled(engine):
    engine._scheduler.admit()
    return engine._scheduler.schedule()


def test_an_engine_without_sequences_has_an_empty_step(runtime):
    step = scheduled(Engine(runtime, 1))
    assert not step.rows and not step.sequences and not step.has_drafts


@pytest.mark.parametrize("prompts_first", [False, True])
def test_prompts_and_decode_take_turns(runtime, prompts_first):
    engine = Engine(runtime, 2, prompts_first=prompts_first)
    engine.add(Request([1] * 5, 8))
    engine.step()
    engine.add(Request([2] * 40, 8))
    steps = [scheduled(engine) for _ in range(4)]
    assert [step.is_prefill for step in steps] == [True] * 4 if prompts_first else [False, True, False, True]
    assert all([row.start for row in step.rows] == [0 if step.is_prefill else 5] for step in steps)


def test_short_prompts_share_a_step_within_one_chunk(runtime):
    engine = Engine(runtime, 4)
    ids = [engine.add(Request([1] * length, 8)) for length in (5, 4, 10, 1)]
    step = scheduled(engine)
    assert [sequence.id for sequence in step.sequences] == ids[:2], "the third is too long, and the fourth is behind it"
    assert [len(row.tokens) for row in step.rows] == [5, 4] and not step.all_logits


def test_a_long_prompt_is_cut_at_the_chunk(runtime):
    engine = Engine(runtime, 1)
    engine.add(Request([1] * 40, 8, prompt_logprobs=1))
    step = scheduled(engine)
    assert [len(row.tokens) for row in step.rows] == [CHUNK] and step.all_logits


def test_what_does_not_fit_waits_and_holds_back_those_behind_it(runtime):
    engine = Engine(runtime, 2)
    ids = [engine.add(Request([1], 8)) for _ in range(4)]
    assert [sequence.id for sequence in scheduled(engine).sequences] == ids[:2]
    assert [sequence.id for sequence in engine._live.waiting] == ids[2:]
    assert [sequence.slot for sequence in engine._live.running.values()] == [1, 2]


def test_drafts_follow_the_last_token(runtime):
    engine = Engine(runtime, 1, drafter=NgramDrafter(1, 2), draft_tokens=3)
    engine.add(Request([7, 8, 9] * 4, 30))
    [output] = engine.step()
    [sequence] = engine._live.running.values()
    sequence.tokens[-1] = 7  # as if it had been chosen
    step = scheduled(engine)
    assert output.token is not None and step.has_drafts and not step.is_prefill
    assert [row.tokens for row in step.rows] == [[7, 8, 9, 7]]
