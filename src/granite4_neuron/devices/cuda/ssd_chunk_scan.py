"""The Mamba-2 recurrence of prompts as matrix products, chunk by chunk (state space duality, SSD).

Chunks begin at multiples of the chunk's size, and states pass from one to the next in float32, in ascending order. So a
prompt that is cut there has the same bits: the same states pass between its pieces as between chunks. Later tokens add
only zeros to a token's sums. Kernels are compiled once for all numbers of tokens.

Source: Dao and Gu 2024, section 6; divided into the same parts as mamba_ssm's ssd_combined.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.products import input_precision, shared_memory
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.graphs.mamba import CHUNK_SIZE
from granite4_neuron.ops.mamba_operators import chunked_scan

# Tokens whose outputs a program computes; fewer if a program has less shared memory.
_MOST_ROWS, _FEWER_ROWS, _SHARED_MEMORY = 64, 32, 160 * 1024
_BLOCK_H = 4
_BLOCK_STATE = 64


@operator()
def scan_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `devices.graphs.mamba.mamba_chunk_scan`."""
    y, states = chunked_scan(x, dt, A, B, C, D, initial_states, CHUNK_SIZE)
    return y.contiguous(), states.contiguous()


@scan_chunks.register_fake
def _(x, dt, A, B, C, D, initial_states):
    return x.new_empty(x.shape), initial_states.new_empty(initial_states.shape, dtype=torch.float32)


