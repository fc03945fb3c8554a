"""The number of prompt tokens that a step may run."""

import pytest

from granite4_neuron.engine.prefill_budget import PrefillBudget

MOST = 512


class Machine:
    """A machine whose steps take a fixed time, and more for each sequence and each prompt token."""

    def __init__(self, max_gap, base=0.02, per_row=0.001, per_token=0.001):
        self.now = 100.0
        self.budget = PrefillBudget(max_gap, lambda: self.now)
        self.times = base, per_row, per_token

    def run(self, rows, prompt_tokens, stall=0.0):
        """Run a step, and return its seconds."""
        base, per_row, per_token = self.times
        seconds = base + per_row * rows + per_token * prompt_tokens + stall
        self.now += seconds
        self.budget.record(prompt_tokens, bool(rows), seconds)
        if rows:
            self.budget.begin()
        return seconds

    def run_both(self, rows, stall=0.0):
        return self.run(rows, self.budget.prompt_tokens(MOST), stall)


def test_steps_take_as_long_as_the_target():
    machine = Machine(0.1)
    machine.run(0, MOST)
    machine.run(1, 0)
    times = [machine.run_both(1) for _ in range(12)]
    assert max(times) <= 0.1 and times[-1] >= 0.097


def test_more_sequences_leave_less_time_for_prompts():
    """No step of decode alone comes in between to show that decode takes longer now."""
    machine = Machine(0.1)
    machine.run(0, MOST)
    machine.run(1, 0)
    times = [machine.run_both(rows) for rows in [*range(1, 31), *[30] * 8]]
    assert max(times) <= 0.105 and times[-1] == pytest.approx(0.1, abs=0.002)


def test_a_slow_step_changes_little():
    machine = Machine(0.1)
    machine.run(0, MOST)
    for _ in range(9):
        machine.run(8, 0)
        machine.run_both(8)
    before = machine.budget.prompt_tokens(MOST)
    machine.run(8, 0, stall=3.0)
    machine.run_both(8, stall=3.0)
    assert machine.budget.prompt_tokens(MOST) == pytest.approx(before, abs=2)


def test_prompts_go_on_if_decode_takes_longer_than_the_target():
    machine = Machine(0.001)
    machine.run(0, MOST)
    machine.run(8, 0)
    assert machine.run_both(8) == pytest.approx(2 * 0.028, rel=0.1)
    assert Machine(0.001).budget.prompt_tokens(MOST) == 16, "before anything is known"


def test_no_more_tokens_than_a_step_has_room_for():
    machine = Machine(10.0)
    machine.run(0, MOST)
    assert machine.budget.prompt_tokens(MOST) == MOST
    assert all(each.budget.prompt_tokens(7) == 7 for each in (machine, Machine(0.1), Machine(None)))


def test_time_between_two_steps_counts():
    machine = Machine(0.1)
    machine.run(0, MOST)
    machine.run(8, 0)
    before = machine.budget.prompt_tokens(MOST)
    machine.now += 0.03
    assert machine.budget.prompt_tokens(MOST) == pytest.approx(before - 30, abs=2)


def test_whole_chunks_between_two_steps_of_decode():
    """As many chunks run as there is time for; only one without a target, or before any time is known."""
    machine = Machine(0.1, per_token=0.0001)
    assert not machine.budget.has_time_for(128)
    machine.run(0, 128)
    machine.run(4, 0)
    chunks = 0
    while machine.budget.has_time_for(128):
        machine.run(0, 128)
        chunks += 1
    assert chunks == 2, "each takes 33 ms, and the step of decode 24"
    machine.run(4, 0)
    assert machine.budget.has_time_for(128)
    assert not Machine(None).budget.has_time_for(128)
