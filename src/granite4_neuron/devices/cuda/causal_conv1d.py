"""A Mamba layer's convolution over several tokens of each sequence: each output is one sum over ascending taps."""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops.causal_conv1d import causal_conv1d

_BLOCK_T, _BLOCK_C = 16, 64
_BLOCKS = 4  # of tokens for which a program reads weights once


@operator()
def convolve_tokens(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.causal_conv1d`; y is in bfloat16 where x is, otherwise in float32."""
    y, window = causal_conv1d(x, conv_state, weight, bias, lengths)
    return y.to(_dtype_of_output(x)).contiguous(), window.contiguous()


def _dtype_of_output(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.bfloat16 else torch.float32


@convolve_tokens.register_fake
def _(x, conv_state, weight, bias, lengths):
    return x.new_empty(x.shape, dtype=_dtype_of_output(x)), conv_state.new_empty(conv_state.shape)


def _launch_convolve_tokens(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, channels = x.shape
    y, window = x.new_empty(x.shape, dtype=_dtype_of_output(x)), conv_state.new_empty(conv_state.shape)
    d_conv = weight.shape[1]
    _convolve_tokens_kernel[triton.cdiv(channels, _BLOCK_C), triton.cdiv(tokens, _BLOCKS * _BLOCK_T), batch](
        x,
        conv_state.contiguous(),
        weight.contiguous(),
        bias,
        lengths,
        y,
        window,
        tokens,
        x.stride(0),
        x.stride(1),
        CHANNELS=channels,
        D_CONV=d_conv,
        BLOCKS=_BLOCKS,
        BLOCK_T=_BLOCK_T,
        BLOCK_C=_BLOCK_C,
        BLOCK_W=triton.next_power_of_2(d_conv),
    )
    return y, window


register_launch(convolve_tokens, _launch_convolve_tokens)


@triton.jit(do_not_specialize=["tokens"])
def _convolve_tokens_kernel(
    x,
    conv_state,
    weight,
    bias,
    lengths,
    y,
    window,
    tokens,
    stride_x_batch,
    stride_x_token,
    CHANNELS: tl.constexpr,
    D_CONV: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Convolve BLOCK_C channels of BLOCKS * BLOCK_T tokens; the first program of a sequence's channels shifts their
    window.

    Grid: (cdiv(CHANNELS, BLOCK_C), cdiv(tokens, BLOCKS * BLOCK_T), batch).

    Args:
        x: [batch, tokens, CHANNELS], with its strides.
        conv_state, window: [batch, CHANNELS, D_CONV - 1], before and after.
        weight: [CHANNELS, D_CONV]. bias: [CHANNELS], or None.
        lengths: [batch], integer.
        y: [batch, tokens, CHANNELS].
    """
    pid_b = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CHANNELS
    x += pid_b * stride_x_batch
    state = pid_b * CHANNELS * (D_CONV - 1)
    taps = ()
    for tap in tl.static_range(D_CONV):
        taps += (tl.load(weight + offs_c * D_CONV + tap, mask_c, 0.0).to(tl.float32),)  # type: ignore[assignment]
    biases = tl.zeros([BLOCK_C], tl.float32)
    if bias is not None:
        biases += tl.load(bias + offs_c, mask_c, 0.0).to(tl.float32)
    for block in range(tl.program_id(1) * BLOCKS, (tl.program_id(1) + 1) * BLOCKS):
        offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = (offs_t < tokens)[:, None] & mask_c[None]
        inputs = ()  # all loads come before the first use of one
        for tap in tl.static_range(D_CONV):
            at = offs_t[:, None] + (tap - (D_CONV - 1))
            values = tl.load(x + at * stride_x_token + offs_c[None], mask & (at >= 0), 0.0)
            inputs += (values,)  # type: ignore[assignment]
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32) + biases[None]
        for tap in tl.static_range(D_CONV):
            values = inputs[tap].to(tl.float32)
            if tap < D_CONV - 1 and block == 0:
                place = offs_t[:, None] + tap  # in the window
                ptrs = conv_state + state + offs_c[None] * (D_CONV - 1) + place
                values += tl.load(ptrs, mask & (place < D_CONV - 1), 0.0).to(tl.float32)
            # An explicit fma: in a sum of two products the compiler might round either product.
            total = tl.fma(values, tl.broadcast_to(taps[tap][None], values.shape), total)
        output = total * tl.sigmoid(total)
        ptrs = y + (pid_b * tokens + offs_t[:, None]) * CHANNELS + offs_c[None]
        tl.store(ptrs, output.to(y.dtype.element_ty), mask)

    if tl.program_id(1) == 0:
        offs_w = tl.arange(0, BLOCK_W)[None]
        mask_w = mask_c[:, None] & (offs_w < D_CONV - 1)
        source = tl.load(lengths + pid_b).to(tl.int32) + offs_w  # among the old window and then the tokens
        is_old = source < D_CONV - 1
        channels = offs_c[:, None] * (D_CONV - 1)
        old = tl.load(conv_state + state + channels + source, mask_w & is_old, 0.0)
        new = tl.load(x + (source - (D_CONV - 1)) * stride_x_token + offs_c[:, None], mask_w & ~is_old, 0.0)
        tl.store(window + state + channels + offs_w, tl.where(is_old, old, new.to(old.dtype)), mask_w)
