"""Weights of bfloat16 in 12 bits, without loss."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from granite4_neuron.ops.weight import Format, QuantizedWeight

CODES = 15  # exponents that have a code, from a row's least coded one on; code 15 marks others
_EXPONENTS = 256  # of bfloat16
_HEADER = 2
_PART = 2**16  # values to write at a time, in cache


class Lossless12(Format):
    """bfloat16 numbers: sign and mantissa in 8 bits, and a 4-bit code in place of the exponent.

    The exponents of nearly all weights of a row are near each other. A row has codes for the 15 consecutive exponents
    that cover most of its weights; of equal ranges the lowest. Other exponents are stored separately. A row has room
    for 8 of them, or for 1 weight in 128; a row with more is not represented exactly, see `holds`.

    values: uint8, [..., rows, columns * 3 / 2, rounded up], with sign and mantissa of all columns, then the codes: an
        even column's in the lower half, the next column's in the upper half.
    scales: uint8, [..., rows, 2 + room], with the least exponent that has a code, the number of other exponents (255
        for any more), and these exponents in the order of columns, filled up with zeros.
    """

    quantizes_tied_embedding = True
    lossless_dtype = torch.bfloat16

    def layout(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        *rows, columns = shape
        return {
            "": (torch.Size([*rows, columns + -(-columns // 2)]), torch.uint8),
            "_scale": (torch.Size([*rows, _HEADER + _room(columns)]), torch.uint8),
        }

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        layout = self.layout(weight.shape)
        values, scales = (torch.zeros(shape, dtype=dtype, device=weight.device) for shape, dtype in layout.values())
        columns = weight.shape[-1]
        parts = [
            tensor.split(max(1, _PART // columns))
            for tensor in (weight.reshape(-1, columns), *(each.view(-1, each.shape[-1]) for each in (values, scales)))
        ]
        for rows, to_values, to_scales in zip(*parts, strict=True):
            bits = rows.bfloat16().contiguous().view(torch.int16).int()
            exponents = bits >> 7 & _EXPONENTS - 1
            least = _least_exponents(exponents)
            codes = exponents - least
            is_other = (codes < 0) | (codes >= CODES)
            codes = torch.nn.functional.pad(codes.masked_fill(is_other, CODES), (0, columns % 2))
            to_values[:, :columns] = (bits >> 8 & 0x80 | bits & 0x7F).to(torch.uint8)
            to_values[:, columns:] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
            to_scales[:, 0] = least[:, 0].to(torch.uint8)
            to_scales[:, 1] = is_other.sum(-1).clamp(max=255).to(torch.uint8)
            row, column, place = _others(is_other, _room(columns))
            to_scales[row, _HEADER + place] = exponents[row, column].to(torch.uint8)
        return QuantizedWeight(self, values, scales, weight.shape)

    def holds(self, weight: QuantizedWeight) -> bool:
        return bool((weight.scales[..., 1] <= _room(weight.shape[-1])).all())

    def fault(self, weight: QuantizedWeight) -> str | None:
        if not self.holds(weight):
            return "a row with more exponents without a code than there is room for"
        least, count = weight.scales[..., 0].flatten(), weight.scales[..., 1].flatten()
        if (least > _EXPONENTS - CODES).any():
            return "a row with codes beyond the exponents of bfloat16"
        if not torch.equal(_counts_of_others(weight), count.long()):
            return "a row with another number of values without a code than it says"
        return None

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        columns = weight.shape[-1]
        values, scales = (each.reshape(-1, each.shape[-1]).int() for each in (weight.values, weight.scales))
        halves = values[:, columns:]
        codes = torch.stack([halves & 15, halves >> 4], -1).flatten(-2)[:, :columns]
        exponents = scales[:, :1] + codes
        row, column, place = _others(codes == CODES, _room(columns))
        exponents[row, column] = scales[row, _HEADER + place]
        own = values[:, :columns]
        bits = (own & 0x80) << 8 | exponents << 7 | own & 0x7F
        return bits.to(torch.int16).view(torch.bfloat16).view(weight.shape).to(dtype)


FORMAT = Lossless12()


def _room(columns: int) -> int:
    """Return how many exponents without a code a row may have."""
    return min(max(columns // 128, 8), 254)


def _counts_of_others(weight: QuantizedWeight) -> torch.Tensor:
    """Return how many values of each row have the code for others: [rows], of all experts."""
    columns = weight.shape[-1]
    # numpy counts many times as fast as torch.
    halves = weight.values.view(-1, weight.values.shape[-1])[:, columns:].numpy()
    counts = np.empty(len(halves), np.int64)
    at_a_time = max(1, 4 * _PART // columns)
    for first in range(0, len(halves), at_a_time):
        rows = halves[first : first + at_a_time]
        places = [np.flatnonzero(codes) for codes in (rows & 15 == CODES, rows >= CODES << 4)]
        counts[first : first + at_a_time] = np.bincount(np.concatenate(places) // rows.shape[1], minlength=len(rows))
    return torch.from_numpy(counts)


def _least_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Return the first of the `CODES` exponents that most values of a row have: [rows, columns] to [rows, 1]."""
    counts = torch.zeros(len(exponents), _EXPONENTS + 1, dtype=torch.int32, device=exponents.device)
    counts.scatter_add_(1, exponents.long() + 1, torch.ones_like(exponents))
    below = counts.cumsum(-1)
    return (below[:, CODES:] - below[:, :-CODES]).argmax(-1, keepdim=True).int()


def _others(is_other: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row, column and index within the row of all values without a code that there is room for."""
    row, column = is_other.nonzero(as_tuple=True)
    place = is_other.cumsum(-1)[row, column] - 1
    fits = place < room
    return row[fits], column[fits], place[fits]
