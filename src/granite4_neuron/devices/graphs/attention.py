"""Attention over the cache of slots, in plain torch, block by block; and writes to the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from granite4_neuron.ops.attention import RunningSoftmax, blocks, cache_places, slot_rows, write_cache


def cached_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
    kv_length: int,
    *,
    block_size: int | None = None,
) -> torch.Tensor:
    """Compute `ops.cached_attention`, one block after another."""
    attention = RunningSoftmax(query, key_cache.shape[1], positions, lengths, scale)
    for block in blocks(query.shape[1], kv_length, block_size):
        keys, values = (slot_rows(cache[:, :, block], slots) for cache in (key_cache, value_cache))
        if block.start and slots is None:
            keys, values = (_once_known(attention.total, each) for each in (keys, values))
        attention.add(keys, values, block.start)
        if slots is not None:
            slots = _once_known(attention.total, slots)
    return attention.output()


def _once_known(total: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values`, as a function of `total`, which is never negative.

    This makes a compiled graph process one block after another. Otherwise its scheduler would compute the scores of all
    blocks at once, and keep them.
    """
    return values.masked_fill(total.sum() < 0, 0)  # NaN is not below 0


def write_cache_as(form: str) -> Callable[..., None]:
    """Return `ops.write_cache` in one of the forms of `choices.KV_WRITES`. Measure on a device which is fastest there.

    "index" has an index for each axis. "rows" has one index, of rows of head_dim values. "select" writes the whole
    cache, so it has no index; it is for a row of every sequence, in the order of the slots, or for one row.
    """
    return {"index": write_cache, "rows": _write_rows, "select": _write_selected}[form]


def _write_rows(
    cache: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> None:
    _, kv_heads, max_length, head_dim = cache.shape
    rows, offsets = (index[:, :, None] for index in cache_places(positions, lengths, slots))
    heads = torch.arange(kv_heads, dtype=rows.dtype, device=cache.device)
    row = (rows * kv_heads + heads) * max_length + offsets  # [batch, tokens, kv_heads]
    cache.view(-1, head_dim)[row.flatten()] = values.reshape(-1, head_dim)


def _write_selected(
    cache: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> None:
    batch, tokens = positions.shape
    offsets = torch.arange(cache.shape[2], dtype=positions.dtype, device=cache.device)
    starts = positions[:, :1]
    mask = (offsets >= starts) & (offsets < starts + lengths[:, None])  # [batch, max_length]
    placed = values.transpose(1, 2)
    if tokens > 1:
        placed = _at_positions(placed, offsets, positions, lengths)
    if batch == len(cache) - 1:
        written = placed.where(mask[:, None, :, None], cache[1:])
        cache.copy_(torch.cat([cache[:1], written]))
    else:
        at = torch.arange(len(cache), dtype=slots.dtype, device=cache.device)[:, None]
        cache.copy_(placed.where(((at == slots) & mask)[:, None, :, None], cache))


def _at_positions(
    values: torch.Tensor, offsets: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Put real tokens' values [batch, kv_heads, tokens, head_dim] to their positions, [batch, kv_heads, max_length,
    head_dim], zeros elsewhere: a product with ones and zeros, which keeps every finite number.
    """
    numbers = torch.arange(positions.shape[1], dtype=lengths.dtype, device=values.device)
    is_real = (numbers < lengths[:, None])[:, None, :, None]
    is_at = (offsets[:, None] == positions[:, None]).to(values.dtype)  # [batch, max_length, tokens]
    is_at = is_at[:, None].expand(-1, values.shape[1], -1, -1).flatten(0, 1)
    return torch.bmm(is_at, values.where(is_real, 0.0).flatten(0, 1)).unflatten(0, values.shape[:2])
