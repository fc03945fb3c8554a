"""Tuning: what is chosen, by a clock that the test moves. Nothing is timed."""

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.ops import cpu
from granite4_neuron.ops.launch_parameters import CHOICES, HEURISTIC
from granite4_neuron.runtime import tuning
from test.support.checkpoints import small_config


class Clock:
    """Stands for the module `time`: it is as late as its runs took."""

    def __init__(self, cost):
        self.now, self.cost, self.runs = 0.0, cost, []

    def perf_counter(self):
        return self.now

    def run(self, value):
        self.runs.append(value)
        self.now += self.cost(value, self.runs.count(value))


@pytest.fixture
def choose(monkeypatch):
    """A function from (value, how often it ran) -> seconds, and a default, to (choice of chunk_size, values as run)."""

    def choose(cost, default=64):
        clock = Clock(cost)
        monkeypatch.setattr(tuning, "time", clock)
        return tuning._choose(1, "chunk_size", default, clock.run, rounds=5), clock.runs

    return choose


def test_the_fastest_is_chosen(choose):
    choice, _ = choose(lambda value, _: {32: 3.0, 64: 2.0, 128: 1.0}[value])
    assert (choice.default, choice.default_seconds, choice.chosen, choice.chosen_seconds) == (64, 2.0, 128, 1.0)


def test_the_default_stays_where_it_is_almost_as_fast(choose):
    def times(seconds):
        return lambda value, _: {32: 3.0, 64: seconds, 128: 1.0}[value]

    assert choose(times(1 + tuning.MARGIN / 2))[0].chosen == 64
    assert choose(times(1 + tuning.MARGIN * 2))[0].chosen == 128


def test_candidates_take_turns(choose):
    _, runs = choose(lambda *_: 1.0)
    assert runs == [32, 64, 128] * 6


def test_the_first_run_does_not_count_and_outliers_count_little(choose):
    """A median of all six runs of 32 would be 1.5, and the mean of its five is far above."""
    choice, _ = choose(lambda value, turn: {32: (9, 1, 1, 1, 9, 9)[turn - 1], 64: 2.0, 128: 2.0}[value])
    assert choice.chosen == 32 and choice.chosen_seconds == 1


def test_what_there_is_nothing_to_tune_of(monkeypatch):
    with pytest.raises(UserError, match="no Mamba layers"):
        next(tuning.tune(small_config(layer_types=("attention",)), torch.float32, [1]))
    monkeypatch.setattr(tuning.cpu, "has_fused_kernels", lambda: False)
    with pytest.raises(UserError, match=r"need a C\+\+ compiler"):
        next(tuning.tune(small_config(), torch.float32, [1]))


@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
@pytest.mark.parametrize("changes", [{}, dict(mamba_n_groups=2), dict(mamba_d_conv=2, mamba_conv_bias=False)])
def test_every_parameter_of_every_batch(changes):
    """More rows than share a step of prefill, too."""
    choices = list(tuning.tune(small_config(**changes), torch.bfloat16, [1, 11], rounds=1))
    assert [(choice.batch_size, choice.name) for choice in choices] == [
        (batch_size, name) for batch_size in (1, 11) for name in ("heads_per_task", "chunk_size", "torch_chunk_size")
    ]
    for choice in choices:
        assert choice.default == getattr(HEURISTIC, choice.name) and choice.chosen in CHOICES[choice.name]
