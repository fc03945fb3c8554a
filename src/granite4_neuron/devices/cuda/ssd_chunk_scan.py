"""The Mamba-2 recurrence of prompts as matrix products, chunk by chunk (state space duality, SSD).

Chunks begin at multiples of the chunk's size, and states pass from one to the next in float32, in ascending order. So a
prompt that is cut there has the same bits: the same states pass between its pieces as between chunks. Later tokens add
only zeros to a token's sums. Kernels are compiled once for all numbers of tokens.

Source: Dao and Gu 2024, section 6; divided into the same parts as mamba_ssm's ssd_combined.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.products import (
    dot_of_weights,
    has_descriptors,
    in_two,
    input_precision,
    shared_memory,
)
from granite4_neuron.devices.cuda.time_step import time_step
from granite4_neuron.devices.cuda.triton_utils import LOG2_E, TensorDescriptor, entries_of_slots, tl, triton
from granite4_neuron.devices.graphs.mamba import CHUNK_SIZE
from granite4_neuron.ops.mamba_operators import chunked_scan

# Tokens whose outputs a program computes; fewer if a program has less shared memory.
_MOST_ROWS, _FEWER_ROWS, _SHARED_MEMORY = 64, 32, 160 * 1024
_BLOCK_H = 4
# Numbers of a head's state that a program passes on, and chunks that it reads at once.
_BLOCK_STATE, _CHUNKS_AHEAD = 512, 4
# Columns of a tile of x. NVIDIA's assembler of CUDA 12.8 may lose the addresses of narrower ones, which are not copied
# by descriptors: tensor cores then multiply other memory.
_LEAST_BLOCK_P, _LEAST_BLOCK_P_BY_DESCRIPTORS = 64, 32
_MOST_TOKENS = 2048  # at once, so that their states stay in a GPU's cache between two kernels


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
    states = initial_states.new_empty(initial_states.shape, dtype=torch.float32)
    inputs = ScanInputs(x, TimeSteps(dt, A), B, C, D)
    return launch_scan(inputs, initial_states.float().contiguous(), states, Rows()), states


register_launch(scan_chunks, _launch_scan_chunks)


class TimeSteps(NamedTuple):
    """What the time steps are made of.

    Args:
        dt: [batch, tokens, num_heads]: in float32, or with a bias the inputs of `time_step`.
        A: [num_heads], or with a bias its A_log.
        bias: [num_heads], or None.
        lowest, highest: limits, with a bias.
    """

    dt: torch.Tensor
    A: torch.Tensor
    bias: torch.Tensor | None = None
    lowest: float = 0.0
    highest: float = math.inf


class ScanInputs(NamedTuple):
    """Arguments of `scan_chunks`."""

    x: torch.Tensor
    steps: TimeSteps
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor

    def part(self, tokens: slice) -> ScanInputs:
        """Return those of some tokens."""
        x, steps, B, C, D = self
        return ScanInputs(x[:, tokens], steps._replace(dt=steps.dt[:, tokens]), B[:, tokens], C[:, tokens], D)


class Rows(NamedTuple):
    """Where rows' states are; None for row i in entry i, where no row begins.

    Args:
        starts: [batch], the positions of first tokens; rows with tokens begin at 0 without a state.
        lengths: [batch], how many tokens of a row are real; with a bias the steps of later ones are 0.
        slots: [batch], each row's entry of a state is slot - 1.
    """

    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    slots: torch.Tensor | None = None


def launch_scan(inputs: ScanInputs, initial_states: torch.Tensor, states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Compute `scan_chunks`; write the states after all tokens to `states`, which may be initial_states. Both are
    [.., num_heads, head_dim, d_state] in float32, and contiguous.
    """
    x, steps, B, C, D = inputs
    inputs = ScanInputs(_with_whole_tokens(x), steps, _with_whole_tokens(B), _with_whole_tokens(C), D)
    y = x.new_empty(x.shape)
    for first in range(0, x.shape[1], _MOST_TOKENS):
        part = slice(first, first + _MOST_TOKENS)
        _scan(inputs.part(part), initial_states, states, rows, first, y[:, part])
        initial_states, rows = states, rows._replace(starts=None)
    return y


