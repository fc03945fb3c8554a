"""Weights in float8 with a scale for every 128 columns of a row.

It is not in `ops.formats`, because nothing is quantized to it on loading: it keeps what a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from granite4_neuron.config.choices import FP8_GROUP as GROUP
from granite4_neuron.ops.weight import Format, QuantizedWeight

_NAN = 127  # its code, without the sign


class FP8(Format):
    """Numbers in float8 (E4M3) times the scale of their group.

    values: float8_e4m3fn, like the matrix; scales: float32, [..., rows, groups]. The last group may be narrower.
    """

    def layout(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        *rows, columns = shape
        return {"": (shape, torch.float8_e4m3fn), "_scale": (torch.Size([*rows, -(-columns // GROUP)]), torch.float32)}

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        weight = weight.float()
        scales = torch.stack([group.abs().amax(-1) for group in weight.split(GROUP, -1)], -1)
        scales /= torch.finfo(torch.float8_e4m3fn).max
        scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)
        values = (weight / _of_columns(scales, weight.shape[-1])).to(torch.float8_e4m3fn)
        return QuantizedWeight(self, values.contiguous(), scales, weight.shape)

    def fault(self, weight: QuantizedWeight) -> str | None:
        if (weight.values.view(torch.uint8) & 0x7F).max() == _NAN:
            return "numbers that are not finite (NaN)"
        return super().fault(weight)

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        return (weight.values.float() * _of_columns(weight.scales, weight.shape[-1])).to(dtype)


FORMAT = FP8()


def _of_columns(scales: torch.Tensor, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(GROUP, -1)[..., :columns]
