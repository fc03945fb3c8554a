"""A Mamba layer's mixer for one token per sequence, up to the output projection, as two operators.

With few sequences a step's time is proportional to the number of kernels. So there are few: the kernel that multiplies
for the mixer's inputs also computes the convolution after it and, for one sequence, the norm before it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.devices.cuda.gemm import gemm, gemm_config, gemm_grid, rms_norm_rows, rows_of_program
from granite4_neuron.devices.cuda.gemv import gemv_config, load_vector
from granite4_neuron.devices.cuda.launch import NUM_WARPS_SMALL, gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.mamba import (
    advance_token,
    convolve_channels,
    convolve_token,
    load_convolution,
    shift_window,
)
from granite4_neuron.devices.cuda.operator import operator, register_launch, register_launches
from granite4_neuron.devices.cuda.rounding import FEWEST_COLUMNS, round_state
from granite4_neuron.devices.cuda.sums import EXACT_PRODUCTS, sum_of_pairs
from granite4_neuron.devices.cuda.time_step import time_step
from granite4_neuron.devices.cuda.triton_utils import entries_of_slots, tl, triton
from granite4_neuron.devices.cuda.weights import dense, gemv, load_normed_factor, load_tile, prepare, stored
from granite4_neuron.ops import norm
from granite4_neuron.ops.stochastic_rounding import SHARED_ROWS, Rounding, stochastic_round

# Most rows of a head's state per program, and of a state that is rounded: more rows have fewer instructions each.
_BLOCK_D, _BLOCK_D_OF_ROUNDED = 16, 32
_ROWS = tl.constexpr(SHARED_ROWS)  # of a group, which a thread has together

# -- norm, projection and convolution


@operator(mutates=("conv_state",))
def mixer_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    """Normalise and project, then convolve the recurrence's inputs, and update conv_state in place.

    Args:
        x: [batch, columns], float32.
        norm_weight: [columns].
        weight: [d_inner + channels + num_heads, columns].
        conv_weight, conv_bias, conv_state, lengths: as `ops.causal_conv1d` takes them.
        slots: [batch], int32, all different: a row has entry slot - 1 of conv_state; None if row i has entry i.

    Returns:
        The gate, the convolution's outputs and dt before its bias: [batch, d_inner + channels + num_heads] in float32.
    """
    weight = dense(weight, scales, x.shape[1], norm_weight.dtype)
    projected = F.linear(norm.rms_norm(x, norm_weight, eps), weight)
    channels = conv_state.shape[1]
    gate, xBC, dt = projected.split([len(weight) - channels - num_heads, channels, num_heads], 1)
    windows = rows_of_slots(conv_state, slots)
    convolved = convolve_token(xBC[:, None], windows, conv_weight, conv_bias, lengths)[:, 0]
    write_rows_of_slots(conv_state, slots, windows)
    return torch.cat([gate.float(), convolved, dt.float()], 1)


def rows_of_slots(state: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """Return the entries of a state that rows have, slots as for `mixer_inputs`; without slots the state itself."""
    return state if slots is None else state[slots - 1]


def write_rows_of_slots(state: torch.Tensor, slots: torch.Tensor | None, rows: torch.Tensor) -> None:
    """Write back what `rows_of_slots` has returned."""
    if slots is not None:
        state[slots - 1] = rows


@mixer_inputs.register_fake
def _(x, norm_weight, weight, *others, **constants):
    return x.new_empty(len(x), len(weight))


def _launch_mixer_inputs(
    one_row: bool,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    (batch, columns), rows, (channels, d_conv) = x.shape, len(weight), conv_weight.shape
    matrix = stored(weight, scales)
    y = x.new_empty(batch, rows)
    convolution = conv_weight, conv_bias, conv_state, lengths
    channels_of_outputs = dict(FIRST_CHANNEL=rows - channels - num_heads, CHANNELS=channels, D_CONV=d_conv)
    if one_row:
        block_k = triton.next_power_of_2(columns)
        block_n, num_tiles, num_warps = gemv_config(rows, block_k, dtype=weight.dtype)
        _mixer_inputs_of_one_kernel[triton.cdiv(rows, block_n * num_tiles),](
            prepare(x, norm_weight, eps, weight, scales),
            norm_weight,
            matrix,
            *convolution,
            y,
            eps,
            N=rows,
            K=columns,
            # One element per thread; otherwise every thread would do the work of all.
            BLOCK_W=max(triton.next_power_of_2(d_conv), 32 * num_warps // block_n),
            BLOCK_N=block_n,
            NUM_TILES=num_tiles,
            BLOCK_K=block_k,
            **channels_of_outputs,
            **launch_options(x, num_warps),
        )
    else:
        normed = rms_norm_rows(x, norm_weight, eps)
        options = gemm_config(normed, rows)
        _mixer_inputs_kernel[gemm_grid(batch, triton.cdiv(rows, options["BLOCK_N"]))](
            normed,
            matrix,
            *convolution,
            slots,
            y,
            N=rows,
            **channels_of_outputs,
            **options,
        )
    return y


mixer_inputs_of_one = register_launches(mixer_inputs, _launch_mixer_inputs)


@triton.jit
def _mixer_inputs_of_one_kernel(
    x,
    norm_weight,
    weight,
    conv_weight,
    conv_bias,
    conv_state,
    lengths,
    y,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    FIRST_CHANNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    D_CONV: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute NUM_TILES * BLOCK_N outputs of one sequence. CHANNELS outputs from FIRST_CHANNEL on are convolved.

    Grid: (cdiv(N, NUM_TILES * BLOCK_N),).

    Args:
        x: [K] in float32, before its norm, or as `weights.prepare` returns it.
        norm_weight: [K].
        weight: [N, K], `weights.stored`.
        conv_weight: [CHANNELS, D_CONV]. conv_bias: [CHANNELS], or None.
        conv_state: [CHANNELS, D_CONV - 1]; unchanged if lengths is 0.
        lengths: [1] int32.
        y: [N] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(0) * (BLOCK_N * NUM_TILES) + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    tile = load_tile(weight, offs_n, N, offs_k, K)
    norm_weights = load_vector(norm_weight, offs_k, K)
    is_real = tl.load(lengths) > 0
    for i in tl.static_range(NUM_TILES):
        offs_c = offs_n - FIRST_CHANNEL
        mask_c = (offs_c >= 0) & (offs_c < CHANNELS)
        window, shifted, weights, biases = load_convolution(
            conv_state, conv_weight, conv_bias, offs_c, mask_c, D_CONV, BLOCK_W
        )
        if i == 0:
            gdc_wait(USE_GDC)
            factor = load_normed_factor(x, norm_weights, eps, weight, offs_k, K)
        next_tile = tile
        if i + 1 < NUM_TILES:
            next_tile = load_tile(weight, offs_n + BLOCK_N, N, offs_k, K)  # while this one is multiplied
        projected = gemv(tile, factor, USE_GDC).to(norm_weight.dtype.element_ty)
        convolved = convolve_channels(projected, window, weights, biases, D_CONV, BLOCK_W)
        tl.store(y + offs_n, tl.where(mask_c, convolved, projected.to(tl.float32)), offs_n < N)
        shift_window(conv_state, projected, shifted, offs_c, mask_c & is_real, D_CONV, BLOCK_W)
        tile, offs_n = next_tile, offs_n + BLOCK_N


@triton.jit
def _mixer_inputs_kernel(
    x,
    weight,
    conv_weight,
    conv_bias,
    conv_state,
    lengths,
    slots,
    y,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FIRST_CHANNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    D_CONV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M of M sequences. CHANNELS outputs from FIRST_CHANNEL on are convolved.

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)).

    Args:
        x: [M, K], normalised.
        weight: [N, K], `weights.stored`.
        conv_weight: [CHANNELS, D_CONV]. conv_bias: [CHANNELS], or None.
        conv_state: [sequences, CHANNELS, D_CONV - 1]; unchanged where lengths is 0.
        lengths: [M] int32.
        slots: [M] int32, each row's entry of conv_state is slot - 1; None if row i has entry i.
        y: [M, N] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = rows_of_program(M, BLOCK_M)
    mask_m = offs_m < M
    offs_c = offs_n - FIRST_CHANNEL
    mask_c = (offs_c >= 0) & (offs_c < CHANNELS)
    mask_cm = mask_c[:, None] & mask_m[None]
    entries = entries_of_slots(slots, offs_m, mask_m)
    window = conv_state + (entries[None] * CHANNELS + offs_c[:, None]) * (D_CONV - 1)
    taps = conv_weight + offs_c * D_CONV
    convolved = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if conv_bias is not None:
        convolved += tl.load(conv_bias + offs_c, mask_c, 0.0).to(tl.float32)[:, None]
    for w in tl.static_range(D_CONV - 1):
        convolved = _add_tap(convolved, tl.load(window + w, mask_cm, 0.0), taps + w, mask_c)
    is_real = tl.load(lengths + offs_m, mask_m, 0) > 0
    gdc_wait(USE_GDC)

    projected = gemm(weight, offs_n, N, x, offs_m, mask_m, K, BLOCK_K).to(x.dtype.element_ty)
    convolved = _add_tap(convolved, projected, taps + (D_CONV - 1), mask_c)
    outputs = tl.where(mask_c[:, None], convolved * tl.sigmoid(convolved), projected.to(tl.float32))
    tl.store(y + offs_m[None] * N + offs_n[:, None], outputs, (offs_n < N)[:, None] & mask_m[None])
    for w in tl.static_range(D_CONV - 1):
        value = projected
        if w < D_CONV - 2:
            value = tl.load(window + w + 1, mask_cm, 0.0)
        tl.debug_barrier()  # a thread may read a value that another thread overwrites
        tl.store(window + w, value, mask_cm & is_real[None])


@triton.jit
def _add_tap(total, values, weight, mask_c):
    """Add values [BLOCK_N, BLOCK_M], multiplied by their channels' weights, to a total."""
    # Not a sum of products: which of two products the compiler rounds could differ from sequence to sequence.
    factors = tl.load(weight, mask_c, 0.0).to(tl.float32)[:, None]
    values = values.to(tl.float32)
    return tl.fma(values, tl.broadcast_to(factors, values.shape), total)


