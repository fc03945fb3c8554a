"""A Mamba layer's mixer for several tokens per sequence that may be rejected, each with the same bits as in decode.

Products have a row per token. Convolution and recurrence go from token to token, as in decode. Verification starts from
the present state and does not write it; the accepted tokens then start from the same state and write it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.devices.cuda.gemm import multiply, rms_norm_rows
from granite4_neuron.devices.cuda.launch import NUM_WARPS_SMALL, gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.mamba import convolve_token
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.sums import EXACT_PRODUCTS
from granite4_neuron.devices.cuda.token_mixer import (
    advance_mixer,
    launch_recurrence,
    rows_of_slots,
    write_rows_of_slots,
)
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.cuda.weights import dense
from granite4_neuron.ops import norm

# Channels per program of the convolution.
_BLOCK_C = 128

# -- norm and projection


@operator()
def project(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise x, [rows, columns] in float32, and project with a weight [outputs, columns]: [rows, outputs]."""
    return F.linear(norm.rms_norm(x, norm_weight, eps), dense(weight, scales, x.shape[1], norm_weight.dtype))


@project.register_fake
def _(x, norm_weight, weight, *others):
    return norm_weight.new_empty(len(x), len(weight))


def _launch_project(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    y = norm_weight.new_empty(len(x), len(weight))
    return multiply(rms_norm_rows(x, norm_weight, eps), weight, scales, y)


register_launch(project, _launch_project)

# -- convolution


@operator()
def convolve_verified(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    starts: torch.Tensor,
    num_heads: int,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the results of `mixer_inputs` for one token after another.

    Args:
        projected: [batch, tokens, d_inner + channels + num_heads]: the gate, the convolution's inputs, and dt.
        conv_weight, conv_bias, conv_state: as `ops.causal_conv1d` takes them; conv_state is unchanged.
        starts: [batch], int32, the position of each sequence's first token; at 0 its window is zeros.
        slots: as for `mixer_inputs`.

    Returns:
        [batch * tokens, d_inner + channels + num_heads] in float32.
    """
    return _convolved(
        projected, conv_weight, conv_bias, _begun(rows_of_slots(conv_state, slots), starts), num_heads
    ).flatten(0, 1)


@convolve_verified.register_fake
def _(projected, *others):
    return projected.new_empty(projected[..., 0].numel(), projected.shape[2], dtype=torch.float32)


def _begun(state: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return a copy of a state with zeros for sequences that start from zeros."""
    return torch.where((starts > 0).view(-1, *[1] * (state.dim() - 1)), state, 0.0)


def _convolved(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    num_heads: int,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve the convolution's inputs in float32, and write conv_state. lengths: of real tokens; None for all."""
    batch, tokens, columns = projected.shape
    channels = conv_state.shape[1]
    before, inner, after = projected.split([columns - channels - num_heads, channels, num_heads], 2)
    lengths = torch.full((batch,), tokens, device=projected.device) if lengths is None else lengths
    outputs = [
        convolve_token(inner[:, token, None], conv_state, conv_weight, conv_bias, (lengths > token).int())
        for token in range(tokens)
    ]
    return torch.cat([before.float(), torch.cat(outputs, 1), after.float()], 2)


def _launch_convolve_verified(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    starts: torch.Tensor,
    num_heads: int,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    return _launch_convolution(projected, conv_weight, conv_bias, conv_state, starts, None, slots, num_heads)


def _launch_convolution(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor | None,
    slots: torch.Tensor | None,
    num_heads: int,
) -> torch.Tensor:
    (batch, tokens, columns), (channels, d_conv) = projected.shape, conv_weight.shape
    y = projected.new_empty(batch * tokens, columns, dtype=torch.float32)
    _convolution_kernel[triton.cdiv(columns, _BLOCK_C), batch](
        projected.contiguous(),
        conv_weight,
        conv_bias,
        conv_state,
        starts,
        starts.stride(0),
        lengths,
        0 if lengths is None else lengths.stride(0),
        slots,
        0 if slots is None else slots.stride(0),
        y,
        tokens,
        N=columns,
        FIRST_CHANNEL=columns - channels - num_heads,
        CHANNELS=channels,
        D_CONV=d_conv,
        BLOCK_W=triton.next_power_of_2(d_conv),
        BLOCK_C=_BLOCK_C,
        **launch_options(projected, NUM_WARPS_SMALL),
        **EXACT_PRODUCTS,
    )
    return y


register_launch(convolve_verified, _launch_convolve_verified)


@triton.jit
def _convolution_kernel(
    projected,
    conv_weight,
    conv_bias,
    conv_state,
    starts,
    stride_starts,
    lengths,
    stride_lengths,
    slots,
    stride_slots,
    y,
    tokens,
    N: tl.constexpr,
    FIRST_CHANNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    D_CONV: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Handle BLOCK_C of a sequence's columns: convolve the CHANNELS columns from FIRST_CHANNEL on; cast the others.

    Grid: (cdiv(N, BLOCK_C), batch).

    Args:
        projected: [batch, tokens, N].
        conv_weight: [CHANNELS, D_CONV]. conv_bias: [CHANNELS], or None.
        conv_state: [sequences, CHANNELS, D_CONV - 1].
        starts: [batch] int32, with its stride; at 0 a window is zeros.
        lengths: [batch] int32, with its stride: how many of a sequence's tokens advance conv_state; None for none.
        slots: [batch] int32, with its stride: a row's entry of conv_state is slot - 1; None if row i has entry i.
        y: [batch, tokens, N] in float32; with lengths, only for those tokens.
        tokens: per sequence.
    """
    gdc_launch_dependents(USE_GDC)
    gdc_wait(USE_GDC)
    pid_b = tl.program_id(1).to(tl.int64)
    offs_n, offs_w = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_W)[None]
    offs_c = offs_n - FIRST_CHANNEL
    mask_n, mask_c = offs_n < N, (offs_c >= 0) & (offs_c < CHANNELS)
    weights = tl.load(conv_weight + offs_c[:, None] * D_CONV + offs_w, mask_c[:, None] & (offs_w < D_CONV), 0.0)
    weights = weights.to(tl.float32)
    biases = tl.zeros([BLOCK_C], tl.float32)
    if conv_bias is not None:
        biases = tl.load(conv_bias + offs_c, mask_c, 0.0).to(tl.float32)
    count = tokens
    if lengths is not None:
        count = tl.load(lengths + pid_b * stride_lengths)
    is_begun = tl.load(starts + pid_b * stride_starts) > 0
    entry = pid_b
    if slots is not None:
        entry = tl.load(slots + pid_b * stride_slots).to(tl.int64) - 1
    windows = conv_state + (entry * CHANNELS + offs_c[:, None]) * (D_CONV - 1)
    projected += pid_b * tokens * N
    y += pid_b * tokens * N
    for token in range(0, count):
        window = _window(windows, projected, token, is_begun, offs_n, offs_w, mask_c, N, D_CONV)
        convolved = biases
        for w in tl.static_range(D_CONV):
            # As in `mixer_inputs`.
            at_tap = offs_w == w
            values, factors = tl.sum(tl.where(at_tap, window, 0.0), 1), tl.sum(tl.where(at_tap, weights, 0.0), 1)
            convolved = tl.fma(values, factors, convolved)
        new = tl.load(projected + token * N + offs_n, mask_n, 0.0).to(tl.float32)
        tl.store(y + token * N + offs_n, tl.where(mask_c, convolved * tl.sigmoid(convolved), new), mask_n)
    if lengths is not None:
        window = _window(windows, projected, count - 1, is_begun, offs_n, offs_w + 1, mask_c, N, D_CONV)
        tl.debug_barrier()  # a thread may have read values that another overwrites
        mask = mask_c[:, None] & (offs_w < D_CONV - 1) & (count > 0)
        tl.store(windows + offs_w, window.to(conv_state.dtype.element_ty), mask)


@triton.jit
def _window(windows, projected, token, is_begun, offs_n, offs_w, mask_c, N: tl.constexpr, D_CONV: tl.constexpr):
    """Return inputs offs_w of the D_CONV inputs that end with a token, [BLOCK_C, BLOCK_W] in float32. Inputs before the
    first token come from windows, [BLOCK_C, D_CONV - 1].
    """
    places = token - (D_CONV - 1) + offs_w
    mask = mask_c[:, None] & (offs_w < D_CONV)
    of_state = tl.load(windows + places + (D_CONV - 1), mask & (places < 0) & is_begun, 0.0)
    of_tokens = tl.load(projected + places * N + offs_n[:, None], mask & (places >= 0), 0.0)
    return tl.where(places < 0, of_state, of_tokens).to(tl.float32)


# -- recurrence and gate


@operator()
def scan_verified(
    inputs: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
    slots: torch.Tensor | None = None,
    stream: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `advance_mixer` for one token after another; ssm_state is unchanged.

    Args:
        inputs: from `convolve_verified`.
        starts: [batch], int32, the position of each sequence's first token; at 0 its state is zeros.
        lengths: [batch], int32; results after this many tokens are unspecified.
        slots, stream: as for `advance_mixer`.

    Returns:
        [batch * tokens, num_heads * head_dim] in float32.
    """
    states = _begun(rows_of_slots(ssm_state, slots), starts)
    return _scanned(inputs, (dt_bias, A_log, D), states, starts, lengths, (lowest_dt, highest_dt), stream)


@scan_verified.register_fake
def _(inputs, dt_bias, A_log, D, ssm_state, *others):
    return inputs.new_empty(len(inputs), ssm_state.shape[1] * ssm_state.shape[2])


def _scanned(
    inputs: torch.Tensor,
    head_params: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ssm_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    limits: tuple[float, float],
    stream: torch.Tensor | None,
) -> torch.Tensor:
    """Advance ssm_state by the real tokens."""
    by_sequence = inputs.view(len(ssm_state), -1, inputs.shape[1])
    outputs = [
        advance_mixer(
            by_sequence[:, token],
            *head_params,
            ssm_state,
            (lengths > token).int(),
            *limits,
            positions=starts + token,
            stream=stream,
        )
        for token in range(by_sequence.shape[1])
    ]
    return torch.stack(outputs, 1).flatten(0, 1)


def _launch_scan_verified(
    inputs: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
    slots: torch.Tensor | None = None,
    stream: torch.Tensor | None = None,
) -> torch.Tensor:
    y = inputs.new_empty(len(inputs), ssm_state.shape[1] * ssm_state.shape[2])
    launch_recurrence(
        inputs,
        dt_bias,
        A_log,
        D,
        ssm_state,
        starts,
        lengths,
        y,
        slots=slots,
        stream=stream,
        limits=(lowest_dt, highest_dt),
        are_begun=False,
        writes_state=False,
    )
    return y


register_launch(scan_verified, _launch_scan_verified)


# -- accepted tokens


@operator(mutates=("conv_state", "ssm_state"))
def advance_verified(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
    slots: torch.Tensor | None = None,
    stream: torch.Tensor | None = None,
) -> None:
    """Advance conv_state and ssm_state in place by the first tokens of each sequence, as decode would.

    Args:
        projected: [batch, tokens, channels + num_heads]: the convolution's inputs, and dt.
        starts: [batch], int32, the position of each sequence's first token; at 0 it starts from zeros.
        lengths: [batch], int32, how many tokens; where it is 0 the states are unchanged.
        slots, stream: as for `advance_mixer`.
    """
    is_fresh = (starts == 0) & (lengths > 0)
    windows, states = rows_of_slots(conv_state, slots), rows_of_slots(ssm_state, slots)
    for rows in (windows, states):
        rows.masked_fill_(is_fresh.view(-1, *[1] * (rows.dim() - 1)), 0.0)
    inputs = _convolved(projected, conv_weight, conv_bias, windows, len(dt_bias), lengths)
    no_gate = inputs.new_zeros(*inputs.shape[:2], ssm_state.shape[1] * ssm_state.shape[2])
    inputs = torch.cat([no_gate, inputs], 2).flatten(0, 1)
    _scanned(inputs, (dt_bias, A_log, D), states, starts, lengths, (lowest_dt, highest_dt), stream)
    write_rows_of_slots(conv_state, slots, windows)
    write_rows_of_slots(ssm_state, slots, states)


@advance_verified.register_fake
def _(*arguments):
    return None


def _launch_advance_verified(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
    slots: torch.Tensor | None = None,
    stream: torch.Tensor | None = None,
) -> None:
    index = starts, lengths, slots
    inputs = _launch_convolution(projected, conv_weight, conv_bias, conv_state, *index, len(dt_bias))
    launch_recurrence(
        inputs,
        dt_bias,
        A_log,
        D,
        ssm_state,
        starts,
        lengths,
        None,
        slots=slots,
        stream=stream,
        limits=(lowest_dt, highest_dt),
        are_begun=False,
        writes_state=True,
    )


register_launch(advance_verified, _launch_advance_verified)
