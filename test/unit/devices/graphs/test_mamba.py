"""The scan of compiled graphs, in plain torch on the CPU, against the recurrence in float64."""

import pytest
import torch

from granite4_neuron.devices.cuda.mamba import QUADRATIC
from granite4_neuron.devices.graphs.mamba import mamba_chunk_scan, segment_sum
from granite4_neuron.ops.mamba_chunk_scan import segment_sum as definition_of_segment_sum
from granite4_neuron.ops.selective_state_step import selective_state_step
from test.support.oracles import relative_error

pytestmark = pytest.mark.versions

HEADS, HEAD_DIM, D_STATE = 8, 4, 6


@pytest.fixture(params=[mamba_chunk_scan, QUADRATIC.scan], ids=["xla", "gpu"])
def scan(request):
    """A GPU's quadratic scan has one chunk, whatever the size asked for."""
    return request.param


def inputs(batch, length, n_groups, max_A=16.0):
    """Return x, dt, A, B, C, D and the initial states."""
    x, dt = torch.randn(batch, length, HEADS, HEAD_DIM), torch.rand(batch, length, HEADS)
    A, D = -torch.rand(HEADS) * max_A, torch.randn(HEADS)
    B, C = torch.randn(2, batch, length, n_groups, D_STATE)
    return x, dt, A, B, C, D, torch.randn(batch, HEADS, HEAD_DIM, D_STATE)


def recurrence(x, dt, A, B, C, D, states):
    """Compute token by token, in float64."""
    x, dt, A, B, C, D, states = (tensor.double() for tensor in (x, dt, A, B, C, D, states.clone()))
    decay, y = torch.exp(dt * A), []
    heads_per_group = HEADS // B.shape[2]
    for token in range(x.shape[1]):
        b, c = (values[:, token].repeat_interleave(heads_per_group, dim=1) for values in (B, C))
        added = (dt[:, token, :, None] * x[:, token])[..., None] * b[:, :, None]
        states = decay[:, token, :, None, None] * states + added
        y.append((states * c[:, :, None]).sum(-1) + D[:, None] * x[:, token])
    return torch.stack(y, 1), states


@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 16), (16, 16), (17, 16), (64, 16), (100, 32), (100, 128)])
def test_equals_the_recurrence(scan, length, chunk_size, batch, n_groups):
    torch.manual_seed(length)
    arguments = inputs(batch, length, n_groups)
    y, states = scan(*arguments, chunk_size)
    exact_y, exact_states = recurrence(*arguments)
    assert relative_error(y, exact_y) <= 1e-5
    assert relative_error(states, exact_states) <= 1e-5


def test_fast_decay(scan):
    """Sums of logarithms go down to -10,000: their exponentials are 0, and a difference of sums loses its digits."""
    torch.manual_seed(0)
    arguments = inputs(1, 200, 1, max_A=128.0)
    y, states = scan(*arguments, 128)
    exact_y, exact_states = recurrence(*arguments)
    assert relative_error(y, exact_y) <= 1e-5
    assert relative_error(states, exact_states) <= 1e-5


def test_padding_changes_nothing(scan):
    x, dt, A, B, C, D, states = inputs(2, 40, 1)
    dt[:, 25:] = 0.0
    y, after = scan(x, dt, A, B, C, D, states, 16)
    shorter_y, expected = scan(x[:, :25], dt[:, :25], A, B[:, :25], C[:, :25], D, states, 16)
    assert torch.allclose(y[:, :25], shorter_y, atol=1e-5)
    assert torch.allclose(after, expected, atol=1e-5)


def test_one_token_equals_the_definition(scan):
    x, dt, A, B, C, D, states = inputs(2, 1, 2)
    y, after = scan(x, dt, A, B, C, D, states, 1)
    assert torch.allclose(y[:, 0], selective_state_step(states, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D), atol=1e-5)
    assert torch.allclose(after, states, atol=1e-5)


def test_segment_sum():
    values = torch.randn(6, 33)
    assert torch.allclose(segment_sum(values), definition_of_segment_sum(values).transpose(1, 2), atol=1e-5)
