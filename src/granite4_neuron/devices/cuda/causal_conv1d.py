"""A Mamba layer's convolution over several tokens of each sequence: each output is one sum over ascending taps."""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.triton_utils import LOG2_E, entries_of_slots, tl, triton
from granite4_neuron.ops.causal_conv1d import causal_conv1d

_BLOCK_T, _BLOCK_C = 16, 64  # a program's tokens and channels


@operator()
def convolve_tokens(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.causal_conv1d`; y is in bfloat16 where x is, otherwise in float32."""
    y, window = causal_conv1d(x, conv_state, weight, bias, lengths)
    return y.to(dtype_of_output(x)).contiguous(), window.contiguous()


def dtype_of_output(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of y."""
    return x.dtype if x.dtype == torch.bfloat16 else torch.float32


@convolve_tokens.register_fake
def _(x, conv_state, weight, bias, lengths):
    return x.new_empty(x.shape, dtype=dtype_of_output(x)), conv_state.new_empty(conv_state.shape)


def _launch_convolve_tokens(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    window = conv_state.new_empty(conv_state.shape)
    return launch_convolution(x, conv_state.contiguous(), weight, bias, lengths, window), window


register_launch(convolve_tokens, _launch_convolve_tokens)


def launch_convolution(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: torch.Tensor,
    window: torch.Tensor,
    starts: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `convolve_tokens`; write the windows after all tokens to `window`, which may be conv_state.

    Args:
        starts: [batch], the positions of first tokens; rows with tokens begin at 0 without a window. None if none does.
        slots: [batch], each row's entry of both windows is slot - 1; None if row i has entry i.
    """
    batch, tokens, channels = x.shape
    y = x.new_empty(x.shape, dtype=dtype_of_output(x))
    d_conv = weight.shape[1]
    _convolve_tokens_kernel[triton.cdiv(channels, _BLOCK_C), triton.cdiv(tokens, _BLOCK_T), batch](
        x,
        conv_state,
        weight.contiguous(),
        bias,
        starts,
        lengths,
        slots,
        y,
        window,
        tokens,
        x.stride(0),
        x.stride(1),
        0 if starts is None else starts.stride(0),
        CHANNELS=channels,
        D_CONV=d_conv,
        BLOCK_T=_BLOCK_T,
        BLOCK_C=_BLOCK_C,
        BLOCK_W=triton.next_power_of_2(d_conv),
        num_warps=1,
    )
    return y


@triton.jit(do_not_specialize=["tokens", "stride_starts"])
def _convolve_tokens_kernel(
    x,
    conv_state,
    weight,
    bias,
    starts,
    lengths,
    slots,
    y,
    window,
    tokens,
    stride_x_batch,
    stride_x_token,
    stride_starts,
    CHANNELS: tl.constexpr,
    D_CONV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Convolve BLOCK_C channels of BLOCK_T tokens; the first program of a sequence's channels shifts their window.

    Grid: (cdiv(CHANNELS, BLOCK_C), cdiv(tokens, BLOCK_T), batch).

    Args:
        x: [batch, tokens, CHANNELS], with its strides.
        conv_state, window: [.., CHANNELS, D_CONV - 1], before and after; they may be one.
        weight: [CHANNELS, D_CONV]. bias: [CHANNELS], or None.
        starts, lengths, slots: [batch], integer, starts with their stride; starts and slots may be None, see
            `launch_convolution`.
        y: [batch, tokens, CHANNELS].
    """
    pid_b, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * BLOCK_T
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CHANNELS
    x += pid_b * stride_x_batch
    length = tl.load(lengths + pid_b).to(tl.int32)
    has_window = length >= 0
    if starts is not None:
        has_window = (tl.load(starts + pid_b * stride_starts) > 0) | (length == 0)
    state = entries_of_slots(slots, pid_b, True) * CHANNELS * (D_CONV - 1)
    # Each input is loaded once, and all of them before the first use of one.
    loaded, taps = (), ()
    for i in tl.static_range(BLOCK_T + D_CONV - 1):
        at = first + (i - (D_CONV - 1))
        mask = mask_c & (at >= 0) & (at < tokens)
        loaded += (tl.load(x + at * stride_x_token + offs_c, mask, 0.0),)  # type: ignore[assignment]
    for tap in tl.static_range(D_CONV):
        taps += (tl.load(weight + offs_c * D_CONV + tap, mask_c, 0.0).to(tl.float32),)  # type: ignore[assignment]
    biases = tl.zeros([BLOCK_C], tl.float32)
    if bias is not None:
        biases += tl.load(bias + offs_c, mask_c, 0.0).to(tl.float32)
    inputs = ()
    for i in tl.static_range(BLOCK_T + D_CONV - 1):
        values = loaded[i].to(tl.float32)  # type: ignore[var-annotated]
        if i < D_CONV - 1:  # in the window
            ptrs = conv_state + state + offs_c * (D_CONV - 1) + i
            values += tl.load(ptrs, mask_c & (first == 0) & has_window, 0.0).to(tl.float32)
        inputs += (values,)
    for i in tl.static_range(BLOCK_T):
        total = biases
        for tap in tl.static_range(D_CONV):
            # An explicit fma: in a sum of two products the compiler might round either product.
            total = tl.fma(inputs[i + tap], taps[tap], total)
        output = total / (1.0 + tl.exp2(total * -LOG2_E))  # fewer instructions than with a sigmoid
        ptrs = y + (pid_b * tokens + first + i) * CHANNELS + offs_c
        tl.store(ptrs, output.to(y.dtype.element_ty), mask_c & (first + i < tokens))

    if first == 0:
        offs_w = tl.arange(0, BLOCK_W)[None]
        mask_w = mask_c[:, None] & (offs_w < D_CONV - 1)
        source = length + offs_w  # among the old window and then the tokens
        is_old = source < D_CONV - 1
        channels = offs_c[:, None] * (D_CONV - 1)
        old = tl.load(conv_state + state + channels + source, mask_w & is_old & has_window, 0.0)
        new = tl.load(x + (source - (D_CONV - 1)) * stride_x_token + offs_c[:, None], mask_w & ~is_old, 0.0)
        tl.debug_barrier()  # a thread may read a value that another thread overwrites
        tl.store(window + state + channels + offs_w, tl.where(is_old, old, new.to(old.dtype)), mask_w)
