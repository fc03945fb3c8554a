"""The chunked scan against the recurrence in float64, over shapes, ragged lengths, cuts and poisoned padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from granite4_neuron import ops
from granite4_neuron.ops.mamba_chunk_scan import segment_sum
from test.support import oracles
from test.support.oracles import relative_error

pytestmark = pytest.mark.versions


def scan_inputs(batch, length, heads, head_dim, groups, d_state, seed=0, max_A=16.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(dtype)

    return dict(
        x=normal(batch, length, heads, head_dim),
        dt=F.softplus(
            torch.empty(batch, length, heads).uniform_(-4, 1, generator=g) + normal(batch, length, heads).float()
        ),
        A=-torch.empty(heads).uniform_(1, max_A, generator=g),
        B=normal(batch, length, groups, d_state),
        C=normal(batch, length, groups, d_state),
        D=normal(heads).float(),
        state=normal(batch, heads, head_dim, d_state).float(),
    )


def chunk_scan(inputs, chunk_size, **more):
    state = inputs["state"]
    arguments = [inputs[name] for name in ("x", "dt", "A", "B", "C")]
    return ops.mamba_chunk_scan_combined(
        *arguments, chunk_size, inputs["D"], initial_states=state, return_final_states=True, **more
    )


class TestChunkScan:
    @given(
        batch=st.integers(1, 3),
        length=st.integers(1, 150),
        chunk_size=st.sampled_from([1, 7, 32, 64, 150]),
        groups=st.sampled_from([1, 2]),
        d_state=st.sampled_from([8, 16, 128]),
        max_A=st.sampled_from([2.0, 16.0, 128.0]),
        seed=st.integers(0, 1000),
    )
    def test_equals_the_recurrence(self, batch, length, chunk_size, groups, d_state, max_A, seed):
        inputs = scan_inputs(batch, length, 4, 8, groups, d_state, seed, max_A)
        y, state = chunk_scan(inputs, chunk_size)
        exact_y, exact_state = oracles.ssm_recurrence(**inputs)
        assert relative_error(y, exact_y) <= 1e-5
        assert relative_error(state, exact_state) <= 1e-5

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_inputs(self, dtype):
        inputs = scan_inputs(2, 100, 4, 16, 1, 32, dtype=dtype)
        y, state = chunk_scan(inputs, 32)
        exact_y, exact_state = oracles.ssm_recurrence(**inputs)
        assert y.dtype == dtype and state.dtype == torch.float32
        assert relative_error(y, exact_y) <= 1e-2
        assert relative_error(state, exact_state) <= 1e-5  # the state is float32 from end to end

    def test_large_decays_stay_finite_and_right(self):
        """sum |dt A| of a chunk is far above 100, so exp(cs_i) * exp(-cs_j) would overflow."""
        inputs = scan_inputs(1, 128, 2, 8, 1, 16)
        inputs["dt"] = torch.full_like(inputs["dt"], 0.7)
        inputs["dt"][:, 64:] = 1e-4  # slow tokens after fast ones: a difference of large sums would lose digits
        inputs["A"] = -torch.tensor([16.0, 128.0])
        assert (inputs["dt"] * inputs["A"].abs()).sum(1).min() > 100
        y, state = chunk_scan(inputs, 128)
        exact_y, exact_state = oracles.ssm_recurrence(**inputs)
        assert relative_error(y, exact_y) <= 1e-5
        assert relative_error(state, exact_state) <= 1e-5

    def test_dt_of_zero_is_a_no_op(self):
        inputs = scan_inputs(2, 40, 4, 8, 1, 16)
        short = {name: value[:, :25] if name in ("x", "dt", "B", "C") else value for name, value in inputs.items()}
        inputs["dt"][:, 25:] = 0
        y, state = chunk_scan(inputs, 16)
        short_y, short_state = chunk_scan(short, 16)
        assert torch.allclose(state, short_state, atol=1e-6)
        assert torch.allclose(y[:, :25], short_y, atol=1e-5)

    def test_softplus_bias_limit_and_gate(self):
        inputs = scan_inputs(1, 30, 4, 8, 1, 16)
        raw, bias = torch.randn(1, 30, 4), torch.randn(4)
        z = torch.randn(1, 30, 4, 8)
        inputs["dt"] = F.softplus(raw + bias).clamp(0.1, 0.9)
        exact_y, _ = oracles.ssm_recurrence(**inputs)
        inputs["dt"] = raw
        y, _ = chunk_scan(inputs, 8, dt_bias=bias, dt_softplus=True, dt_limit=(0.1, 0.9), z=z)
        assert relative_error(y, exact_y * F.silu(z.double())) <= 1e-5


def test_segment_sum_is_exact_where_differences_of_sums_are_not():
    values = -torch.cat([torch.full((64,), 90.0), torch.full((64,), 1e-3)])
    exact = torch.zeros(128, 128, dtype=torch.float64)
    for i in range(128):
        for j in range(i + 1):
            exact[i, j] = values[j + 1 : i + 1].double().sum()
    error = (segment_sum(values).double().exp() - exact.exp()).abs().max()
    sums = values.cumsum(0)
    naive = ((sums[:, None] - sums[None]).tril().double().exp() - exact.exp()).abs().max()
    assert error <= 1e-6 < 1e-5 < naive
