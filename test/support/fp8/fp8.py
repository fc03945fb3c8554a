"""Weights in float8 e4m3 with a scale per row, a quantization format that the package does not have.

`test_new_format.py` adds this file and fp8.h to a copy of the package.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from granite4_neuron.ops.weight import Format, QuantizedWeight

_LARGEST = 448.0


class Fp8(Format):
    """Multiples of a row's largest absolute value / 448, rounded to float8 e4m3.

    values: float8_e4m3fn, like the matrix; scales: float32, [..., rows].
    """

    quantizes_tied_embedding = True

    def layout(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        return {"": (shape, torch.float8_e4m3fn), "_scale": (shape[:-1], torch.float32)}

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        weight = weight.float()
        scales = weight.abs().amax(-1) / _LARGEST
        scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)
        values = (weight / scales[..., None]).to(torch.float8_e4m3fn).contiguous()
        return QuantizedWeight(self, values, scales, weight.shape)

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        return (weight.values.float() * weight.scales[..., None]).to(dtype)


FORMAT = Fp8()
