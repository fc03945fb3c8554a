"""Attention of a few tokens of each sequence over only the part of the cache that each token sees.

This part is cut into splits that programs process in parallel, as in flash decoding; a second kernel combines them. A
token's own position decides the splits, so that its sums have one order whatever else is in the step.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.flash_attention import attend_prompt
from granite4_neuron.devices.cuda.launch import NUM_WARPS_SMALL, gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.sums import EXACT_PRODUCTS
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops import attention

# Cache entries in a block, which a program reads at once, and in the smallest split: a program reads the blocks of a
# split one after another. A token has at most _MAX_SPLITS splits.
_BLOCK_KV = 16
_SMALLEST_SPLIT = 32
_MAX_SPLITS = 128
_SPLITS_AT_ONCE = 16  # combined at once
_MOST_PROGRAMS = 4096  # that attend to splits; with more sequences a program takes several, many of which may be empty
# Of each sequence; a step of more is a piece of a prompt.
_MOST_TOKENS = 16
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def cached_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
    kv_length: int,
) -> torch.Tensor:
    """Compute `ops.cached_attention`."""
    if slots is not None and query.shape[1] > _MOST_TOKENS:
        return attend_prompt(query, key_cache, value_cache, positions, lengths, slots, scale)
    return attend_tokens(query, key_cache, value_cache, positions, lengths, slots, scale, kv_length)


@operator()
def attend_tokens(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
    kv_length: int,
) -> torch.Tensor:
    """Compute `ops.cached_attention` of a few tokens of each sequence.

    A token's bits depend on its own position only: not on kv_length, nor on the number of sequences or of tokens.
    """
    return attention.cached_attention(
        query, key_cache, value_cache, positions, lengths, slots, scale, kv_length
    ).contiguous()


@attend_tokens.register_fake
def _(query, *others):
    return query.new_empty(query.shape)


def _launch_attend_tokens(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
    kv_length: int,
) -> torch.Tensor:
    query = query.contiguous()
    batch, tokens, num_heads, head_dim = query.shape
    num_kv_heads, max_length = key_cache.shape[1:3]
    heads_per_kv_head, rows = num_heads // num_kv_heads, batch * tokens
    most_splits, block_d = min(_MAX_SPLITS, triton.cdiv(kv_length, _SMALLEST_SPLIT)), triton.next_power_of_2(head_dim)
    splits = dict(MAX_SPLITS=_MAX_SPLITS, SMALLEST_SPLIT=_SMALLEST_SPLIT)
    # For each split: the weighted sum of values, the sum of weights, and the score that both are relative to.
    partial = query.new_empty(most_splits, rows, num_heads, head_dim + 2, dtype=torch.float32)
    output = torch.empty_like(query)
    index = positions.contiguous(), lengths
    splits_at_once = max(1, min(most_splits, _MOST_PROGRAMS // (num_kv_heads * rows)))
    _attend_to_split_kernel[num_kv_heads, rows, splits_at_once](
        query,
        key_cache,
        value_cache,
        *index,
        slots,
        partial,
        scale,
        max_length,
        tokens,
        HEADS_PER_KV_HEAD=heads_per_kv_head,
        BLOCK_H=triton.next_power_of_2(heads_per_kv_head),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_KV=_BLOCK_KV,
        **splits,
        **launch_options(query, 1),
        **EXACT_PRODUCTS,
    )
    _combine_splits_kernel[num_heads, rows](
        partial,
        *index,
        output,
        tokens,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        SPLITS_AT_ONCE=_SPLITS_AT_ONCE,
        **splits,
        **launch_options(query, NUM_WARPS_SMALL),
        **EXACT_PRODUCTS,
    )
    return output


register_launch(attend_tokens, _launch_attend_tokens)


@triton.jit
def _visible(positions, lengths, row, tokens, MAX_SPLITS: tl.constexpr, SMALLEST_SPLIT: tl.constexpr):
    """Return how many entries a token sees, and how many of them are in each of its splits."""
    is_real = row % tokens < tl.load(lengths + row // tokens)
    visible = tl.where(is_real, tl.load(positions + row) + 1, 0)
    return visible, tl.cdiv(visible, MAX_SPLITS * SMALLEST_SPLIT) * SMALLEST_SPLIT


@triton.jit(do_not_specialize=["tokens"])
def _attend_to_split_kernel(
    query,
    key_cache,
    value_cache,
    positions,
    lengths,
    slots,
    partial,
    scale,
    max_length,
    tokens,
    HEADS_PER_KV_HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SMALLEST_SPLIT: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Attend with the heads that share a key and value head to splits of a token's part of the cache.

    Grid: (kv heads, batch * tokens, splits at once): a program takes each split after so many others.

    Args:
        query: [batch, tokens, heads, HEAD_DIM].
        key_cache, value_cache: [1 + sequences, kv heads, max_length, HEAD_DIM]; the first slot is unused.
        positions: [batch, tokens] int32.
        lengths: [batch] int32, how many of the tokens are real; the others attend to nothing.
        slots: [batch] int32; None if sequence i is in slot i + 1.
        partial: [most splits, batch * tokens, heads, HEAD_DIM + 2] in float32: the weighted sum of values, the sum of
            weights, and the largest score, which both are relative to; not written for empty splits.
    """
    gdc_launch_dependents(USE_GDC)
    gdc_wait(USE_GDC)
    row, num_kv_heads = tl.program_id(1), tl.num_programs(0)
    visible, split_size = _visible(positions, lengths, row, tokens, MAX_SPLITS, SMALLEST_SPLIT)
    for split in range(tl.program_id(2), tl.cdiv(visible, tl.maximum(split_size, 1)), tl.num_programs(2)):
        start = split * split_size
        entries = tl.minimum(split_size, visible - start)
        offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        mask_h, mask_d = offs_h < HEADS_PER_KV_HEAD, offs_d < HEAD_DIM
        head = (row.to(tl.int64) * num_kv_heads + tl.program_id(0)) * HEADS_PER_KV_HEAD + offs_h
        mask = mask_h[:, None] & mask_d[None]
        q = tl.load(query + head[:, None] * HEAD_DIM + offs_d[None], mask, other=0.0).to(tl.float32) * scale
        # In 64 bits; from here on 32 suffice. The first slot is unused, and the first sequence's comes after it.
        slot = 1 + row.to(tl.int64) // tokens
        if slots is not None:
            slot = tl.load(slots + row // tokens).to(tl.int64)
        first = ((slot * num_kv_heads + tl.program_id(0)) * max_length + start) * HEAD_DIM

        m_i, l_i = tl.full([BLOCK_H], _LOWEST, tl.float32), tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for start_kv in range(0, entries, BLOCK_KV):
            offs_kv = start_kv + tl.arange(0, BLOCK_KV)[None]
            mask_kv = offs_kv < entries
            offs = first + offs_kv[:, :, None] * HEAD_DIM + offs_d[None, None]
            mask_entry = mask_kv[:, :, None] & mask_d[None, None]
            k = tl.load(key_cache + offs, mask_entry, other=0.0)
            v = tl.load(value_cache + offs, mask_entry, other=0.0)  # while the keys are being loaded
            scores = tl.where(mask_kv, tl.sum(k.to(tl.float32) * q[:, None], 2), _LOWEST)
            m_new = tl.maximum(m_i, tl.max(scores, 1))
            p = tl.exp(scores - m_new[:, None])
            rescale = tl.exp(m_i - m_new)
            l_i = l_i * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None] + tl.sum(p[:, :, None] * v.to(tl.float32), 1)
            m_i = m_new
        num_rows = tl.num_programs(1).to(tl.int64)
        ptrs = partial + (split * num_rows * num_kv_heads * HEADS_PER_KV_HEAD + head) * (HEAD_DIM + 2)
        tl.store(ptrs[:, None] + offs_d[None], acc, mask)
        tl.store(ptrs + HEAD_DIM, l_i, mask_h)
        tl.store(ptrs + HEAD_DIM + 1, m_i, mask_h)


