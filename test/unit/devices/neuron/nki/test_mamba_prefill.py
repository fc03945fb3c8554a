"""The NKI kernel of a Mamba layer's prompts, against the recurrence in float64."""

import math

import pytest
import torch

from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.nki.launch import launch
from granite4_neuron.devices.neuron.nki.mamba_prefill import mamba_prefill, mamba_prefill_torch
from test.support.checkpoints import granite_names
from test.support.nki_cases import error, mamba_decode_oracle, mamba_prefill_inputs, nbytes
from test.support.nki_checks import check, last_launch

HYBRIDS = [name for name in granite_names() if published_config(name).layer_types.count("mamba")]


def run(case, programs=1):
    return launch(mamba_prefill, *case.values(), programs=programs)


def check_real(results, case, tolerance=1e-5):
    """Check the outputs of real tokens, the states and the windows."""
    y, *states = results
    exact_y, *exact_states = mamba_decode_oracle(case)
    for row, expected, length in zip(y, exact_y, case["accepted"].tolist(), strict=True):
        if length:
            assert error(row[:length], expected[:length]) <= tolerance
    check(states, exact_states, tolerance)


def test_definition():
    case = mamba_prefill_inputs(3, 140, groups=2, lengths=[0, 140, 131])
    check_real(mamba_prefill_torch(*case.values()), case)


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize(
    "dimensions",
    [
        dict(heads=16, head_dim=64, d_state=128),
        dict(heads=6, head_dim=32, d_state=64, d_conv=3),
        dict(heads=4, head_dim=128, d_state=128, d_conv=2),
        dict(heads=8, head_dim=64, d_state=64, groups=2),
        dict(heads=12, head_dim=32, d_state=64, groups=6),
    ],
    ids=lambda d: "-".join(map(str, d.values())),
)
def test_equals_the_recurrence(programs, dimensions):
    """With two programs, B and C are of a group that both have a part of, or each has groups of its own."""
    case = mamba_prefill_inputs(2, 150, lengths=[150, 129], **dimensions)
    check_real(run(case, programs), case)


@pytest.mark.parametrize("length", [1, 2, 128, 257])
def test_any_length(length):
    case = mamba_prefill_inputs(1, length, heads=2, head_dim=32, d_state=64)
    check_real(run(case), case)


def test_fewer_tokens_than_the_window():
    """A row without tokens keeps its state and its window."""
    case = mamba_prefill_inputs(4, 3, heads=2, head_dim=32, d_state=64, lengths=[0, 1, 2, 3])
    results = run(case)
    check_real(results, case)
    assert torch.equal(results[1][0], case["states"][0]) and torch.equal(results[2][0], case["conv_states"][0])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16(state_dtype):
    case = mamba_prefill_inputs(2, 150, dtype=torch.bfloat16, lengths=[150, 4])
    case["states"] = case["states"].to(state_dtype)
    y, states, windows = run(case, 2)
    assert y.dtype == windows.dtype == torch.bfloat16 and states.dtype == state_dtype
    check_real((y, states, windows), case, 2e-2)
    assert torch.equal(windows.double(), mamba_decode_oracle(case)[2])


@pytest.mark.parametrize("name", ["states", "conv_states", "xBC", "dt", "z"])
def test_nan_stays_in_its_sequence(name):
    case = mamba_prefill_inputs(3, 5, heads=2, head_dim=32, d_state=64)
    clean = run(case)
    poisoned = case | {name: case[name].clone()}
    poisoned[name][1] = math.nan
    for value, expected in zip(run(poisoned), clean, strict=True):
        assert torch.equal(value[0], expected[0]) and torch.equal(value[2], expected[2])


@pytest.mark.slow
@pytest.mark.parametrize("tp_degree", [1, 4])
@pytest.mark.parametrize("name", HYBRIDS)
def test_family(name, tp_degree):
    config = published_config(name)
    rank = config.rank_dimensions(tp_degree)
    shape = rank.mamba_heads, config.mamba_d_head, rank.mamba_groups, config.mamba_d_state
    case = mamba_prefill_inputs(1, 131, *shape)
    check_real(run(case, 2), case)


@pytest.mark.parametrize("length", [256, 384])
def test_traffic(length):
    """What is convolved does not go through HBM. Both programs read the one group's B and C."""
    case = mamba_prefill_inputs(1, length, heads=32, head_dim=64, d_state=128, dtype=torch.bfloat16)
    outputs = run(case, 2)
    assert last_launch().hbm_bytes <= 1.05 * nbytes(*case.values(), *outputs)
    assert last_launch().peak_sbuf_bytes < 207 * 1024
