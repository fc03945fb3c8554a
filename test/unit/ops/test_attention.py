"""Attention over a cache against each token's own softmax in float64, over ragged lengths and poisoned padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from granite4_neuron import ops
from granite4_neuron.devices.graphs import operators as xla
from granite4_neuron.devices.graphs.runtime import cache_buckets
from granite4_neuron.ops.attention import RunningSoftmax, blocks
from test.support import oracles

pytestmark = pytest.mark.versions


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

    @pytest.mark.parametrize("tokens", [1, 4, 16, 512])
    def test_blocks_of_a_longer_cache_begin_with_those_of_a_shorter_one(self, tokens):
        """Otherwise a sequence's sums would depend on the longest sequence beside it."""
        shorter = []
        for kv_length in cache_buckets(131072):
            longer = list(blocks(tokens, kv_length))
            assert longer[: len(shorter)] == shorter and longer[-1].stop == kv_length
            shorter = longer

    @pytest.mark.parametrize("tokens", [1, 512, 2048])
    @pytest.mark.parametrize("kv_length", [131072, 2**20, 10**6 + 1])
    def test_the_number_of_blocks_is_limited(self, kv_length, tokens, monkeypatch):
        """Each block of the cache adds to a compiled graph. Meta tensors suffice, because only shapes matter."""
        lengths = []
        monkeypatch.setattr(RunningSoftmax, "add", lambda self, keys, *_: lengths.append(keys.shape[2]))
        query, slots = torch.empty(1, tokens, 2, 8, device="meta"), torch.empty(1, dtype=torch.int32, device="meta")
        cache = torch.empty(2, 1, kv_length, 8, device="meta")
        positions = torch.empty(1, tokens, dtype=torch.int32, device="meta")
        for attend in (ops.cached_attention, xla.cached_attention):
            lengths.clear()
            attend(query, cache, cache, positions, slots, slots, 0.3, kv_length)
            assert sum(lengths) == kv_length and len(lengths) <= 128