@triton.jit(do_not_specialize=["tokens"])
def _combine_splits_kernel(
    partial,
    positions,
    lengths,
    output,
    tokens,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SMALLEST_SPLIT: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Combine the splits of one head, several at a time: partial, as above, to output [batch * tokens, heads,
    HEAD_DIM].

    Grid: (heads, batch * tokens).
    """
    gdc_launch_dependents(USE_GDC)
    gdc_wait(USE_GDC)
    row = tl.program_id(1)
    visible, split_size = _visible(positions, lengths, row, tokens, MAX_SPLITS, SMALLEST_SPLIT)
    num_splits = tl.cdiv(visible, tl.maximum(split_size, 1))
    head, num_heads = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), tl.num_programs(1) * tl.num_programs(0)
    every, offs_d = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    tops = partial + (every.to(tl.int64) * num_heads + head) * (HEAD_DIM + 2) + HEAD_DIM + 1
    top = tl.max(tl.load(tops, every < num_splits, other=_LOWEST), 0)
    total, acc = tl.zeros([1], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, SPLITS_AT_ONCE):
        offs_s = first + tl.arange(0, SPLITS_AT_ONCE)
        mask_s = offs_s < num_splits
        ptrs = partial + (offs_s.to(tl.int64) * num_heads + head) * (HEAD_DIM + 2)
        rescale = tl.exp(tl.load(ptrs + HEAD_DIM + 1, mask_s, other=_LOWEST) - top)
        total += tl.sum(tl.load(ptrs + HEAD_DIM, mask_s, other=0.0) * rescale, 0)
        values = tl.load(ptrs[:, None] + offs_d[None], mask_s[:, None] & mask_d[None], other=0.0)
        acc += tl.sum(values * rescale[:, None], 0)
    # The weight of the largest score is 1, so that the total is below 1 only where nothing is visible.
    combined = acc / tl.where(total < 1.0, 1.0, total)
    tl.store(output + head * HEAD_DIM + offs_d, combined.to(output.dtype.element_ty), mask_d)
