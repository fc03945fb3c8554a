"""Attention of several tokens of each sequence over its cache, in one ascending loop over blocks of keys.

The places of blocks do not depend on a step's tokens. A block that a token does not see changes none of its bits: the
block's weights are zeros, and sums are multiplied by one. Blocks that all tokens of a program see come first, without
masks; programs begin at multiples of their size. So a token's result depends neither on the step's other tokens nor on
the cache's length. Weights are rounded to the caches' dtype.

Source: FlashAttention (Dao et al. 2022, algorithm 1).
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda import hopper_attention
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.products import has_descriptors, input_precision, shared_memory
from granite4_neuron.devices.cuda.triton_utils import LOG2_E, TensorDescriptor, tl, triton
from granite4_neuron.ops import attention

_BLOCK_M, _BLOCK_KV = 64, 64
_BLOCK_KV_OF_FLOAT32 = 32
_SHARED_MEMORY = 160 * 1024  # bytes that all stages need, for head_dim up to 128
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@operator()
def attend_prompt(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Compute `ops.cached_attention` of several tokens of each sequence."""
    caches, kv_length = (key_cache, value_cache), key_cache.shape[2]
    output = attention.cached_attention(query, *caches, positions, lengths, slots, scale, kv_length)
    return output.contiguous()


@attend_prompt.register_fake
def _(query, *others):
    return query.new_empty(query.shape)


def _launch_attend_prompt(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    if hopper_attention.suits(query, key_cache, value_cache, scale):
        return hopper_attention.launch_attend_prompt(query, key_cache, value_cache, positions, lengths, slots, scale)
    query = query.contiguous()
    batch, tokens, num_heads, head_dim = query.shape
    kv_heads, max_length = key_cache.shape[1:3]
    output = torch.empty_like(query)
    block_kv, num_stages = (_BLOCK_KV, 3) if query.itemsize == 2 else (_BLOCK_KV_OF_FLOAT32, 2)
    block_d = max(16, triton.next_power_of_2(head_dim))
    entries = [cache.view(-1, head_dim) for cache in (key_cache, value_cache)]
    by_descriptors = has_descriptors(*entries)
    tiles = [TensorDescriptor.from_tensor(each, [block_kv, block_d]) if by_descriptors else None for each in entries]
    _attend_prompt_kernel[triton.cdiv(tokens, _BLOCK_M), num_heads, batch](
        query,
        key_cache,
        value_cache,
        *tiles,
        positions,
        lengths,
        slots,
        output,
        scale * LOG2_E.value,
        tokens,
        positions.stride(0),
        max_length,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=_BLOCK_M,
        BLOCK_KV=block_kv,
        BLOCK_D=block_d,
        BY_DESCRIPTORS=by_descriptors,
        PRECISION=input_precision("tf32x3"),
        num_warps=4,
        num_stages=num_stages if shared_memory(query) >= _SHARED_MEMORY else num_stages - 1,
    )
    return output


register_launch(attend_prompt, _launch_attend_prompt)


@triton.jit(do_not_specialize=["tokens", "stride_positions", "max_length"])
def _attend_prompt_kernel(
    query,
    key_cache,
    value_cache,
    key_tiles,
    value_tiles,
    positions,
    lengths,
    slots,
    output,
    scale,
    tokens,
    stride_positions,
    max_length,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BY_DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with one head of BLOCK_M tokens of a sequence.

    Grid: (cdiv(tokens, BLOCK_M), HEADS, batch). The last tokens, which see the most, come first.

    Args:
        query, output: [batch, tokens, HEADS, HEAD_DIM].
        key_cache, value_cache: [slots, KV_HEADS, max_length, HEAD_DIM].
        key_tiles, value_tiles: with BY_DESCRIPTORS tensor descriptors of the caches, [entries, HEAD_DIM].
        positions: [batch, tokens], integer, with its stride.
        lengths: [batch], integer: tokens after this many are padding.
        slots: [batch], integer, or None: sequence i is in slot i + 1.
        scale: multiplies scores; the softmax takes powers of two of them.
    """
    pid_m = tl.num_programs(0) - 1 - tl.program_id(0)
    pid_h, pid_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = pid_b + 1
    if slots is not None:
        slot = tl.load(slots + pid_b).to(tl.int64)
    offs_m, offs_d, offs_kv = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KV)
    mask_m, mask_d = offs_m < tokens, offs_d < HEAD_DIM
    is_real = offs_m < tl.load(lengths + pid_b)
    # How many entries of the cache each token sees.
    visible = tl.load(positions + pid_b * stride_positions + offs_m, mask_m & is_real, -1).to(tl.int32) + 1
    written = tl.max(visible, 0)
    seen_by_all = tl.min(tl.where(mask_m & is_real, visible, written), 0)

    offs_q = ((pid_b * tokens + offs_m[:, None]) * HEADS + pid_h) * HEAD_DIM + offs_d[None]
    mask_q = mask_m[:, None] & mask_d[None]
    q = tl.load(query + offs_q, mask_q, 0.0)
    first = (slot * KV_HEADS + pid_h // (HEADS // KV_HEADS)) * max_length
    m_i, l_i = tl.full([BLOCK_M], _LOWEST, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = 0
    if BY_DESCRIPTORS:
        whole = seen_by_all // BLOCK_KV * BLOCK_KV
        row = first.to(tl.int32)
        for start in range(0, whole, BLOCK_KV):
            scores = tl.dot(q, tl.trans(key_tiles.load([row + start, 0])), input_precision=PRECISION) * scale
            m_new = tl.maximum(m_i, tl.max(scores, 1))
            p = tl.exp2(scores - m_new[:, None])
            acc, l_i = _add_block(acc, l_i, m_i, m_new, p, value_tiles.load([row + start, 0]), PRECISION)
            m_i = m_new
    key_cache += first * HEAD_DIM
    value_cache += first * HEAD_DIM
    for start in range(whole, written, BLOCK_KV):
        at = start + offs_kv
        mask_kv = (at < written)[:, None] & mask_d[None]
        k = tl.load(key_cache + at[:, None] * HEAD_DIM + offs_d[None], mask_kv, 0.0)
        v = tl.load(value_cache + at[:, None] * HEAD_DIM + offs_d[None], mask_kv, 0.0)
        is_visible = at[None] < visible[:, None]
        scores = tl.where(is_visible, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, _LOWEST)
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p = tl.where(is_visible, tl.exp2(scores - m_new[:, None]), 0.0)
        acc, l_i = _add_block(acc, l_i, m_i, m_new, p, v, PRECISION)
        m_i = m_new
    # The weight of the largest score is 1, so that the total is below 1 only where nothing is visible.
    outputs = acc / tl.where(l_i < 1.0, 1.0, l_i)[:, None]
    tl.store(output + offs_q, outputs.to(output.dtype.element_ty), mask_q)


@triton.jit
def _add_block(acc, l_i, m_i, m_new, p, v, PRECISION: tl.constexpr):
    """Add a block's values with their weights p, when the largest score rises from m_i to m_new."""
    rescale = tl.exp2(m_i - m_new)
    return tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION), l_i * rescale + tl.sum(p, 1)