# -- recurrence and gate


@operator(mutates=("ssm_state",))
def advance_mixer(
    inputs: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
    slots: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    stream: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `ops.selective_state_step` and the gate, and update ssm_state in place.

    Args:
        inputs: from `mixer_inputs`.
        dt_bias, A_log, D: [num_heads].
        ssm_state: [sequences, num_heads, head_dim, d_state], float32, or 16 bits with a stream.
        lengths: [batch]; where it is 0 the state is unchanged and the result unspecified.
        slots: as for `mixer_inputs`.
        positions: [batch], int32, of the tokens; needed with a stream.
        stream: for `ops.stochastic_round`, an integer without axes; None for a state that is not rounded.

    Returns:
        y * silu(gate), [batch, num_heads * head_dim] in float32.
    """
    num_heads, head_dim, d_state = ssm_state.shape[1:]
    d_inner = num_heads * head_dim
    group_width = (inputs.shape[1] - 2 * d_inner - num_heads) // 2
    gate, x, B, C, dt = inputs.split([d_inner, d_inner, group_width, group_width, num_heads], 1)
    dt = F.softplus(dt + dt_bias.float()).clamp(lowest_dt, highest_dt).masked_fill((lengths == 0)[:, None], 0.0)
    B, C = (values.unflatten(1, (-1, d_state)) for values in (B, C))
    log_decay = dt * -torch.exp(A_log.float())
    states = rows_of_slots(ssm_state, slots)
    exact = states.float()
    y = advance_token(x.unflatten(1, (num_heads, head_dim)), dt, log_decay, B, C, D, exact)
    if stream is not None:
        assert positions is not None
        rounded = stochastic_round(exact, states.dtype, positions.long(), Rounding(stream=stream))
        states.copy_(rounded.where((lengths > 0)[:, None, None, None], states))
    write_rows_of_slots(ssm_state, slots, states)
    return y.flatten(1) * F.silu(gate)


@advance_mixer.register_fake
def _(inputs, dt_bias, A_log, D, ssm_state, *others):
    return inputs.new_empty(len(inputs), ssm_state.shape[1] * ssm_state.shape[2])


def _launch_advance_mixer(
    inputs: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
    slots: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    stream: torch.Tensor | None = None,
) -> torch.Tensor:
    y = inputs.new_empty(len(inputs), ssm_state.shape[1] * ssm_state.shape[2])
    launch_recurrence(
        inputs,
        dt_bias,
        A_log,
        D,
        ssm_state,
        positions,
        lengths,
        y,
        slots=slots,
        stream=stream,
        limits=(lowest_dt, highest_dt),
        are_begun=True,
        writes_state=True,
    )
    return y


register_launch(advance_mixer, _launch_advance_mixer)


def launch_recurrence(
    inputs: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    starts: torch.Tensor | None,
    lengths: torch.Tensor,
    y: torch.Tensor | None,
    *,
    slots: torch.Tensor | None,
    stream: torch.Tensor | None,
    limits: tuple[float, float],
    are_begun: bool,
    writes_state: bool,
) -> None:
    """Launch `_recurrence_kernel`, which documents the arguments, for as many tokens of each sequence as `inputs` has.

    Args:
        inputs: [batch * tokens, columns].
    """
    batch, (num_heads, head_dim, d_state) = len(lengths), ssm_state.shape[1:]
    d_inner = num_heads * head_dim
    group_columns = inputs.shape[1] - (d_inner if y is None else 2 * d_inner) - num_heads
    most_d = _BLOCK_D if stream is None else _BLOCK_D_OF_ROUNDED
    block_d = max(SHARED_ROWS, min(most_d, triton.next_power_of_2(head_dim)))
    block_dstate = triton.next_power_of_2(d_state)
    if stream is not None:
        block_dstate = max(block_dstate, FEWEST_COLUMNS)
    _recurrence_kernel[num_heads, triton.cdiv(head_dim, block_d), batch](
        inputs,
        dt_bias,
        A_log,
        D,
        ssm_state,
        starts,
        0 if starts is None else starts.stride(0),
        lengths,
        lengths.stride(0),
        slots,
        0 if slots is None else slots.stride(0),
        stream,
        y,
        *limits,
        len(inputs) // batch,
        NUM_HEADS=num_heads,
        HEADS_PER_GROUP=num_heads // (group_columns // (2 * d_state)),
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        BLOCK_D=block_d,
        BLOCK_DSTATE=block_dstate,
        ARE_BEGUN=are_begun,
        WRITES_STATE=writes_state,
        **launch_options(inputs, NUM_WARPS_SMALL),
        **EXACT_PRODUCTS,
    )


@triton.jit
def _recurrence_kernel(
    inputs,
    dt_bias,
    A_log,
    D,
    ssm_state,
    starts,
    stride_starts,
    lengths,
    stride_lengths,
    slots,
    stride_slots,
    stream,
    y,
    lowest_dt,
    highest_dt,
    tokens,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    ARE_BEGUN: tl.constexpr,
    WRITES_STATE: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Advance BLOCK_D rows of one head's state, token by token.

    Grid: (NUM_HEADS, cdiv(HEAD_DIM, BLOCK_D), batch).

    Args:
        inputs: [batch * tokens, D_INNER + D_INNER + groups * D_STATE + groups * D_STATE + NUM_HEADS] in float32: gate,
            x, B, C and dt; without y there is no gate.
        dt_bias, A_log, D: [NUM_HEADS].
        ssm_state: [sequences, NUM_HEADS, HEAD_DIM, D_STATE] in float32; with a stream in 16 bits.
        starts: [batch] int32, with its stride, the position of each sequence's first token; where it is 0 the sequence
            starts from zeros, unless ARE_BEGUN. None if neither this nor the rounding needs it.
        lengths: [batch] int32, with its stride: how many of a sequence's tokens are real, its first ones.
        slots: [batch] int32, with its stride: a row's entry of ssm_state is slot - 1; None if row i has entry i.
        stream: of the state's rounding, an integer; None if it is not rounded.
        y: [batch * tokens, D_INNER] in float32; unspecified where a token is not real. None if it is not wanted.
        tokens: per sequence. If the state is written, y may be wanted for at most one token.
        WRITES_STATE: whether the state is written, with the real tokens of each sequence.
    """
    gdc_launch_dependents(USE_GDC)
    pid_b, pid_h = tl.program_id(2).to(tl.int64), tl.program_id(0)
    D_INNER: tl.constexpr = NUM_HEADS * HEAD_DIM
    GROUP_WIDTH: tl.constexpr = NUM_HEADS // HEADS_PER_GROUP * D_STATE
    COLUMNS: tl.constexpr = (D_INNER if y is None else 2 * D_INNER) + 2 * GROUP_WIDTH + NUM_HEADS
    # A state is [groups, rows of a group, columns].
    GROUPS: tl.constexpr = BLOCK_D // _ROWS
    DTYPE: tl.constexpr = ssm_state.dtype.element_ty
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, GROUPS)[:, None] * _ROWS + tl.arange(0, _ROWS)[None]
    offs_n = tl.arange(0, BLOCK_DSTATE)
    mask_d, mask_n = offs_d < HEAD_DIM, offs_n < D_STATE
    offs_inner = pid_h * HEAD_DIM + offs_d
    offs = offs_inner[:, :, None] * D_STATE + offs_n[None, None]
    length = tl.load(lengths + pid_b * stride_lengths)
    # An idle sequence's state is neither read nor written.
    mask = mask_d[:, :, None] & mask_n[None, None] & (length > 0)
    has_state = mask
    if not ARE_BEGUN:
        gdc_wait(USE_GDC)
        has_state = mask & (tl.load(starts + pid_b * stride_starts) > 0)
    entry = pid_b
    if slots is not None:
        entry = tl.load(slots + pid_b * stride_slots).to(tl.int64) - 1
    ssm_state += entry * D_INNER * D_STATE
    # A written state is not needed again before the other layers' states, so weights and activations stay in the cache.
    EVICTION: tl.constexpr = "evict_first" if WRITES_STATE else ""
    state = tl.load(ssm_state + offs, has_state, 0.0, eviction_policy=EVICTION).to(tl.float32)
    bias, A = tl.load(dt_bias + pid_h).to(tl.float32), -tl.exp(tl.load(A_log + pid_h).to(tl.float32))
    skip = tl.load(D + pid_h).to(tl.float32)
    offs_group = (pid_h // HEADS_PER_GROUP) * D_STATE + offs_n
    if ARE_BEGUN:
        gdc_wait(USE_GDC)

    count = length if y is None else tokens
    for token in range(0, count):
        row = pid_b * tokens + token
        ptrs = inputs + row * COLUMNS
        if y is not None:
            gate = tl.load(ptrs + offs_inner, mask_d, 0.0)
            ptrs += D_INNER
        x = tl.load(ptrs + offs_inner, mask_d, 0.0)
        ptrs += D_INNER
        b = tl.load(ptrs + offs_group, mask_n, 0.0)
        c = tl.load(ptrs + GROUP_WIDTH + offs_group, mask_n, 0.0)
        dt = time_step(tl.load(ptrs + 2 * GROUP_WIDTH + pid_h) + bias, lowest_dt, highest_dt)
        state = state * tl.exp(dt * A) + (dt * x)[:, :, None] * b[None, None]
        if y is not None:
            sums = sum_of_pairs(tl.reshape(state * c[None, None], [BLOCK_D, BLOCK_DSTATE]))
            outputs = (tl.reshape(sums, [GROUPS, _ROWS]) + x * skip) * gate * tl.sigmoid(gate)
            tl.store(y + row * D_INNER + offs_inner, outputs, mask_d)
        if stream is not None and token + 1 < count:
            position = tl.load(starts + pid_b * stride_starts) + token
            state = round_state(state, pid_h, tl.program_id(1), position, tl.load(stream), HEAD_DIM, D_STATE, DTYPE)
            state = state.to(tl.float32)
    if WRITES_STATE:
        if stream is not None:
            position = tl.load(starts + pid_b * stride_starts) + count - 1
            state = round_state(state, pid_h, tl.program_id(1), position, tl.load(stream), HEAD_DIM, D_STATE, DTYPE)
        tl.store(ssm_state + offs, state.to(DTYPE), mask, eviction_policy=EVICTION)
