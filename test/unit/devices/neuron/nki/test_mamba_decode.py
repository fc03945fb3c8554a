"""The NKI kernel of a Mamba layer's decode and verification, against the recurrence in float64."""

import math

import nki.language as nl
import numpy as np
import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.nki.launch import launch
from granite4_neuron.devices.neuron.nki.limits import check_mamba_decode
from granite4_neuron.devices.neuron.nki.mamba_decode import mamba_decode, mamba_decode_torch
from test.support.checkpoints import granite_names
from test.support.nki_cases import error, mamba_decode_inputs, mamba_decode_oracle, nbytes
from test.support.nki_checks import check, last_launch

HYBRIDS = [name for name in granite_names() if published_config(name).layer_types.count("mamba")]
H_SMALL = dict(heads=32, head_dim=64, d_state=128)


def run(case, programs=1):
    return launch(mamba_decode, *case.values(), programs=programs)


def test_definition():
    case = mamba_decode_inputs(tokens=5, groups=2, accepted=[0, 3, 5])
    y, *states = mamba_decode_oracle(case)
    check(mamba_decode_torch(**case), (y, *states))
    check(mamba_decode_torch(**case | dict(accepted=None)), (y,))
    check(mamba_decode_torch(**case | dict(z=None)), states)


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 4, 9])
@pytest.mark.parametrize(
    "dimensions",
    [
        dict(heads=16, head_dim=64, d_state=128),
        dict(heads=6, head_dim=32, d_state=64, d_conv=3),
        dict(heads=8, head_dim=128, d_state=128, d_conv=2),
        dict(heads=8, head_dim=64, d_state=64, groups=2),
        dict(heads=12, head_dim=32, d_state=32, groups=6),
    ],
    ids=lambda d: "-".join(map(str, d.values())),
)
def test_equals_the_recurrence(programs, tokens, dimensions):
    case = mamba_decode_inputs(3, tokens, accepted=[tokens, 0, tokens // 2], **dimensions)
    check(run(case, programs), mamba_decode_oracle(case))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_state_after_the_accepted_tokens(accepted):
    case = mamba_decode_inputs(2, 4, accepted=[accepted, 4 - accepted])
    y, states, windows = run(case)
    check((y, states, windows), mamba_decode_oracle(case))
    if accepted == 0:
        assert torch.equal(states[0], case["states"][0]) and torch.equal(windows[0], case["conv_states"][0])


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize(
    "dimensions", [dict(heads=16), dict(heads=8, d_state=64, groups=2)], ids=["1 group", "2 groups"]
)
def test_a_verification_and_its_commit(programs, dimensions):
    """Outputs alone and states alone equal those computed together, bit by bit."""
    case = mamba_decode_inputs(3, 4, accepted=[4, 0, 2], **dimensions)
    together = run(case, programs)
    check(together, mamba_decode_oracle(case))
    apart = *run(case | dict(accepted=None), programs), *run(case | dict(z=None), programs)
    assert len(apart) == 3 and all(map(torch.equal, apart, together))


def test_bfloat16():
    case = mamba_decode_inputs(3, 4, dtype=torch.bfloat16, accepted=[4, 1, 0])
    y, states, windows = run(case)
    exact = mamba_decode_oracle(case)
    assert y.dtype == windows.dtype == torch.bfloat16 and torch.equal(windows.double(), exact[2])
    assert error(y, exact[0]) <= 1e-2 and error(states, exact[1]) <= 1e-5


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("batch", "tokens", "dimensions"),
    [
        (1, 2, dict(heads=4, head_dim=32)),
        (70, 2, dict(heads=4, head_dim=32)),
        (150, 1, dict(heads=2, head_dim=32, d_state=32)),
        (9, 5, dict(heads=16, head_dim=128, d_state=32)),
        (2, 16, dict(heads=32, head_dim=32, d_state=32)),
        (2, 1, dict(heads=128, head_dim=32, d_state=32)),
        (3, 8, dict(heads=63, head_dim=64, d_state=32)),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_batch(batch, tokens, dimensions):
    """Steps have several groups of sequences, several banks, and the most heads, lanes and tokens."""
    case = mamba_decode_inputs(batch, tokens, accepted=[i % (tokens + 1) for i in range(batch)], **dimensions)
    check(run(case), mamba_decode_oracle(case))


def test_groups_that_fill_the_partitions():
    """B and C of 64 groups are on 128 partitions, and five tokens of them in two banks. More groups are refused."""
    case = mamba_decode_inputs(2, 5, heads=64, head_dim=32, groups=64, d_state=32)
    check(run(case), mamba_decode_oracle(case))
    with pytest.raises(UserError, match="up to 64 groups"):
        check_mamba_decode(1, 128, 32, 128, 32, 1)


def test_tokens_one_by_one_are_tokens_together():
    case = mamba_decode_inputs(2, 3)
    together = run(case)
    states, windows, outputs = case["states"], case["conv_states"], []
    for t in range(3):
        one = case | {name: case[name][:, t : t + 1] for name in ("xBC", "dt", "z")}
        one |= dict(states=states, conv_states=windows, accepted=torch.ones(2, dtype=torch.int32))
        y, states, windows = run(one)
        outputs.append(y)
    check((torch.cat(outputs, 1), states, windows), together)


def test_large_decay():
    case = mamba_decode_inputs(2, 4, max_A=128.0)
    case["dt"][:, 1] = 20.0
    check(run(case), mamba_decode_oracle(case))


@pytest.mark.parametrize("name", ["states", "conv_states", "xBC", "dt", "z"])
def test_nan_stays_in_its_sequence(name):
    case = mamba_decode_inputs(3, 2, accepted=[2, 1, 2])
    clean = run(case)
    poisoned = case | {name: case[name].clone()}
    poisoned[name][1] = math.nan
    for value, expected in zip(run(poisoned), clean, strict=True):
        assert torch.equal(value[0], expected[0]) and torch.equal(value[2], expected[2])


@pytest.mark.parametrize("programs", [1, 2])
def test_in_place(programs, monkeypatch):
    """An output takes the memory of `states` and is still right: nothing is read after it was overwritten."""
    emulation = pytest.importorskip("nki.emulation", reason="aliases are given to the graph, not to a simulator")
    case = mamba_decode_inputs(3, 2)
    exact = mamba_decode_oracle(case)
    aliased = emulation.NkiTensor.from_array(case["states"].numpy())
    ndarray = nl.ndarray

    def with_alias(shape, dtype, buffer):
        return aliased if shape == aliased.shape else ndarray(shape, dtype, buffer)

    monkeypatch.setattr(nl, "ndarray", with_alias)
    results = run(case, programs)
    assert results[1].data_ptr() == case["states"].data_ptr()
    check(results, exact)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", HYBRIDS)
def test_family(name):
    config = published_config(name)
    for tp_degree, batch, tokens in ((4, 2, 4), (1, 1, 1)):
        rank = config.rank_dimensions(tp_degree)
        shape = rank.mamba_heads, config.mamba_d_head, rank.mamba_groups, config.mamba_d_state
        check_mamba_decode(tokens, *shape, 2)
        case = mamba_decode_inputs(batch, tokens, *shape)
        check(run(case, 2), mamba_decode_oracle(case))


def test_dimensions_that_it_does_not_take():
    for changes in (dict(tokens=17), dict(num_heads=7), dict(head_dim=48), dict(d_state=256), dict(num_heads=512)):
        dimensions = dict(tokens=4, num_heads=8, head_dim=64, n_groups=1, d_state=128, programs=2)
        with pytest.raises(UserError, match="takes 1 to 16 tokens"):
            check_mamba_decode(**dimensions | changes)
    with pytest.raises(UserError, match="Here are 12 heads in 3 groups, head_dim 64, d_state 128, and steps of 4"):
        check_mamba_decode(4, 12, 64, 3, 128, 2)


class TestBudgets:
    def test_four_tokens_cost_little_more_than_one(self):
        """Without loads and stores of states, instructions are at most 1.6 times as many. State bytes are the same."""
        for batch in (1, 8):
            counts, written = [], []
            for tokens in (1, 4):
                run(mamba_decode_inputs(batch, tokens, **H_SMALL), 2)
                counts.append(last_launch().count() - 2 * batch)
                state = batch * 128 * 16 * 64 * 4
                written.append(
                    sum(i.hbm_written >= state / batch for i in last_launch().instructions if i.program == 0)
                )
            assert counts[1] <= 1.6 * counts[0]
            assert written == [batch, batch]

    def test_traffic_of_a_verification_and_its_commit(self):
        """The verification reads states, and the commit reads and writes them. Neither moves the other's data."""
        case = mamba_decode_inputs(8, 4, dtype=torch.bfloat16, **H_SMALL)
        for absent in ("accepted", "z"):
            form = case | {absent: None}
            outputs = run(form, 2)
            given = [value for value in form.values() if value is not None]
            assert last_launch().hbm_bytes <= 1.25 * nbytes(*given, *outputs)
            writes = [i for i in last_launch().instructions if i.hbm_written >= 128 * 16 * 64 * 4]
            assert len(writes) == (0 if absent == "accepted" else 2 * 8)

    def test_traffic(self):
        case = mamba_decode_inputs(8, 4, dtype=torch.bfloat16, **H_SMALL)
        outputs = run(case, 2)
        assert last_launch().hbm_bytes <= 1.2 * nbytes(*case.values(), *outputs)
        assert last_launch().peak_sbuf_bytes < 207 * 1024

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("name", HYBRIDS)
    def test_dma_elements(self, name):
        """DMA moves lanes of x, z, outputs and windows, and long rows of states. Nothing goes to HBM and back."""
        config = published_config(name)
        for tp_degree, batch, tokens in ((4, 1, 1), (4, 8, 1), (4, 4, 4), (1, 3, 1)):
            rank = config.rank_dimensions(tp_degree)
            shape = rank.mamba_heads, config.mamba_d_head, rank.mamba_groups, config.mamba_d_state
            case = mamba_decode_inputs(batch, tokens, *shape, dtype=torch.bfloat16)
            outputs = run(case, 2)
            lanes = math.ceil(rank.mamba_heads // 2 * config.mamba_d_head / 128)
            elements = [i.dma_elements for i in last_launch().instructions if i.program == 0]
            small = sum(count for sizes in elements for size, count in sizes if size < 512)
            assert small <= 4 * batch * tokens * (lanes + 2) + 8
            assert last_launch().hbm_bytes <= 1.05 * nbytes(*case.values(), *outputs)


class TestStatesOf16Bits:
    def test_one_rounding(self):
        case = mamba_decode_inputs(2, 2)
        case["states"] = case["states"].to(torch.bfloat16)
        y, states, _ = run(case)
        exact = mamba_decode_oracle(case)
        assert states.dtype == torch.bfloat16
        assert error(y, exact[0]) <= 1e-5  # read from the stored state, without another rounding
        assert torch.equal(states, exact[1].to(torch.bfloat16)) or error(states, exact[1]) <= 2**-8

    def test_stochastic_rounding_is_to_neighbours_and_unbiased(self, monkeypatch):
        pytest.importorskip("nki.emulation", reason="a device rounds as its runtime says")
        monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
        case = mamba_decode_inputs(4, 2, heads=8)
        case["states"] = case["states"].to(torch.bfloat16)
        states, exact = run(case)[1].double(), mamba_decode_oracle(case)[1]
        step = 2.0 ** (exact.abs().log2().floor() - 7)  # the distance from a bfloat16 to the next
        errors = ((states - exact) / step)[exact.abs() > 0.01]  # float32 is far finer than the step there
        assert errors.abs().max() < 1 + 1e-3 and (errors.abs() > 0.5).any()
        assert abs(errors.mean()) < 5 * errors.std() / errors.numel() ** 0.5

    def test_drift_over_20000_steps(self):
        """The state decays by a ten thousandth per step, as in slow heads. Rounding to nearest never moves it."""
        values = pytest.importorskip("nki.values", reason="only the emulator rounds here")
        steps, decay = 20_000, np.float32(1 - 1e-4)
        exact = float(decay) ** steps
        drifts = []
        for random in (None, np.random.default_rng(0)):
            state = np.ones(512, np.float32)
            for _ in range(steps):
                state = values.cast(state * decay, "bfloat16", random).astype(np.float32)
            drifts.append(abs(state.mean() - exact))
        assert drifts[0] >= 5 * drifts[1]
