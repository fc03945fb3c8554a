"""Attention over keys and values that are kept per slot, one block of the cache after another."""

from __future__ import annotations

import torch

from granite4_neuron.ops.attention import RunningSoftmax, block_length


def cached_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    kv_length: int,
    *,
    block_size: int | None = None,
) -> torch.Tensor:
    """Compute `ops.cached_attention`, one block after another."""
    attention = RunningSoftmax(query, key_cache.shape[1], positions, lengths, scale)
    block_size = block_size or block_length(query.shape[1])
    for start in range(0, kv_length, block_size):
        block = slice(start, min(start + block_size, kv_length))
        keys, values = (cache[:, :, block].index_select(0, slots) for cache in (key_cache, value_cache))
        attention.add(keys, values, start)
        slots = _once_known(attention.total, slots)
    return attention.output()


def _once_known(total: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return `slots`, as a function of `total`, which is never negative.

    It orders one block after another in a compiled graph, whose scheduler would else compute, and keep, the scores of
    all of them at once.
    """
    return slots.masked_fill(total.sum() < 0, 0)  # NaN is not below 0
