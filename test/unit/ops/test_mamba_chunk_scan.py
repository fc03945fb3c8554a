"""Operators against their definitions in float64, over shapes, ragged lengths, cuts and poisoned padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from granite4_neuron import ops
from granite4_neuron.ops import xla
from granite4_neuron.ops.attention import RunningSoftmax
from granite4_neuron.ops.mamba_chunk_scan import segment_sum
from test.support import oracles

pytestmark = pytest.mark.versions


def relative_error(value, exact):
    return ((value.double() - exact).abs().max() / exact.abs().max()).item()


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

    def test_long_decays_stay_finite_and_right(self):
        """sum |dt A| of a chunk is far above 100, so exp(cs_i) * exp(-cs_j) would overflow."""
        inputs = scan_inputs(1, 128, 2, 8, 1, 16)
        inputs["dt"] = torch.full_like(inputs["dt"], 0.7)
        inputs["dt"][:, 64:] = 1e-4  # slow tokens after fast ones: differences of large sums would lose their digits
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


class TestSelectiveStateStep:
    @pytest.mark.parametrize("groups", [1, 2])
    def test_equals_the_recurrence(self, groups):
        inputs = scan_inputs(3, 5, 4, 8, groups, 16)
        state, outputs = inputs["state"].clone(), []
        for t in range(5):
            x, dt, B, C = (inputs[name][:, t] for name in ("x", "dt", "B", "C"))
            outputs.append(ops.selective_state_step(state, x, dt, inputs["A"], B, C, inputs["D"]))
        exact_y, exact_state = oracles.ssm_recurrence(**inputs)
        assert relative_error(torch.stack(outputs, 1), exact_y) <= 1e-5
        assert relative_error(state, exact_state) <= 1e-5

    def test_expanded_arguments_give_the_same(self):
        """Callers of mamba_ssm expand dt, A, D and dt_bias to every channel."""
        inputs = scan_inputs(2, 1, 4, 8, 1, 16)
        x, B, C = (inputs[name][:, 0] for name in ("x", "B", "C"))
        raw, bias, z = torch.randn(2, 4), torch.randn(4), torch.randn(2, 4, 8)
        tied, expanded = inputs["state"].clone(), inputs["state"].clone()
        y = ops.selective_state_step(tied, x, raw, inputs["A"], B, C, inputs["D"], z, bias, True)
        y_expanded = ops.selective_state_step(
            expanded,
            x,
            raw[..., None].expand(-1, -1, 8),
            inputs["A"][:, None, None].expand(-1, 8, 16),
            B,
            C,
            inputs["D"][:, None].expand(-1, 8),
            z,
            bias[:, None].expand(-1, 8),
            True,
        )
        assert torch.allclose(tied, expanded, atol=1e-6) and torch.allclose(y, y_expanded, atol=1e-5)
        inputs["dt"] = F.softplus(raw + bias)[:, None]
        exact_y, _ = oracles.ssm_recurrence(**inputs)
        assert relative_error(y, exact_y[:, 0] * F.silu(z.double())) <= 1e-5


class TestCausalConv:
    @given(
        width=st.sampled_from([2, 3, 4]),
        pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5),
        with_bias=st.booleans(),
    )
    def test_cuts_and_padding(self, width, pieces, with_bias):
        """A sequence in pieces of any length, each followed by padding, gives the whole sequence."""
        channels = 6
        weight, bias = torch.randn(channels, width), torch.randn(channels) if with_bias else None
        total = sum(length for length, _ in pieces)
        history = torch.randn(total, channels)
        window = torch.zeros(1, channels, width - 1)
        outputs, start = [], 0
        for length, padding in pieces:
            if length + padding == 0:
                continue
            x = torch.full((1, length + padding, channels), 1e3)
            x[0, :length] = history[start : start + length]
            y, window = ops.causal_conv1d(x, window, weight, bias, torch.tensor([length]))
            outputs.append(y[0, :length])
            start += length
            before = torch.cat([torch.zeros(width - 1, channels), history[:start]])
            assert torch.equal(window[0], before[len(before) - (width - 1) :].T)
        if total:
            assert torch.allclose(torch.cat(outputs).double(), oracles.causal_conv(history, weight, bias), atol=1e-5)

    def test_window_keeps_its_dtype(self):
        x = torch.randn(2, 5, 6, dtype=torch.bfloat16)
        window = torch.zeros(2, 6, 3, dtype=torch.bfloat16)
        y, new = ops.causal_conv1d(x, window, torch.randn(6, 4), None, torch.tensor([5, 1]))
        assert y.dtype == torch.float32 and new.dtype == torch.bfloat16 and new.shape == window.shape


class TestAttention:
    @given(
        rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=4),
        kv_heads=st.sampled_from([1, 2, 4]),
        block_size=st.sampled_from([1, 5, 16, 1024]),
        seed=st.integers(0, 1000),
    )
    def test_equals_the_definition(self, rows, kv_heads, block_size, seed):
        """Each row is (tokens in the cache already, new ones). Everything else is NaN."""
        torch.manual_seed(seed)
        heads, head_dim, tokens = 4, 8, 6
        slots = torch.randperm(len(rows)) + 1
        keys, values = (torch.randn(len(rows), 26, kv_heads, head_dim) for _ in range(2))
        key_cache, value_cache = (torch.full((len(rows) + 1, kv_heads, 32, head_dim), math.nan) for _ in range(2))
        new_keys, new_values = (torch.full((len(rows), tokens, kv_heads, head_dim), math.nan) for _ in range(2))
        positions = torch.tensor([start for start, _ in rows])[:, None] + torch.arange(tokens)
        lengths = torch.tensor([new for _, new in rows])
        for row, (start, new) in enumerate(rows):
            for cache, source, fresh in ((key_cache, keys, new_keys), (value_cache, values, new_values)):
                cache[slots[row], :, :start] = source[row, :start].transpose(0, 1)
                fresh[row, :new] = source[row, start : start + new]
        slots = slots.where(lengths > 0, 0)
        ops.write_cache(key_cache, new_keys, positions, lengths, slots)
        ops.write_cache(value_cache, new_values, positions, lengths, slots)
        query = torch.randn(len(rows), tokens, heads, head_dim)
        output = ops.cached_attention(
            query, key_cache, value_cache, positions, lengths, slots, 0.3, kv_length=28, block_size=block_size
        )
        assert torch.isfinite(output).all()
        for row, (start, new) in enumerate(rows):
            for t in range(new):
                seen = start + t + 1
                exact = oracles.attention(query[row, t], keys[row, :seen], values[row, :seen], 0.3)
                assert torch.allclose(output[row, t].double(), exact, atol=1e-5)

    def test_large_scores_do_not_overflow(self):
        cache = torch.randn(2, 1, 40, 8)
        query = 300 * torch.randn(1, 1, 2, 8)
        one = torch.tensor([1])
        output = ops.cached_attention(query, cache, cache, torch.tensor([[39]]), one, one, 1.0, 40, block_size=8)
        exact = oracles.attention(query[0, 0], cache[1].transpose(0, 1), cache[1].transpose(0, 1), 1.0)
        assert torch.allclose(output[0, 0].double(), exact, atol=1e-4)

    @pytest.mark.parametrize("tokens", [1, 512, 2048])
    @pytest.mark.parametrize("kv_length", [131072, 2**20, 10**6 + 1])
    def test_a_graph_of_a_long_context_has_no_more_blocks(self, kv_length, tokens, monkeypatch):
        """On meta tensors, which have no values: each block of the cache is a part of a compiled graph."""
        blocks = []
        monkeypatch.setattr(RunningSoftmax, "add", lambda self, keys, *_: blocks.append(keys.shape[2]))
        query, slots = torch.empty(1, tokens, 2, 8, device="meta"), torch.empty(1, dtype=torch.int32, device="meta")
        cache = torch.empty(2, 1, kv_length, 8, device="meta")
        positions = torch.empty(1, tokens, dtype=torch.int32, device="meta")
        for attend in (ops.cached_attention, xla.cached_attention):
            blocks.clear()
            attend(query, cache, cache, positions, slots, slots, 0.3, kv_length)
            assert sum(blocks) == kv_length and len(blocks) <= 128


class TestExperts:
    @pytest.mark.parametrize("tokens", [1, 2, 7, 64])
    @pytest.mark.parametrize("top_k", [1, 3, 5])
    def test_equals_the_definition(self, tokens, top_k):
        torch.manual_seed(tokens)
        x, router = torch.randn(tokens, 16), torch.randn(5, 16)
        w1, w2 = torch.randn(5, 24, 16) / 4, torch.randn(5, 16, 12) / 4
        weights, ids = ops.topk_softmax(x @ router.T, top_k)
        assert torch.allclose(weights.sum(-1), torch.ones(tokens))
        output = ops.fused_experts(x, w1, w2, weights, ids)
        assert torch.allclose(output.double(), oracles.mixture_of_experts(x, router, w1, w2, top_k), atol=1e-4)

    def test_widths_that_the_grouped_product_refuses(self):
        x, router, w1, w2 = torch.randn(9, 18), torch.randn(5, 18), torch.randn(5, 14, 18), torch.randn(5, 18, 7)
        weights, ids = ops.topk_softmax(x @ router.T, 2)
        exact = oracles.mixture_of_experts(x, router, w1, w2, 2)
        assert relative_error(ops.fused_experts(x, w1, w2, weights, ids), exact) <= 1e-5

    def test_experts_that_nobody_chose_are_not_read(self):
        x, w1, w2 = torch.randn(3, 16), torch.randn(5, 24, 16), torch.randn(5, 16, 12)
        w1[3:], w2[3:] = math.nan, math.nan
        ids = torch.tensor([[0, 2], [1, 0], [2, 1]])
        assert torch.isfinite(ops.fused_experts(x, w1, w2, torch.full((3, 2), 0.5), ids)).all()

    def test_a_poisoned_token_stays_alone(self):
        x, w1, w2 = torch.randn(4, 16), torch.randn(5, 24, 16), torch.randn(5, 16, 12)
        x[2] = math.nan
        weights, ids = ops.topk_softmax(x @ torch.randn(16, 5), 2)
        finite = torch.isfinite(ops.fused_experts(x, w1, w2, weights, ids)).all(1)
        assert finite.tolist() == [True, True, False, True]


class TestNorm:
    def test_plain(self):
        x, weight = torch.randn(3, 5, 16), torch.randn(16)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        assert torch.allclose(ops.rms_norm(x, weight, 1e-5).double(), exact, atol=1e-5)

    @pytest.mark.parametrize("groups", [1, 4])
    def test_gated_is_gated_first_and_normalised_per_group(self, groups):
        x, z, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
        gated = (x.double() * F.silu(z.double())).view(3, groups, -1)
        exact = (gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 16) * weight
        assert torch.allclose(ops.rms_norm_gated(x, z, weight, 1e-5, groups).double(), exact, atol=1e-5)


def test_rotary_is_a_rotation_by_position():
    """The product of two rotated vectors depends only on the distance of their positions."""
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def product(query_position, key_position):
        tables = [ops.rotary_tables(torch.tensor([[at]]), 16, 1e4) for at in (query_position, key_position)]
        return (ops.apply_rotary(q, tables[0]) * ops.apply_rotary(k, tables[1])).sum()

    assert torch.allclose(product(7, 3), product(104, 100), atol=1e-4)
    assert not torch.allclose(product(7, 3), product(7, 4), atol=1e-2)
    assert torch.equal(ops.apply_rotary(q, ops.rotary_tables(torch.zeros(1, 1), 16, 1e4)), q)
