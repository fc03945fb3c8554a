"""Weights in four bits with a scale for every 32 columns of a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from granite4_neuron.config.choices import INT4_GROUP as GROUP
from granite4_neuron.ops.formats.int8 import FORMAT as INT8
from granite4_neuron.ops.weight import Format, QuantizedWeight, values_at_a_time

ZERO = 8  # the code for 0; codes stand for the numbers -8 to 7
# A group's largest absolute value in units of the scales to try. Values beyond 7, or 8 on one side, are clipped.
_LARGEST = (8.5, 8.0, 7.5, 7.0, 6.5, 6.0)
_PART = 2**15  # values to quantize at a time, in a CPU's cache


class Int4(Format):
    """Multiples, from -8 to 7, of a scale: of several scales, the one with the smallest sum of squared errors in its
    group.

    A scale may be negative, so that the side with eight multiples can be the side of a group's largest value or the
    other.

    values: uint8, [..., rows, columns of whole groups / 2], with the number + 8 of an even column in the lower half and
        of the next column in the upper half; 8 for padding columns.
    scales: bfloat16, [..., rows, groups].
    """

    quantizes_tied_embedding = True

    @property
    def head(self) -> Format:
        """Four bits are too few here: a single row decides how a token enters or leaves the model."""
        return INT8

    def layout(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        *rows, columns = shape
        groups = -(-columns // GROUP)
        return {
            "": (torch.Size([*rows, groups * GROUP // 2]), torch.uint8),
            "_scale": (torch.Size([*rows, groups]), torch.bfloat16),
        }

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        layout = self.layout(weight.shape)
        values, scales = (torch.empty(shape, dtype=dtype, device=weight.device) for shape, dtype in layout.values())
        columns, groups = weight.shape[-1], scales.shape[-1]
        part = values_at_a_time(weight.device, _PART)
        parts = [
            tensor.split(max(1, part // columns))
            for tensor in (weight.reshape(-1, columns), values.view(-1, groups, GROUP // 2), scales.view(-1, groups))
        ]
        for rows, to_values, to_scales in zip(*parts, strict=True):
            rows = torch.nn.functional.pad(rows.float(), (0, groups * GROUP - columns)).unflatten(-1, (groups, GROUP))
            to_scales.copy_(_best_scales(rows))
            stored = (_multiples(rows, to_scales.float()) + ZERO).to(torch.uint8)
            to_values.copy_(stored[..., 0::2] | stored[..., 1::2] << 4)
        return QuantizedWeight(self, values, scales, weight.shape)

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        values = weight.values.unflatten(-1, (-1, GROUP // 2))
        numbers = torch.stack([values & 15, values >> 4], -1).flatten(-2).float() - ZERO
        return (numbers * weight.scales.float()[..., None]).flatten(-2)[..., : weight.shape[-1]].to(dtype)


FORMAT = Int4()


def _best_scales(groups: torch.Tensor) -> torch.Tensor:
    """Map [rows, groups, GROUP] in float32 to [rows, groups] in bfloat16. A group of zeros has the scale 1; a group
    that is not finite has a scale that is not finite.
    """
    largest = groups.abs().amax(-1)
    largest.masked_fill_(largest < torch.finfo(torch.float32).tiny, _LARGEST[0])
    best = torch.full_like(largest, torch.inf)
    scales = (largest / _LARGEST[0]).bfloat16()
    for units in _LARGEST:
        for candidate in (largest / units, largest / -units):
            candidate = candidate.bfloat16()
            scale = candidate.float()
            error = _sum((_multiples(groups, scale).mul_(scale[..., None]) - groups).square_())
            is_better = error < best
            best = error.where(is_better, best)
            scales = candidate.where(is_better, scales)
    return scales


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, a power of two, in the same order as the kernels."""
    while values.shape[-1] > 1:
        first, second = values.chunk(2, -1)
        values = first + second
    return values[..., 0]


def _multiples(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (groups / scales[..., None]).round_().clamp_(-ZERO, ZERO - 1)
