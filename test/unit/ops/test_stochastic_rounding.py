"""Stochastic rounding: its random numbers, its mean, and its effect on states that forget slowly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from granite4_neuron.ops import Rounding, selective_state_step, stochastic_round
from granite4_neuron.ops.stochastic_rounding import philox_4x32

DTYPES = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344


# Known answers by Salmon, Moraes, Dror and Shaw, from kat_vectors of Random123.
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "expected"),
    [
        (7, [0] * 4, 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, [0xFFFFFFFF] * 4, 2**64 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, PI, 0x299F31D0A4093822, "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, [0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, [0xFFFFFFFF] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, PI, 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(rounds, counter, key, expected):
    words = philox_4x32(torch.tensor([list(counter)]), key, rounds)[0]
    assert " ".join(f"{word:08x}" for word in words.tolist()) == expected


def round_many(value, dtype, times, seed=0):
    """Round one value `times` times, each time at another position."""
    values = torch.full((times, 1, 1), value)
    return stochastic_round(values, dtype, torch.arange(times), Rounding(seed))[:, 0, 0].double()


def neighbours(value, dtype):
    """Return the closest numbers of `dtype` below and above."""
    nearest = torch.tensor(value).to(dtype)
    infinity = torch.tensor(math.inf, dtype=dtype)
    if nearest.double() > value:
        return torch.nextafter(nearest, -infinity).item(), nearest.item()
    return nearest.item(), torch.nextafter(nearest, infinity).item()


@every_dtype
@pytest.mark.parametrize("value", [1.0003, -1.0003, 0.7531, 3e-5, -4.4e-6, 2e-8, 1999.99, -12345.6, 0.99999, 65503.0])
def test_the_mean_of_many_roundings_is_the_value(dtype, value):
    """The mean of 4,096 is within 4 standard errors, for values of all sizes, powers of two and subnormals."""
    value = torch.tensor(value).item()
    low, high = neighbours(value, dtype)
    rounded = round_many(value, dtype, 4096)
    assert set(rounded.tolist()) <= {low, high}
    up = (value - low) / (high - low)
    standard_error = (high - low) * math.sqrt(max(up * (1 - up), 1e-4) / 4096)
    assert abs(rounded.mean().item() - value) <= 4 * standard_error


@every_dtype
def test_numbers_of_the_dtype_do_not_change(dtype):
    values = torch.randn(3, 5, 130).to(dtype).float()
    values[0, 0, :3] = torch.tensor([0.0, -0.0, torch.finfo(dtype).smallest_normal])
    rounded = stochastic_round(values, dtype, torch.arange(3), Rounding())
    assert rounded.dtype == dtype and torch.equal(rounded.float(), values)
    assert torch.equal(rounded.signbit(), values.signbit())


def test_numbers_beyond_float16():
    values = torch.tensor([[[65519.0, -1e30, math.inf, -math.inf, math.nan]]])
    rounded = stochastic_round(values, torch.float16, torch.tensor([7]), Rounding())[0, 0].tolist()
    assert rounded[:4] == [65504.0, -65504.0, math.inf, -math.inf] and math.isnan(rounded[4])


class TestRandomNumbers:
    """Random numbers depend on seed, stream, position and element, and on nothing else."""

    @staticmethod
    def ups(positions, rounding=Rounding(), shape=(3, 200)):  # noqa: B008
        values = torch.full((len(positions), *shape), 1 + 2.0**-11)
        return stochastic_round(values, torch.float16, torch.tensor(positions), rounding) > 1

    def test_they_do_not_depend_on_the_row(self):
        together = self.ups([5, 9, 5, 2])
        for row, position in enumerate([5, 9, 5, 2]):
            assert torch.equal(together[row], self.ups([position])[0])

    def test_they_do_not_depend_on_other_random_numbers(self):
        torch.manual_seed(1)
        first = self.ups([1])
        torch.rand(100)
        assert torch.equal(first, self.ups([1]))

    @pytest.mark.parametrize("other", [Rounding(1), Rounding(2**40), Rounding(0, 1), Rounding(0, 0, 10)])
    def test_they_depend_on_seed_stream_and_rounds(self, other):
        assert_independent(self.ups([4]), self.ups([4], other))

    def test_they_depend_on_the_position(self):
        assert_independent(self.ups([4]), self.ups([5]))

    def test_they_depend_on_the_element(self):
        ups = self.ups([4], shape=(64, 256))[0]
        for shift in (1, 16, 128):
            assert_independent(ups[:, shift:], ups[:, :-shift])
        assert_independent(ups[4:], ups[:-4])

    def test_rows_with_common_numbers_are_spread(self):
        """A value in the middle of its neighbours is rounded up in two of four rows of a head."""
        assert (self.ups([4], shape=(2, 8, 64))[0].unflatten(1, (2, 4)).sum(2) == 2).all()


def assert_independent(first, second):
    """Two tosses of a fair coin agree in half of the cases; the tolerance is 5 standard errors."""
    first, second = first.flatten(), second.flatten()
    assert abs((first == second).double().mean().item() - 0.5) < 2.5 / len(first) ** 0.5


@given(st.floats(-1e4, 1e4, width=32), st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_one_of_two_neighbours(value, dtype, position):
    rounded = stochastic_round(torch.tensor([[[value]]]), dtype, torch.tensor([position]), Rounding()).item()
    low, high = neighbours(value, dtype)
    assert rounded in (low, high)


@pytest.mark.exhaustive
def test_states_of_slow_heads_do_not_drift(capsys):
    """20,000 tokens run through heads that forget at most a thousandth of their state per token.

    Most tokens add less than half the spacing of the dtype's numbers, which rounding to nearest loses. The reference is
    float32.
    """
    generator = torch.Generator().manual_seed(0)
    heads, head_dim, d_state, tokens = 2, 4, 16, 20_000
    A, dt = -torch.ones(heads), torch.tensor([[2e-4, 1e-3]]).expand(5, -1)
    state = torch.zeros(5, heads, head_dim, d_state)  # float32; for each dtype nearest, then stochastic
    inputs = F.silu(torch.randn(tokens, heads * head_dim + d_state, generator=generator))
    for t in range(tokens):
        x, B = inputs[t].expand(5, -1).split([heads * head_dim, d_state], -1)
        selective_state_step(state, x.unflatten(1, (heads, head_dim)), dt, A, B[:, None], B[:, None])
        for row, dtype in zip((1, 3), DTYPES, strict=True):
            state[row] = state[row].to(dtype)
            state[row + 1] = stochastic_round(state[row + 1][None], dtype, torch.tensor([t]), Rounding())[0]
    for row, dtype in zip((1, 3), DTYPES, strict=True):
        nearest, stochastic = ((state[i] - state[0]).norm() / state[0].norm() for i in (row, row + 1))
        with capsys.disabled():
            print(f"\n{dtype}: drift {nearest:.2e} rounding to nearest, {stochastic:.2e} stochastically")
        assert nearest >= 5 * stochastic