def _scan(
    inputs: ScanInputs,
    initial_states: torch.Tensor,
    states: torch.Tensor,
    rows_of_states: Rows,
    first: int,
    y: torch.Tensor,
) -> None:
    """Compute `launch_scan` for tokens from the `first` one on. Each token of x, B, C and y is contiguous."""
    x, steps, B, C, D = inputs
    starts, lengths, slots = rows_of_states
    batch, tokens, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    size = min(CHUNK_SIZE, max(16, triton.next_power_of_2(tokens)))
    chunks = triton.cdiv(tokens, size)
    precision = input_precision("tf32x3")

    # Sums in float64, as two float32 numbers each, so that a difference of two sums has all digits of a float32.
    sums = torch.empty(batch, num_heads, 2, chunks * size, dtype=torch.float32, device=x.device)
    dt = sums.new_empty(batch, tokens, num_heads)
    _sum_decays_kernel[chunks, triton.cdiv(num_heads, _BLOCK_H), batch](
        *steps,
        lengths,
        dt,
        sums,
        tokens,
        first,
        chunks,
        *_strides(steps.dt),
        HEADS=num_heads,
        CHUNK=size,
        BLOCK_H=_BLOCK_H,
        num_warps=4,
    )

    block_n, block_p = (max(16, triton.next_power_of_2(each)) for each in (d_state, head_dim))
    rows = min(_MOST_ROWS if shared_memory(x) >= _SHARED_MEMORY else _FEWER_ROWS, size)
    scores = dt.new_empty(batch * chunks * n_groups, size, size)
    # States before each chunk: of bfloat16 models the two numbers of `in_two`.
    parts = 2 if x.dtype == torch.bfloat16 else 1
    before = x.new_empty(batch * chunks * num_heads * parts, head_dim, d_state)
    x_rows, B_rows, C_rows = (values.flatten(2) for values in (x, B, C))
    # A tile has all columns of a head or of a group, and no others.
    by_descriptors = (
        (block_p, block_n) == (head_dim, d_state)
        and head_dim >= _LEAST_BLOCK_P_BY_DESCRIPTORS
        and has_descriptors(x_rows, B_rows, C_rows, before, scores)
    )
    if not by_descriptors:
        block_p = max(block_p, _LEAST_BLOCK_P)

    def tiles(values: torch.Tensor, rows: int, columns: int) -> Any:
        return TensorDescriptor.from_tensor(values, [1, rows, columns]) if by_descriptors else values

    constants = {
        "HEADS": num_heads,
        "GROUPS": n_groups,
        "HEAD_DIM": head_dim,
        "D_STATE": d_state,
        "CHUNK": size,
        "BLOCK_P": block_p,
        "BLOCK_N": block_n,
        "BY_DESCRIPTORS": by_descriptors,
        "PRECISION": precision,
        "num_warps": 4,
    }
    _score_chunks_kernel[chunks * (size // rows), n_groups, batch](
        tiles(B_rows, size, block_n),
        tiles(C_rows, rows, block_n),
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
        BY_DESCRIPTORS=by_descriptors,
        PRECISION=precision,
        num_warps=4,
    )
    added = dt.new_empty(batch, chunks, num_heads, head_dim, d_state)
    _add_chunks_kernel[num_heads, chunks, batch](
        tiles(x_rows, size, block_p),
        dt,
        tiles(B_rows, size, block_n),
        sums,
        added,
        tokens,
        chunks,
        *_strides(x),
        *_strides(B),
        **constants,
    )
    numbers = head_dim * d_state
    _pass_states_kernel[triton.cdiv(numbers, _BLOCK_STATE), num_heads, batch](
        sums,
        initial_states,
        added,
        before,
        states,
        starts,
        lengths,
        slots,
        chunks,
        0 if starts is None else starts.stride(0),
        HEADS=num_heads,
        NUMBERS=numbers,
        CHUNK=size,
        PARTS=parts,
        BLOCK=_BLOCK_STATE,
        AHEAD=_CHUNKS_AHEAD,
        num_warps=4,
    )
    _scan_chunks_kernel[num_heads, chunks * (size // rows), batch](
        tiles(x_rows, rows, block_p),
        dt,
        tiles(C_rows, rows, block_n),
        D,
        sums,
        tiles(scores, rows, rows),
        tiles(before, block_p, block_n),
        y,
        tokens,
        chunks,
        *_strides(x),
        *_strides(C),
        y.stride(0),
        PARTS=parts,
        BLOCK_M=rows,
        num_stages=1,  # fastest on an H200
        **constants,
    )


def _with_whole_tokens(values: torch.Tensor) -> torch.Tensor:
    """Return values [batch, tokens, rows, columns] with each token contiguous."""
    return values if values.stride(3) == 1 and values.stride(2) == values.shape[3] else values.contiguous()


def _strides(values: torch.Tensor) -> tuple[int, int]:
    return values.stride(0), values.stride(1)


@triton.jit(do_not_specialize=["tokens", "first", "chunks"])
def _sum_decays_kernel(
    values,
    A,
    bias,
    lowest,
    highest,
    lengths,
    dt,
    sums,
    tokens,
    first,
    chunks,
    stride_batch,
    stride_token,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the binary logarithms of decays from a chunk's start up to each of its tokens, in float64.

    Grid: (chunks, cdiv(HEADS, BLOCK_H), batch).

    Args:
        values: [batch, tokens, HEADS], with their strides; these and the arguments up to `highest` are `TimeSteps`.
        lengths: [batch], integer, with a bias.
        dt: [batch, tokens, HEADS] in float32, the time steps.
        sums: [batch, HEADS, 2, chunks * CHUNK] in float32, the rounded sums, and the remainders.
        first: the number of the first token among those that lengths count.
    """
    pid_c, pid_b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    offs_t, offs_h = pid_c * CHUNK + tl.arange(0, CHUNK), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < HEADS
    mask = (offs_t < tokens)[:, None] & mask_h[None]
    step = tl.load(values + pid_b * stride_batch + offs_t[:, None] * stride_token + offs_h[None], mask, 0.0)
    step, rate = step.to(tl.float32), tl.load(A + offs_h, mask_h, 0.0).to(tl.float32)
    if bias is not None:
        step = time_step(step + tl.load(bias + offs_h, mask_h, 0.0).to(tl.float32)[None], lowest, highest)
        is_real = mask & (first + offs_t < tl.load(lengths + pid_b))[:, None]
        step, rate = tl.where(is_real, step, 0.0), -tl.exp(rate)
    tl.store(dt + (pid_b * tokens + offs_t[:, None]) * HEADS + offs_h[None], step, mask)
    log_decay = step * rate[None]
    total = tl.cumsum(log_decay.to(tl.float64), 0) * LOG2_E
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    ptrs = sums + (pid_b * HEADS + offs_h[None]) * (2 * chunks * CHUNK) + offs_t[:, None]
    tl.store(ptrs, high, mask_h[None])
    tl.store(ptrs + chunks * CHUNK, low, mask_h[None])


@triton.jit
def _load_tile(
    values,
    index,
    row,
    column,
    rows,
    stride,
    stride_row,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BY_DESCRIPTORS: tl.constexpr,
):
    """Load COLUMNS numbers of rows of a matrix, [BLOCK_R, BLOCK_C], with zeros after them and after the last row.

    Args:
        values: matrices [.., rows, ..] with their strides; with BY_DESCRIPTORS a descriptor, and COLUMNS is BLOCK_C.
        index, row, column: where the tile begins.
    """
    if BY_DESCRIPTORS:
        tile = values.load([index.to(tl.int32), row, column]).reshape([BLOCK_R, BLOCK_C])
    else:
        offs_r, offs_c = row + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
        ptrs = values + index * stride + offs_r[:, None] * stride_row + column + offs_c[None]
        tile = tl.load(ptrs, (offs_r < rows)[:, None] & (offs_c < COLUMNS)[None], 0.0)
    return tile


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
    BY_DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply C of BLOCK_M tokens with B of their chunk, once for all heads of a group.

    Grid: (chunks * CHUNK / BLOCK_M, groups, batch).

    Args:
        B, C: [batch, tokens, GROUPS * D_STATE], with their strides; with BY_DESCRIPTORS descriptors.
        scores: [batch * chunks * GROUPS, to CHUNK, from CHUNK] in float32.
    """
    pid_c, pid_m = tl.program_id(0) // (CHUNK // BLOCK_M), tl.program_id(0) % (CHUNK // BLOCK_M)
    pid_g, pid_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_m, offs_s = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, CHUNK)
    first, column = pid_c * CHUNK, pid_g * D_STATE
    strides_C, strides_B = (tokens, stride_C_batch, stride_C), (tokens, stride_B_batch, stride_B)
    row = first + pid_m * BLOCK_M
    to = _load_tile(C, pid_b, row, column, *strides_C, D_STATE, BLOCK_M, BLOCK_N, BY_DESCRIPTORS)
    source = _load_tile(B, pid_b, first, column, *strides_B, D_STATE, CHUNK, BLOCK_N, BY_DESCRIPTORS)
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
    BY_DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute what one chunk adds to a head's state.

    Grid: (HEADS, chunks, batch).

    Args:
        x: [batch, tokens, HEADS * HEAD_DIM]. B: [batch, tokens, GROUPS * D_STATE]; both with their strides; with
            BY_DESCRIPTORS descriptors.
        dt: [batch, tokens, HEADS] in float32.
        sums: as `_sum_decays_kernel` writes them.
        added: [batch, chunks, HEADS, HEAD_DIM, D_STATE] in float32.
    """
    pid_h, pid_c, pid_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_p, offs_n, offs_t = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), pid_c * CHUNK + tl.arange(0, CHUNK)
    group, first = pid_h // (HEADS // GROUPS), pid_c * CHUNK
    strides_x, strides_B = (tokens, stride_x_batch, stride_x), (tokens, stride_B_batch, stride_B)
    sums += (pid_b * HEADS + pid_h) * (2 * chunks * CHUNK)
    # All loads come before the first use of one.
    source = _load_tile(B, pid_b, first, group * D_STATE, *strides_B, D_STATE, CHUNK, BLOCK_N, BY_DESCRIPTORS)
    values = _load_tile(x, pid_b, first, pid_h * HEAD_DIM, *strides_x, HEAD_DIM, CHUNK, BLOCK_P, BY_DESCRIPTORS)
    step = tl.load(dt + (pid_b * tokens + offs_t) * HEADS + pid_h, offs_t < tokens, 0.0)
    last = sums + pid_c * CHUNK + CHUNK - 1
    high, low = tl.load(sums + offs_t), tl.load(sums + chunks * CHUNK + offs_t)
    weight = tl.exp2((tl.load(last) - high) + (tl.load(last + chunks * CHUNK) - low)) * step
    weighted = values.to(tl.float32) * weight[:, None]
    total = dot_of_weights(tl.trans(source), weighted, tl.zeros([BLOCK_N, BLOCK_P], tl.float32), PRECISION)
    at = added + ((pid_b * chunks + pid_c) * HEADS + pid_h) * (HEAD_DIM * D_STATE)
    mask = (offs_p < HEAD_DIM)[None] & (offs_n < D_STATE)[:, None]
    tl.store(at + offs_p[None] * D_STATE + offs_n[:, None], total, mask)


@triton.jit(do_not_specialize=["chunks", "stride_starts"])
def _pass_states_kernel(
    sums,
    initial_states,
    added,
    before,
    states,
    starts,
    lengths,
    slots,
    chunks,
    stride_starts,
    HEADS: tl.constexpr,
    NUMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Pass BLOCK numbers of a head's state from chunk to chunk; read those of AHEAD chunks at once.

    Grid: (cdiv(NUMBERS, BLOCK), HEADS, batch).

    Args:
        sums: as `_sum_decays_kernel` writes them.
        initial_states, states: [.., HEADS, NUMBERS] in float32, before and after all tokens; they may be one.
        added: [batch, chunks, HEADS, NUMBERS] in float32, what each chunk adds.
        before: [batch, chunks, HEADS, PARTS, NUMBERS], the state before each chunk: one number of float32, or two of
            bfloat16, see `in_two`.
        starts, lengths, slots: [batch], integer, starts with their stride; starts and slots may be None, see
            `Rows`.
    """
    pid_h, pid_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < NUMBERS
    head = pid_b * HEADS + pid_h
    last = sums + head * (2 * chunks * CHUNK) + CHUNK - 1
    at = (entries_of_slots(slots, pid_b, True) * HEADS + pid_h) * NUMBERS + offs
    has_state = mask
    if starts is not None:
        has_state &= (tl.load(starts + pid_b * stride_starts) > 0) | (tl.load(lengths + pid_b) == 0)
    state = tl.load(initial_states + at, has_state, 0.0)
    added += (pid_b * chunks * HEADS + pid_h) * NUMBERS + offs
    before += (pid_b * chunks * HEADS + pid_h) * (PARTS * NUMBERS) + offs
    for start in range(0, chunks, AHEAD):
        numbers, decays = (), ()
        for i in tl.static_range(AHEAD):
            is_there = start + i < chunks
            numbers += (tl.load(added + i * (HEADS * NUMBERS), mask & is_there, 0.0),)  # type: ignore[assignment]
            high = tl.load(last + i * CHUNK, is_there, 0.0)
            low = tl.load(last + (chunks + i) * CHUNK, is_there, 0.0)
            decays += (tl.exp2(high + low),)  # type: ignore[assignment]
        for i in tl.static_range(AHEAD):
            is_there = start + i < chunks
            ptrs = before + i * (HEADS * PARTS * NUMBERS)
            if PARTS == 1:
                tl.store(ptrs, state, mask & is_there)
            else:
                state_high, state_low = in_two(state)
                tl.store(ptrs, state_high, mask & is_there)
                tl.store(ptrs + NUMBERS, state_low, mask & is_there)
            following = tl.fma(state, tl.broadcast_to(decays[i], state.shape), numbers[i])
            state = tl.where(is_there, following, state)
        added += AHEAD * HEADS * NUMBERS
        before += AHEAD * HEADS * PARTS * NUMBERS
        last += AHEAD * CHUNK
    tl.store(states + at, state, mask)


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
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a head's outputs of BLOCK_M tokens, from the state before their chunk and from the chunk.

    Grid: (HEADS, chunks * CHUNK / BLOCK_M, batch).

    Args:
        x: [batch, tokens, HEADS * HEAD_DIM]. C: [batch, tokens, GROUPS * D_STATE]; both with their strides.
        dt: [batch, tokens, HEADS] in float32. D: [HEADS].
        sums: as `_sum_decays_kernel` writes them.
        scores: [batch * chunks * GROUPS, to CHUNK, from CHUNK] in float32.
        before: [batch * chunks * HEADS * PARTS, HEAD_DIM, D_STATE], as `_pass_states_kernel` writes it. With
            BY_DESCRIPTORS x, C, scores and before are descriptors.
        y: [batch, tokens, HEADS, HEAD_DIM], each sequence contiguous.
    """
    pid_h, pid_b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    pid_c, pid_m = tl.program_id(1) // (CHUNK // BLOCK_M), tl.program_id(1) % (CHUNK // BLOCK_M)
    first, row, column = pid_c * CHUNK, pid_m * BLOCK_M, pid_h * HEAD_DIM
    offs_s, offs_p = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P)
    offs_m = row + offs_s
    chunk, group = pid_b * chunks + pid_c, pid_h // (HEADS // GROUPS)
    state, score_of = (chunk * HEADS + pid_h) * PARTS, chunk * GROUPS + group
    strides_x, strides_C = (tokens, stride_x_batch, stride_x), (tokens, stride_C_batch, stride_C)
    sums += (pid_b * HEADS + pid_h) * (2 * chunks * CHUNK) + first
    dt += (pid_b * tokens + first) * HEADS + pid_h

    to = _load_tile(C, pid_b, first + row, group * D_STATE, *strides_C, D_STATE, BLOCK_M, BLOCK_N, BY_DESCRIPTORS)
    acc = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    for part in tl.static_range(PARTS):
        numbers = _load_tile(
            before, state + part, 0, 0, HEAD_DIM, HEAD_DIM * D_STATE, D_STATE, D_STATE, BLOCK_P, BLOCK_N, BY_DESCRIPTORS
        )
        acc = tl.dot(to, tl.trans(numbers), acc, input_precision=PRECISION)
    high, low = tl.load(sums + offs_m), tl.load(sums + chunks * CHUNK + offs_m)
    acc *= tl.exp2(high + low)[:, None]

    for start in range(0, row + BLOCK_M, BLOCK_M):
        at = start + offs_s
        values = _load_tile(x, pid_b, first + start, column, *strides_x, HEAD_DIM, BLOCK_M, BLOCK_P, BY_DESCRIPTORS)
        score = _load_tile(
            scores, score_of, row, start, CHUNK, CHUNK * CHUNK, CHUNK, BLOCK_M, BLOCK_M, BLOCK_M, BY_DESCRIPTORS
        )
        source_high, source_low = tl.load(sums + at), tl.load(sums + chunks * CHUNK + at)
        step = tl.load(dt + at * HEADS, first + at < tokens, 0.0)
        decay = tl.exp2((high[:, None] - source_high[None]) + (low[:, None] - source_low[None]))
        weight = tl.where(at[None] <= offs_m[:, None], score * decay * step[None], 0.0)
        acc = dot_of_weights(weight, values, acc, PRECISION)

    own = _load_tile(x, pid_b, first + row, column, *strides_x, HEAD_DIM, BLOCK_M, BLOCK_P, BY_DESCRIPTORS)
    acc += own.to(tl.float32) * tl.load(D + pid_h).to(tl.float32)
    offs_t = first + offs_m
    ptrs = y + pid_b * stride_y_batch + (offs_t[:, None] * HEADS + pid_h) * HEAD_DIM + offs_p[None]
    tl.store(ptrs, acc.to(y.dtype.element_ty), (offs_t < tokens)[:, None] & (offs_p < HEAD_DIM)[None])
