"""Causal depthwise convolution over a window that is carried from step to step."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def causal_conv1d(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute SiLU(depthwise convolution of `conv_state` then `x`), for any number of new tokens, and the next window.

    The convolution is d_conv shifted multiply-adds in float32: no `nn.Conv1d`, so that one token, a chunk and a whole
    prompt are the same computation.

    Args:
        x: [batch, tokens, channels]; row b has lengths[b] real tokens, then padding of any finite value.
        conv_state: [batch, channels, d_conv - 1], the inputs before x[:, 0], oldest first.
        weight: [channels, d_conv], the last tap multiplies the current token.
        bias: [channels] or None.
        lengths: [batch], int64, 0 to tokens.

    Returns:
        (y, new_conv_state): y is [batch, tokens, channels] in float32, unspecified where x is padding; new_conv_state
        has conv_state's shape and dtype, and holds the last d_conv - 1 inputs up to the last real token.

    Source: Mamba-2's causal_conv1d (Dao and Gu 2024, section 8); with the state of state-spaces/mamba's
    causal_conv1d_update.
    """
    tokens, width = x.shape[1], weight.shape[1]
    inputs = torch.cat([conv_state.transpose(1, 2), x], dim=1)
    y = depthwise_convolution(inputs, weight, bias)

    # The window after `length` tokens is inputs[length : length + d_conv - 1]: it reaches back into the previous
    # window when fewer than d_conv - 1 tokens are real. A product with ones and zeros selects it exactly, so that
    # graphs have no data-dependent index.
    wanted = lengths[:, None] + torch.arange(width - 1, dtype=lengths.dtype, device=x.device)
    picked = wanted[:, :, None] == torch.arange(tokens + width - 1, dtype=lengths.dtype, device=x.device)
    new_state = (picked.to(inputs.dtype) @ inputs).transpose(1, 2)
    return F.silu(y), new_state


def depthwise_convolution(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Map [batch, d_conv - 1 + tokens, channels] to [batch, tokens, channels] in float32."""
    width = weight.shape[1]
    tokens = inputs.shape[1] - width + 1
    taps = weight.float()
    window = inputs.float()
    y = window[:, :tokens] * taps[:, 0]
    for tap in range(1, width):
        y.addcmul_(window[:, tap : tap + tokens], taps[:, tap])
    if bias is not None:
        y += bias.float()
    return y
