"""Attention of one token of each sequence over the written part of its cache, and no more.

The cache is cut into splits that programs attend to side by side, as in flash decoding; a second kernel combines them.
"""

from __future__ import annotations

import torch

from granite4_neuron.ops import attention
from granite4_neuron.ops.gpu.flash_attention import attend_tokens
from granite4_neuron.ops.gpu.launch import NUM_WARPS_SMALL, gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.ops.gpu.operator import operator, register_launch
from granite4_neuron.ops.gpu.triton_utils import tl, triton

# Entries of the cache that a program reads together. Where there would be more programs or splits than these, a program
# reads several such blocks, one after another.
_BLOCK_KV = 16
_MAX_PROGRAMS = 2048
_MAX_SPLITS = 128
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
    caches, where = (key_cache, value_cache), (positions, lengths)
    if query.shape[1] > 1 or slots is not None:
        return attend_tokens(query, *caches, *where, slots, scale)
    return attend_token(query, *caches, *where, scale, kv_length)


@operator()
def attend_token(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    kv_length: int,
) -> torch.Tensor:
    """Compute `ops.cached_attention` of one token of each sequence, in the order of their slots."""
    return attention.cached_attention(
        query, key_cache, value_cache, positions, lengths, None, scale, kv_length
    ).contiguous()


@attend_token.register_fake
def _(query, *others):
    return query.new_empty(query.shape)


def _launch_attend_token(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    kv_length: int,
) -> torch.Tensor:
    query = query.contiguous()
    batch, _, num_heads, head_dim = query.shape
    num_kv_heads, max_length = key_cache.shape[1:3]
    heads_per_kv_head = num_heads // num_kv_heads
    max_splits = max(1, min(_MAX_SPLITS, _MAX_PROGRAMS // (batch * num_kv_heads)))
    split_size = max(_BLOCK_KV, triton.next_power_of_2(triton.cdiv(kv_length, max_splits)))
    num_splits, block_d = triton.cdiv(kv_length, split_size), triton.next_power_of_2(head_dim)
    # For each split the weighted sum of values, the sum of weights, and the score that they are relative to.
    partial = query.new_empty(batch, num_heads, num_splits, head_dim + 2, dtype=torch.float32)
    output = torch.empty_like(query)
    _attend_to_split_kernel[num_kv_heads, batch, num_splits](
        query,
        key_cache,
        value_cache,
        positions,
        lengths,
        partial,
        scale,
        max_length,
        HEADS_PER_KV_HEAD=heads_per_kv_head,
        BLOCK_H=triton.next_power_of_2(heads_per_kv_head),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        SPLIT_SIZE=split_size,
        BLOCK_KV=_BLOCK_KV,
        **launch_options(query, 1),
    )
    _combine_splits_kernel[num_heads, batch](
        partial,
        output,
        num_splits,
        HEAD_DIM=head_dim,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        BLOCK_D=block_d,
        **launch_options(query, NUM_WARPS_SMALL),
    )
    return output


register_launch(attend_token, _launch_attend_token)


@triton.jit
def _attend_to_split_kernel(
    query,
    key_cache,
    value_cache,
    positions,
    lengths,
    partial,
    scale,
    max_length,
    HEADS_PER_KV_HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Attend with the heads that share a key and value head to one split of a sequence's cache.

    Grid: (kv heads, batch, splits).

    Args:
        query: [batch, heads, HEAD_DIM].
        key_cache, value_cache: [1 + batch, kv heads, max_length, HEAD_DIM]; the first slot is unused.
        positions, lengths: [batch] int32; a sequence of length 0 attends to nothing.
        partial: [batch, heads, splits, HEAD_DIM + 2] in float32: the weighted sum of values, the sum of weights, and
            the largest score, which both are relative to.
    """
    gdc_launch_dependents(USE_GDC)
    gdc_wait(USE_GDC)
    pid_b = tl.program_id(1).to(tl.int64)
    kv_head = pid_b * tl.num_programs(0) + tl.program_id(0)
    offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask_h, mask_d = offs_h < HEADS_PER_KV_HEAD, offs_d < HEAD_DIM
    head = kv_head * HEADS_PER_KV_HEAD + offs_h
    mask = mask_h[:, None] & mask_d[None]
    q = tl.load(query + head[:, None] * HEAD_DIM + offs_d[None], mask, other=0.0).to(tl.float32) * scale
    visible = tl.where(tl.load(lengths + pid_b) > 0, tl.load(positions + pid_b) + 1, 0)
    start = tl.program_id(2) * SPLIT_SIZE
    entries = tl.minimum(SPLIT_SIZE, visible - start)
    # In 64 bits; from here on 32 suffice. The first sequence's part is behind an unused one.
    first = ((tl.num_programs(0) + kv_head) * max_length + start) * HEAD_DIM

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
    partial += (head * tl.num_programs(2) + tl.program_id(2)) * (HEAD_DIM + 2)
    tl.store(partial[:, None] + offs_d[None], acc, mask)
    tl.store(partial + HEAD_DIM, l_i, mask_h)
    tl.store(partial + HEAD_DIM + 1, m_i, mask_h)


@triton.jit
def _combine_splits_kernel(
    partial,
    output,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Combine the splits of one head: partial [batch, heads, splits, HEAD_DIM + 2] to output [batch, heads, HEAD_DIM].

    Grid: (heads, batch).
    """
    gdc_launch_dependents(USE_GDC)
    gdc_wait(USE_GDC)
    head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    offs_s, offs_d = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    mask_s, mask_d = offs_s < num_splits, offs_d < HEAD_DIM
    ptrs = partial + (head * num_splits + offs_s) * (HEAD_DIM + 2)
    m = tl.load(ptrs + HEAD_DIM + 1, mask_s, other=_LOWEST)
    rescale = tl.exp(m - tl.max(m, 0))
    total = tl.sum(tl.load(ptrs + HEAD_DIM, mask_s, other=0.0) * rescale, 0)
    acc = tl.load(ptrs[:, None] + offs_d[None], mask_s[:, None] & mask_d[None], other=0.0) * rescale[:, None]
    # The weight of the largest score is 1, so that the total is below 1 only where nothing is visible.
    combined = tl.sum(acc, 0) / tl.where(total < 1.0, 1.0, total)
    tl.store(output + head * HEAD_DIM + offs_d, combined.to(output.dtype.element_ty), mask_d)