def _launch_scan_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    size = min(CHUNK_SIZE, max(16, triton.next_power_of_2(tokens)))
    chunks = triton.cdiv(tokens, size)
    x, B, C = (_with_whole_tokens(values) for values in (x, B, C))
    dt = dt.contiguous()
    constants = {"HEADS": num_heads, "GROUPS": n_groups, "D_STATE": d_state, "CHUNK": size}
    precision = input_precision("tf32x3")

    # Sums in float64, as two float32 numbers each, so that a difference of two sums has all digits of a float32.
    sums = dt.new_empty(batch, num_heads, 2, chunks * size)
    _sum_decays_kernel[chunks, triton.cdiv(num_heads, _BLOCK_H), batch](
        dt, A, sums, tokens, chunks, HEADS=num_heads, CHUNK=size, BLOCK_H=_BLOCK_H, num_warps=4
    )

    block_n = max(16, triton.next_power_of_2(d_state))
    rows = min(_MOST_ROWS if shared_memory(x) >= _SHARED_MEMORY else _FEWER_ROWS, size)
    scores = dt.new_empty(batch, chunks, n_groups, size, size)
    _score_chunks_kernel[chunks * (size // rows), n_groups, batch](
        B,
        C,
        scores,
        tokens,
        chunks,
        *_strides(B),
        *_strides(C),
        GROUPS=n_groups,
        D_STATE=d_state,
        CHUNK=size,
        BLOCK_M=rows,
        BLOCK_N=block_n,
        PRECISION=precision,
        num_warps=4,
    )

    before = dt.new_empty(batch, chunks, num_heads, head_dim, d_state)
    states = dt.new_empty(initial_states.shape)
    block_p = max(16, triton.next_power_of_2(head_dim))
    part_p, part_n = min(32, block_p), min(_BLOCK_STATE, block_n)
    parts = triton.cdiv(head_dim, part_p), triton.cdiv(d_state, part_n)
    _pass_states_kernel[num_heads, parts[0] * parts[1], batch](
        x,
        dt,
        B,
        sums,
        initial_states.float().contiguous(),
        before,
        states,
        tokens,
        chunks,
        *_strides(x),
        *_strides(B),
        HEAD_DIM=head_dim,
        BLOCK_P=part_p,
        BLOCK_N=part_n,
        PRECISION=precision,
        num_warps=4,
        num_stages=1,  # fastest on an H200
        **constants,
    )

    y = x.new_empty(batch, tokens, num_heads, head_dim)
    _scan_chunks_kernel[chunks * (size // rows), num_heads, batch](
        x,
        dt,
        C,
        D,
        sums,
        scores,
        before,
        y,
        tokens,
        chunks,
        *_strides(x),
        *_strides(C),
        HEAD_DIM=head_dim,
        BLOCK_M=rows,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        PRECISION=precision,
        num_warps=4,
        num_stages=1,  # fastest on an H200
        **constants,
    )
    return y, states


register_launch(scan_chunks, _launch_scan_chunks)


def _with_whole_tokens(values: torch.Tensor) -> torch.Tensor:
    """Return values [batch, tokens, rows, columns] with each token contiguous."""
    return values if values.stride(3) == 1 and values.stride(2) == values.shape[3] else values.contiguous()


def _strides(values: torch.Tensor) -> tuple[int, int]:
    return values.stride(0), values.stride(1)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _sum_decays_kernel(
    dt,
    A,
    sums,
    tokens,
    chunks,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the logarithms of decays from a chunk's start up to each of its tokens, in float64.

    Grid: (chunks, cdiv(HEADS, BLOCK_H), batch).

    Args:
        dt: [batch, tokens, HEADS] in float32.
        A: [HEADS] in float32.
        sums: [batch, HEADS, 2, chunks * CHUNK] in float32, the rounded sums, and the remainders.
    """
    pid_c, pid_b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    offs_t, offs_h = pid_c * CHUNK + tl.arange(0, CHUNK), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < HEADS
    mask = (offs_t < tokens)[:, None] & mask_h[None]
    values = tl.load(dt + (pid_b * tokens + offs_t[:, None]) * HEADS + offs_h[None], mask, 0.0)
    log_decay = values * tl.load(A + offs_h, mask_h, 0.0).to(tl.float32)[None]
    total = tl.cumsum(log_decay.to(tl.float64), 0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    ptrs = sums + (pid_b * HEADS + offs_h[None]) * (2 * chunks * CHUNK) + offs_t[:, None]
    tl.store(ptrs, high, mask_h[None])
    tl.store(ptrs + chunks * CHUNK, low, mask_h[None])


@triton.jit
def _load_rows(values, offs_t, tokens, stride, offs, mask):
    """Load some numbers of tokens, [rows, columns] in float32."""
    return tl.load(values + offs_t[:, None] * stride + offs[None], (offs_t < tokens)[:, None] & mask[None], 0.0).to(
        tl.float32
    )


@triton.jit(do_not_specialize=["tokens", "chunks", "stride_B_batch", "stride_C_batch"])
def _score_chunks_kernel(
    B,
    C,
    scores,
    tokens,
    chunks,
    stride_B_batch,
    stride_B,
    stride_C_batch,
    stride_C,
    GROUPS: tl.constexpr,
    D_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply C of BLOCK_M tokens with B of their chunk, once for all heads of a group.

    Grid: (chunks * CHUNK / BLOCK_M, groups, batch).

    Args:
        B, C: [batch, tokens, GROUPS, D_STATE], with their strides.
        scores: [batch, chunks, GROUPS, to CHUNK, from CHUNK] in float32.
    """
    pid_c, pid_m = tl.program_id(0) // (CHUNK // BLOCK_M), tl.program_id(0) % (CHUNK // BLOCK_M)
    pid_g, pid_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_m, offs_s, offs_n = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    first, mask_n = pid_c * CHUNK, offs_n < D_STATE
    group = pid_g * D_STATE + offs_n
    to = _load_rows(C + pid_b * stride_C_batch, first + offs_m, tokens, stride_C, group, mask_n)
    source = _load_rows(B + pid_b * stride_B_batch, first + offs_s, tokens, stride_B, group, mask_n)
    values = tl.dot(to, tl.trans(source), input_precision=PRECISION)
    at = ((pid_b * chunks + pid_c) * GROUPS + pid_g) * CHUNK + offs_m
    tl.store(scores + at[:, None] * CHUNK + offs_s[None], values)


@triton.jit(do_not_specialize=["tokens", "chunks", "stride_x_batch", "stride_B_batch"])
def _pass_states_kernel(
    x,
    dt,
    B,
    sums,
    initial_states,
    before,
    states,
    tokens,
    chunks,
    stride_x_batch,
    stride_x,
    stride_B_batch,
    stride_B,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pass a part of a head's state from chunk to chunk.

    Grid: (HEADS, cdiv(HEAD_DIM, BLOCK_P) * cdiv(D_STATE, BLOCK_N), batch).

    Args:
        x: [batch, tokens, HEADS, HEAD_DIM]. B: [batch, tokens, GROUPS, D_STATE]; both with their strides.
        dt: [batch, tokens, HEADS] in float32.
        sums: as `_sum_decays_kernel` writes them.
        initial_states, states: [batch, HEADS, HEAD_DIM, D_STATE] in float32, before and after all tokens.
        before: [batch, chunks, HEADS, HEAD_DIM, D_STATE] in float32, the states before each chunk.
    """
    pid_h, pid_b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    parts_n: tl.constexpr = (D_STATE + BLOCK_N - 1) // BLOCK_N
    offs_p = tl.program_id(1) // parts_n * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.program_id(1) % parts_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_s = tl.arange(0, CHUNK)
    mask_p, mask_n = offs_p < HEAD_DIM, offs_n < D_STATE
    mask = mask_p[:, None] & mask_n[None]
    offs = offs_p[:, None] * D_STATE + offs_n[None]
    x += pid_b * stride_x_batch + pid_h * HEAD_DIM
    B += pid_b * stride_B_batch + pid_h // (HEADS // GROUPS) * D_STATE
    sums += (pid_b * HEADS + pid_h) * (2 * chunks * CHUNK)
    head = (pid_b * HEADS + pid_h) * (HEAD_DIM * D_STATE)
    state = tl.load(initial_states + head + offs, mask, 0.0)
    for chunk in range(chunks):
        tl.store(before + ((pid_b * chunks + chunk) * HEADS + pid_h) * (HEAD_DIM * D_STATE) + offs, state, mask)
        offs_t = chunk * CHUNK + offs_s
        mask_t = offs_t < tokens
        last = sums + chunk * CHUNK + CHUNK - 1
        end_high, end_low = tl.load(last), tl.load(last + chunks * CHUNK)
        high, low = tl.load(sums + offs_t), tl.load(sums + chunks * CHUNK + offs_t)
        weight = tl.exp((end_high - high) + (end_low - low))
        weight *= tl.load(dt + (pid_b * tokens + offs_t) * HEADS + pid_h, mask_t, 0.0)
        values = tl.load(x + offs_t[None] * stride_x + offs_p[:, None], mask_t[None] & mask_p[:, None], 0.0)
        source = _load_rows(B, offs_t, tokens, stride_B, offs_n, mask_n)
        added = tl.dot(values.to(tl.float32) * weight[None], source, input_precision=PRECISION)
        state = state * tl.exp(end_high + end_low) + added
    tl.store(states + head + offs, state, mask)


@triton.jit(do_not_specialize=["tokens", "chunks", "stride_x_batch", "stride_C_batch"])
def _scan_chunks_kernel(
    x,
    dt,
    C,
    D,
    sums,
    scores,
    before,
    y,
    tokens,
    chunks,
    stride_x_batch,
    stride_x,
    stride_C_batch,
    stride_C,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a head's outputs of BLOCK_M tokens, from the state before their chunk and from the chunk.

    Grid: (chunks * CHUNK / BLOCK_M, HEADS, batch).

    Args:
        x: [batch, tokens, HEADS, HEAD_DIM]. C: [batch, tokens, GROUPS, D_STATE]; both with their strides.
        dt: [batch, tokens, HEADS] in float32. D: [HEADS].
        sums, scores, before: as the other kernels write them.
        y: [batch, tokens, HEADS, HEAD_DIM].
    """
    pid_c, pid_m = tl.program_id(0) // (CHUNK // BLOCK_M), tl.program_id(0) % (CHUNK // BLOCK_M)
    pid_h, pid_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = pid_h // (HEADS // GROUPS)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_p, offs_n, offs_s = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    mask_p, mask_n, first = offs_p < HEAD_DIM, offs_n < D_STATE, pid_c * CHUNK
    x += pid_b * stride_x_batch + pid_h * HEAD_DIM
    sums += (pid_b * HEADS + pid_h) * (2 * chunks * CHUNK) + first
    high, low = tl.load(sums + offs_m), tl.load(sums + chunks * CHUNK + offs_m)

    to = _load_rows(C + pid_b * stride_C_batch + group * D_STATE, first + offs_m, tokens, stride_C, offs_n, mask_n)
    before += ((pid_b * chunks + pid_c) * HEADS + pid_h) * (HEAD_DIM * D_STATE)
    mask = mask_n[:, None] & mask_p[None]
    state = tl.load(before + offs_p[None] * D_STATE + offs_n[:, None], mask, 0.0)
    acc = tl.dot(to, state, input_precision=PRECISION) * tl.exp(high + low)[:, None]

    scores += (((pid_b * chunks + pid_c) * GROUPS + group) * CHUNK + offs_m)[:, None] * CHUNK
    for start in range(0, (pid_m + 1) * BLOCK_M, BLOCK_M):
        at = start + offs_s
        source_high, source_low = tl.load(sums + at), tl.load(sums + chunks * CHUNK + at)
        log_decay = (high[:, None] - source_high[None]) + (low[:, None] - source_low[None])
        step = tl.load(dt + (pid_b * tokens + first + at) * HEADS + pid_h, first + at < tokens, 0.0)
        is_before = at[None] <= offs_m[:, None]
        weight = tl.load(scores + at[None]) * tl.exp(tl.minimum(log_decay, 0.0)) * step[None]
        values = _load_rows(x, first + at, tokens, stride_x, offs_p, mask_p)
        acc = tl.dot(tl.where(is_before, weight, 0.0), values, acc, input_precision=PRECISION)

    offs_t = first + offs_m
    own = _load_rows(x, offs_t, tokens, stride_x, offs_p, mask_p)
    acc += own * tl.load(D + pid_h).to(tl.float32)
    ptrs = y + ((pid_b * tokens + offs_t[:, None]) * HEADS + pid_h) * HEAD_DIM + offs_p[None]
    tl.store(ptrs, acc.to(y.dtype.element_ty), (offs_t < tokens)[:, None] & mask_p[None])
