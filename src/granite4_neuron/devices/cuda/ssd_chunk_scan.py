"""The Mamba-2 recurrence of prompts as matrix products, chunk by chunk (state space duality, SSD).

Chunks begin at multiples of the chunk's size, and states pass from one to the next in float32, in ascending order. So a
prompt that is cut there has the same bits: the same states pass between its pieces as between chunks. Later tokens add
only zeros to a token's sums. Kernels are compiled once for all numbers of tokens.

Source: Dao and Gu 2024, section 6; divided into the same parts as mamba_ssm's ssd_combined.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.products import dot_of_weights, input_precision, shared_memory
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.graphs.mamba import CHUNK_SIZE
from granite4_neuron.ops.mamba_operators import chunked_scan

# Tokens whose outputs a program computes; fewer if a program has less shared memory.
_MOST_ROWS, _FEWER_ROWS, _SHARED_MEMORY = 64, 32, 160 * 1024
_BLOCK_H = 4
# Columns of a tile of x. NVIDIA's assembler of CUDA 12.8 may lose the addresses of narrower ones: tensor cores then
# multiply other memory. It does not where a chunk's outputs are computed with states of 128 numbers and more.
_LEAST_BLOCK_P, _NARROW_BLOCK_P, _STATE_OF_NARROW_BLOCK = 64, 32, 128
_BLOCK_STATE = 1024  # numbers of a head's state that a program passes on
_MOST_TOKENS = 2048  # at once, so that their states stay in a GPU's cache between two kernels
_CHUNKS_AHEAD = 8


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
    x, B, C = (_with_whole_tokens(values) for values in (x, B, C))
    y, states = x.new_empty(x.shape), initial_states.float().contiguous()
    for start in range(0, x.shape[1], _MOST_TOKENS):
        part = slice(start, start + _MOST_TOKENS)
        states = _scan(x[:, part], dt[:, part].contiguous(), A, B[:, part], C[:, part], D, states, y[:, part])
    return y, states


register_launch(scan_chunks, _launch_scan_chunks)


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_states: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Write the outputs to y; return the states after all tokens. Each token of x, B, C and y is contiguous."""
    batch, tokens, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    size = min(CHUNK_SIZE, max(16, triton.next_power_of_2(tokens)))
    chunks = triton.cdiv(tokens, size)
    constants = {"HEADS": num_heads, "GROUPS": n_groups, "D_STATE": d_state, "CHUNK": size}
    precision = input_precision("tf32x3")

    # Sums in float64, as two float32 numbers each, so that a difference of two sums has all digits of a float32.
    sums = dt.new_empty(batch, num_heads, 2, chunks * size)
    _sum_decays_kernel[chunks, triton.cdiv(num_heads, _BLOCK_H), batch](
        dt, A, sums, tokens, chunks, HEADS=num_heads, CHUNK=size, BLOCK_H=_BLOCK_H, num_warps=4
    )

    block_n = max(16, triton.next_power_of_2(d_state))
    columns = triton.next_power_of_2(head_dim)
    block_p = max(_LEAST_BLOCK_P, columns)
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

    # What each chunk adds to the state; then, in its place, the state before the chunk.
    before = dt.new_empty(batch, chunks, num_heads, head_dim, d_state)
    _add_chunks_kernel[num_heads, chunks, batch](
        x,
        dt,
        B,
        sums,
        before,
        tokens,
        chunks,
        *_strides(x),
        *_strides(B),
        HEAD_DIM=head_dim,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        PRECISION=precision,
        num_warps=4,
        **constants,
    )
    states = dt.new_empty(initial_states.shape)
    numbers = head_dim * d_state
    _pass_states_kernel[triton.cdiv(numbers, _BLOCK_STATE), num_heads, batch](
        sums,
        initial_states,
        before,
        states,
        chunks,
        HEADS=num_heads,
        NUMBERS=numbers,
        CHUNK=size,
        BLOCK=_BLOCK_STATE,
        AHEAD=_CHUNKS_AHEAD,
        num_warps=4,
    )

    _scan_chunks_kernel[num_heads, chunks * (size // rows), batch](
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
        y.stride(0),
        HEAD_DIM=head_dim,
        BLOCK_M=rows,
        BLOCK_P=max(_NARROW_BLOCK_P, columns) if block_n >= _STATE_OF_NARROW_BLOCK else block_p,
        BLOCK_N=block_n,
        PRECISION=precision,
        num_warps=4,
        num_stages=1,  # fastest on an H200
        **constants,
    )
    return states


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
    """Load some numbers of tokens, [rows, columns]."""
    return tl.load(values + offs_t[:, None] * stride + offs[None], (offs_t < tokens)[:, None] & mask[None], 0.0)


@triton.jit(do_not_specialize=["tokens", "chunks"])
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


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _add_chunks_kernel(
    x,
    dt,
    B,
    sums,
    added,
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
    """Compute what one chunk adds to a head's state.

    Grid: (HEADS, chunks, batch).

    Args:
        x: [batch, tokens, HEADS, HEAD_DIM]. B: [batch, tokens, GROUPS, D_STATE]; both with their strides.
        dt: [batch, tokens, HEADS] in float32.
        sums: as `_sum_decays_kernel` writes them.
        added: [batch, chunks, HEADS, HEAD_DIM, D_STATE] in float32.
    """
    pid_h, pid_c, pid_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_p, offs_n, offs_t = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), pid_c * CHUNK + tl.arange(0, CHUNK)
    mask_p, mask_n, mask_t = offs_p < HEAD_DIM, offs_n < D_STATE, offs_t < tokens
    x += pid_b * stride_x_batch + pid_h * HEAD_DIM
    B += pid_b * stride_B_batch + pid_h // (HEADS // GROUPS) * D_STATE
    sums += (pid_b * HEADS + pid_h) * (2 * chunks * CHUNK)
    # All loads come before the first use of one.
    source = _load_rows(B, offs_t, tokens, stride_B, offs_n, mask_n)
    values = _load_rows(x, offs_t, tokens, stride_x, offs_p, mask_p)
    step = tl.load(dt + (pid_b * tokens + offs_t) * HEADS + pid_h, mask_t, 0.0)
    last = sums + pid_c * CHUNK + CHUNK - 1
    high, low = tl.load(sums + offs_t), tl.load(sums + chunks * CHUNK + offs_t)
    weight = tl.exp((tl.load(last) - high) + (tl.load(last + chunks * CHUNK) - low)) * step
    weighted = values.to(tl.float32) * weight[:, None]
    total = dot_of_weights(tl.trans(source), weighted, tl.zeros([BLOCK_N, BLOCK_P], tl.float32), PRECISION)
    at = added + ((pid_b * chunks + pid_c) * HEADS + pid_h) * (HEAD_DIM * D_STATE)
    tl.store(at + offs_p[None] * D_STATE + offs_n[:, None], total, mask_p[None] & mask_n[:, None])


@triton.jit(do_not_specialize=["chunks"])
def _pass_states_kernel(
    sums,
    initial_states,
    passed,
    states,
    chunks,
    HEADS: tl.constexpr,
    NUMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Pass BLOCK numbers of a head's state from chunk to chunk; read those of AHEAD chunks at once.

    Grid: (cdiv(NUMBERS, BLOCK), HEADS, batch).

    Args:
        sums: as `_sum_decays_kernel` writes them.
        initial_states, states: [batch, HEADS, NUMBERS] in float32, before and after all tokens.
        passed: [batch, chunks, HEADS, NUMBERS] in float32: what each chunk adds, replaced by the state before it.
    """
    pid_h, pid_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < NUMBERS
    head = pid_b * HEADS + pid_h
    last = sums + head * (2 * chunks * CHUNK) + CHUNK - 1
    state = tl.load(initial_states + head * NUMBERS + offs, mask, 0.0)
    passed += (pid_b * chunks * HEADS + pid_h) * NUMBERS + offs
    for start in range(0, chunks, AHEAD):
        added, decays = (), ()
        for i in tl.static_range(AHEAD):
            is_there = start + i < chunks
            added += (tl.load(passed + i * (HEADS * NUMBERS), mask & is_there, 0.0),)  # type: ignore[assignment]
            high = tl.load(last + i * CHUNK, is_there, 0.0)
            low = tl.load(last + (chunks + i) * CHUNK, is_there, 0.0)
            decays += (tl.exp(high + low),)  # type: ignore[assignment]
        for i in tl.static_range(AHEAD):
            is_there = start + i < chunks
            tl.store(passed + i * (HEADS * NUMBERS), state, mask & is_there)
            following = tl.fma(state, tl.broadcast_to(decays[i], state.shape), added[i])
            state = tl.where(is_there, following, state)
        passed += AHEAD * HEADS * NUMBERS
        last += AHEAD * CHUNK
    tl.store(states + head * NUMBERS + offs, state, mask)


@triton.jit(do_not_specialize=["tokens", "chunks"])
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
    stride_y_batch,
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

    Grid: (HEADS, chunks * CHUNK / BLOCK_M, batch).

    Args:
        x: [batch, tokens, HEADS, HEAD_DIM]. C: [batch, tokens, GROUPS, D_STATE]; both with their strides.
        dt: [batch, tokens, HEADS] in float32. D: [HEADS].
        sums, scores, before: as the other kernels write them.
        y: [batch, tokens, HEADS, HEAD_DIM], each sequence contiguous.
    """
    pid_h, pid_b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    pid_c, pid_m = tl.program_id(1) // (CHUNK // BLOCK_M), tl.program_id(1) % (CHUNK // BLOCK_M)
    group = pid_h // (HEADS // GROUPS)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_p, offs_n, offs_s = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    mask_p, mask_n, first = offs_p < HEAD_DIM, offs_n < D_STATE, pid_c * CHUNK
    x += pid_b * stride_x_batch + pid_h * HEAD_DIM
    sums += (pid_b * HEADS + pid_h) * (2 * chunks * CHUNK) + first

    to = _load_rows(C + pid_b * stride_C_batch + group * D_STATE, first + offs_m, tokens, stride_C, offs_n, mask_n)
    before += ((pid_b * chunks + pid_c) * HEADS + pid_h) * (HEAD_DIM * D_STATE)
    mask = mask_n[:, None] & mask_p[None]
    state = tl.load(before + offs_p[None] * D_STATE + offs_n[:, None], mask, 0.0)
    high, low = tl.load(sums + offs_m), tl.load(sums + chunks * CHUNK + offs_m)
    acc = tl.dot(to.to(tl.float32), state, input_precision=PRECISION) * tl.exp(high + low)[:, None]

    scores += (((pid_b * chunks + pid_c) * GROUPS + group) * CHUNK + offs_m)[:, None] * CHUNK
    for start in range(0, (pid_m + 1) * BLOCK_M, BLOCK_M):
        at = start + offs_s
        values = _load_rows(x, first + at, tokens, stride_x, offs_p, mask_p)
        score = tl.load(scores + at[None])
        source_high, source_low = tl.load(sums + at), tl.load(sums + chunks * CHUNK + at)
        step = tl.load(dt + (pid_b * tokens + first + at) * HEADS + pid_h, first + at < tokens, 0.0)
        log_decay = (high[:, None] - source_high[None]) + (low[:, None] - source_low[None])
        is_before = at[None] <= offs_m[:, None]
        weight = score * tl.exp(tl.minimum(log_decay, 0.0)) * step[None]
        acc = dot_of_weights(tl.where(is_before, weight, 0.0), values, acc, PRECISION)

    offs_t = first + offs_m
    own = _load_rows(x, offs_t, tokens, stride_x, offs_p, mask_p).to(tl.float32)
    acc += own * tl.load(D + pid_h).to(tl.float32)
    ptrs = y + pid_b * stride_y_batch + (offs_t[:, None] * HEADS + pid_h) * HEAD_DIM + offs_p[None]
    tl.store(ptrs, acc.to(y.dtype.element_ty), (offs_t < tokens)[:, None] & mask_p[None])
