"""Weights in int8 with one scale per output channel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from granite4_neuron.ops.weight import Format, QuantizedWeight, values_at_a_time

_LARGEST = 127
_PART = 2**16  # values to quantize at a time, in a CPU's cache


class Int8(Format):
    """Multiples of a row's largest absolute value / 127, rounded to nearest: symmetric, without a zero point.

    values: int8, like the matrix; scales: float32, [..., rows].
    """

    def layout(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        return {"": (shape, torch.int8), "_scale": (shape[:-1], torch.float32)}

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        return QuantizedWeight(self, *quantize_per_channel(weight), weight.shape)

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        return (weight.values.float() * weight.scales[..., None]).to(dtype)


FORMAT = Int8()


def quantize_per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix [..., rows, columns] for `Int8`.

    Returns:
        (values in int8, like weight; scale in float32, [..., rows]), with weight ~ values * scale. Each value is off by
        half a scale at most. A row of zeros has the scale 1; a row that is not finite has a scale that is not finite.
    """
    columns, part = weight.shape[-1], values_at_a_time(weight.device, _PART)
    values = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    parts = [
        tensor.split(max(1, part // columns))
        for tensor in (weight.reshape(-1, columns), values.view(-1, columns), scale.view(-1))
    ]
    for rows, to_values, to_scale in zip(*parts, strict=True):
        rows = rows.to(torch.float32, copy=True)
        torch.amax(rows.abs(), -1, out=to_scale)
        to_scale /= _LARGEST
        # A subnormal scale counts as zero, and must not be a divisor.
        to_scale.masked_fill_(to_scale < torch.finfo(torch.float32).tiny, 1.0)
        to_values.copy_(rows.div_(to_scale[:, None]).round_())
    return values, scale
