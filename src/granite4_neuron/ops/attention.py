"""Attention over keys and values that are kept per slot."""

from __future__ import annotations

import torch


def cached_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    kv_length: int,
    block_size: int | None = None,
) -> torch.Tensor:
    """Causal grouped-query attention of new tokens over their sequence's cache, which holds them already.

    Keys are visited in blocks with a running softmax in float32, so that memory does not grow with the context. Cache
    entries that the sequence has not written are selected away and may hold anything, NaN too.

    Args:
        query: [batch, tokens, num_heads, head_dim].
        key_cache, value_cache: [slots, kv_heads, max_length, head_dim].
        positions: [batch, tokens], the place of each token in its sequence; consecutive within a row.
        lengths: [batch], how many of the tokens are real.
        slots: [batch], the cache row of each sequence.
        scale: multiplies the scores.
        kv_length: how many cache entries to visit; above every real token's position.
        block_size: entries per block; None for what suits the number of tokens.

    Returns:
        [batch, tokens, num_heads, head_dim] in query's dtype; finite also for padding and for rows of length 0.

    Source: the online softmax of Milakov and Gimelshein 2018, as in FlashAttention (Dao et al. 2022, algorithm 1).
    """
    batch, tokens, num_heads, head_dim = query.shape
    kv_heads = key_cache.shape[1]
    # Query heads that share a key head stand below one another: [batch, kv_heads, heads per kv head * tokens, head_dim]
    q = (query.float() * scale).transpose(1, 2).reshape(batch, kv_heads, -1, head_dim)
    written = (positions[:, :1] + lengths[:, None]).where(lengths[:, None] > 0, 0)
    last_visible = torch.minimum(positions, written - 1)[:, None, :, None]
    written = written[:, None, :, None]

    nothing, lowest = q.new_zeros(()), q.new_full((), torch.finfo(torch.float32).min)
    top = lowest.expand(batch, num_heads, tokens, 1)
    total = torch.zeros_like(top)
    weighted = q.new_zeros(batch, num_heads, tokens, head_dim)
    block_size = block_size or _block_size(tokens)
    for start in range(0, kv_length, block_size):
        stop = min(start + block_size, kv_length)
        at = torch.arange(start, stop, device=query.device)
        key = key_cache[:, :, start:stop].index_select(0, slots).float()
        value = value_cache[:, :, start:stop].index_select(0, slots).float()
        value = value.where(at[:, None] < written, nothing)

        scores = torch.einsum("bkqd,bksd->bkqs", q, key).view(batch, num_heads, tokens, -1)
        scores = scores.where(at <= last_visible, lowest)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_top)
        rescale = torch.exp(top - new_top)
        total = torch.addcmul(weights.sum(-1, keepdim=True), total, rescale)
        sums = torch.einsum("bkqs,bksd->bkqd", weights.view(batch, kv_heads, -1, stop - start), value)
        weighted = torch.addcmul(sums.view(weighted.shape), weighted, rescale)
        top = new_top
        if query.device.type != "cpu":
            slots = _once_known(total, slots)
    return (weighted / total).transpose(1, 2).to(query.dtype)


def _block_size(tokens: int) -> int:
    """Cache entries per block: fewer blocks where few tokens look at them."""
    return max(1024, min(8192, 2**19 // tokens))


def _once_known(total: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`slots`, as a function of `total`, which is never negative.

    It orders one block after another in a compiled graph, whose scheduler would else compute, and keep, the scores of
    all of them at once.
    """
    return slots.masked_fill(total.sum() < 0, 0)  # NaN is not below 0


def write_cache(
    cache: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new keys or values at their positions, in place; those of padded tokens go to the null slot.

    Args:
        cache: [slots, kv_heads, max_length, head_dim].
        values: [batch, tokens, kv_heads, head_dim].
        positions, lengths, slots: as in `cached_attention`.
    """
    real = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
    rows, at = slots[:, None].where(real, 0)[:, None], positions.where(real, 0)[:, None]
    # With an index for every axis but the last a compiler writes in place; with a slice among them it would transpose,
    # which is to copy, the whole cache.
    heads = torch.arange(cache.shape[1], device=cache.device)[:, None]
    cache[rows, heads, at] = values.transpose(1, 2)
