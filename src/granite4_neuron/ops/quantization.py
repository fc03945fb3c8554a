"""Weights in int8 with one scale per output channel, and products with them.

Only weights are quantized. Activations keep their dtype, so that a product is that of a slightly different matrix.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

_LARGEST = 127
_PART = 2**16  # values that are quantized at a time, in cache


def quantize_per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest multiples of a row's largest absolute value / 127: symmetric, without a zero point.

    Args:
        weight: [..., rows, columns], of any floating dtype.

    Returns:
        (values in int8, like weight; scale in float32, [..., rows]), with weight ~ values * scale. Each value is off by
        half a scale at most. A row of zeros has the scale 1, a row that is not finite one that is not.
    """
    columns = weight.shape[-1]
    values = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    parts = [
        tensor.split(max(1, _PART // columns))
        for tensor in (weight.reshape(-1, columns), values.view(-1, columns), scale.view(-1))
    ]
    for rows, to_values, to_scale in zip(*parts, strict=True):
        rows = rows.to(torch.float32, copy=True)
        torch.linalg.vector_norm(rows, torch.inf, dim=-1, out=to_scale)
        to_scale /= _LARGEST
        # Less than a normal number of float32 is as good as zero, and no divisor.
        to_scale.masked_fill_(to_scale < torch.finfo(torch.float32).tiny, 1.0)
        to_values.copy_(rows.div_(to_scale[:, None]).round_())
    return values, scale


def dequantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights that `quantize_per_channel` made `values` and `scale` of, nearly; rounded to dtype."""
    return (values.float() * scale[..., None]).to(dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.nn.functional.linear`; with a scale, of the dequantized weight.

    Args:
        x: [..., columns].
        weight: [rows, columns], in x's dtype, or with a scale in int8.
        bias: [rows] in x's dtype.
        scale: [rows], float32.
    """
    return F.linear(x, weight if scale is None else dequantize(weight, scale, x.dtype), bias)
