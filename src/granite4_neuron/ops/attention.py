"""Attention over keys and values that are kept per slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch

MOST_BLOCKS = 128
_FIRST_BLOCK = 1024  # entries


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
    """Compute causal grouped-query attention of new tokens over their sequence's cache, which holds them already.

    Keys are visited in blocks with a running softmax in float32, so that memory does not grow with the context. Cache
    entries that the sequence has not written are masked out and may hold anything, even NaN.

    Args:
        query: [batch, tokens, num_heads, head_dim].
        key_cache, value_cache: [slots, kv_heads, max_length, head_dim].
        positions: [batch, tokens], the place of each token in its sequence; consecutive within a row.
        lengths: [batch], how many of the tokens are real.
        slots: [batch], the cache row of each sequence; None if row i is in slot i + 1, so that none is looked up.
        scale: multiplies the scores.
        kv_length: how many cache entries to visit; above every real token's position.
        block_size: entries per block; None to choose it by the number of tokens, see `blocks`.

    Returns:
        [batch, tokens, num_heads, head_dim] in query's dtype; finite also for padding and for rows of length 0.

    Source: the online softmax of Milakov and Gimelshein 2018, as in FlashAttention (Dao et al. 2022, algorithm 1).
    """
    attention = RunningSoftmax(query, key_cache.shape[1], positions, lengths, scale)
    for block in blocks(query.shape[1], kv_length, block_size):
        attention.add(slot_rows(key_cache[:, :, block], slots), slot_rows(value_cache[:, :, block], slots), block.start)
    return attention.output()


class RunningSoftmax:
    """The running sums of attention, to which blocks of the cache are added; see `cached_attention`.

    total: [batch, kv_heads, heads per kv head * tokens, 1], the sum of the weights, relative to the largest score.
    """

    def __init__(
        self, query: torch.Tensor, kv_heads: int, positions: torch.Tensor, lengths: torch.Tensor, scale: float
    ):
        batch, tokens, num_heads, head_dim = query.shape
        self.shape, self.dtype = query.shape, query.dtype
        # Query heads that share a key head are stacked as rows.
        heads_per_kv = num_heads // kv_heads
        self.query = (query.float() * scale).transpose(1, 2).reshape(batch, kv_heads, heads_per_kv * tokens, head_dim)
        written = (positions[:, :1] + lengths[:, None]).where(lengths[:, None] > 0, 0)
        self.last_visible = torch.minimum(positions, written - 1).int().repeat(1, heads_per_kv)[:, None, :, None]
        self.written = written[:, None, :, None]

        self.lowest = self.query.new_full((), torch.finfo(torch.float32).min)
        self.top = self.lowest.expand(*self.query.shape[:3], 1)
        self.total = torch.zeros_like(self.top)
        self.weighted = torch.zeros_like(self.query)

    def add(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Attend to a block of the cache, [batch, kv_heads, entries, head_dim], whose first entry is `start`."""
        at = torch.arange(start, start + keys.shape[2], dtype=torch.int32, device=keys.device)
        values = values.where(at[:, None] < self.written, values.new_zeros(()))

        scores = self._multiply(self.query, keys.float().transpose(2, 3))
        scores = scores.where(at <= self.last_visible, self.lowest)
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - top)
        rescale = torch.exp(self.top - top)
        self.top = top
        self.total = torch.addcmul(weights.sum(-1, keepdim=True), self.total, rescale)
        sums = self._multiply(weights, values.float())
        self.weighted = torch.addcmul(sums, self.weighted, rescale)

    @staticmethod
    def _multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Multiply matrices, [batch, heads, n, k] by [batch, heads, k, m], as a product of rank 3."""
        return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])

    def output(self) -> torch.Tensor:
        """Return [batch, tokens, num_heads, head_dim] in the query's dtype."""
        batch, tokens, num_heads, head_dim = self.shape
        return (self.weighted / self.total).view(batch, num_heads, tokens, head_dim).transpose(1, 2).to(self.dtype)


def slot_rows(cache: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """Return each sequence's part of a cache [slots, ...]: [batch, ...]. Without slots it is a view."""
    return cache[1:] if slots is None else cache.index_select(0, _indices_of(cache, slots))


def blocks(tokens: int, kv_length: int, block_size: int | None = None) -> Iterator[slice]:
    """Return the blocks of a cache that attention visits, in order. A longer part of the cache begins with the same
    blocks as a shorter one, so a sequence's sums do not depend on how much of the cache other sequences need. The first
    blocks are short, because most sequences are.

    Args:
        block_size: as in `cached_attention`.
    """
    most = block_size or block_length(tokens, kv_length)
    start, size = 0, block_size or min(_FIRST_BLOCK, most)
    while start < kv_length:
        end = min(start // size * size + size, kv_length)
        yield slice(start, end)
        start = end
        if start == size:
            size = min(4 * size, most)


def block_length(tokens: int, kv_length: int) -> int:
    """Return the most cache entries per block: few tokens take few blocks, and there are at most 128, because each is a
    part of a compiled graph.
    """
    length = max(_FIRST_BLOCK, min(8192, 2**19 // tokens), -(-kv_length // MOST_BLOCKS))
    # The first two blocks may be shorter, see `blocks`.
    return length if length == _FIRST_BLOCK else max(length, -(-kv_length // (MOST_BLOCKS - 2)))


def write_cache(
    cache: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new keys or values at their positions, in place; those of padded tokens go to the null slot.

    Args:
        cache: [slots, kv_heads, max_length, head_dim].
        values: [batch, tokens, kv_heads, head_dim].
        positions, lengths, slots: as in `cached_attention`.
    """
    rows, at = (_indices_of(cache, index)[:, None] for index in cache_places(positions, lengths, slots))
    # With an index for every axis but the last a compiler writes in place; with a slice among them it would transpose,
    # and so copy, the whole cache.
    heads = torch.arange(cache.shape[1], dtype=rows.dtype, device=cache.device)[:, None]
    cache[rows, heads, at] = values.transpose(1, 2)


def _indices_of(cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return indices of a cache, in 64 bits if a GPU's compiler needs them: inductor multiplies an index by its stride
    in the index's own dtype.
    """
    is_large = cache.shape[0] * cache.stride(0) > torch.iinfo(torch.int32).max  # it may be a part of a cache
    return indices.long() if cache.is_cuda and is_large else indices


def cache_places(
    positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's slot and its position in it, [batch, tokens]; for padding the null slot's first position."""
    is_real = torch.arange(positions.shape[1], dtype=positions.dtype, device=positions.device) < lengths[:, None]
    return slots[:, None].where(is_real, 0), positions.where(is_real, 0)
