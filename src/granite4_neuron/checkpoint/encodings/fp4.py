"""FP4: numbers of four bits (E2M1), with a scale for every 16 (NVFP4) or 32 (MXFP4) columns of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from granite4_neuron.checkpoint.encodings.scales import scaled

if TYPE_CHECKING:
    import torch

    from granite4_neuron.checkpoint.encodings import Shape

_SCALES = "weight_scale"
# By code; the highest of the four bits is the sign.
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class NVFP4:
    """A weight is a number times its scale, which is a float8 times the scale of the matrix, or divided by it.

    numbers, of_matrix: the endings of their names. A matrix of experts has one such scale, or one for each.
    divides: whether the scale of the matrix is a divisor.
    """

    numbers: str
    of_matrix: str
    divides: bool
    name = "NVFP4"
    columns = 16

    @property
    def tensors(self) -> Mapping[str, Sequence[str]]:
        return {self.numbers: ("U8",), _SCALES: ("F8_E4M3",), self.of_matrix: ("F32",)}

    def shape(self, shapes: Mapping[str, Shape]) -> Shape | None:
        shape = _shape(shapes[self.numbers], shapes[_SCALES], self.columns)
        return shape if shape and math.prod(shapes[self.of_matrix]) in (1, math.prod(shape[:-2])) else None

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scales, of_matrix = tensors[_SCALES].float(), tensors[self.of_matrix].reshape(-1, 1, 1)
        outer = scales.shape
        scales = scales.reshape(-1, *outer[-2:])
        scales = (scales / of_matrix if self.divides else scales * of_matrix).reshape(outer)
        return scaled(_numbers(tensors[self.numbers]), scales, self.columns)


@dataclass(frozen=True)
class MXFP4:
    """A weight is a number times its scale, a power of two that is stored as an exponent (E8M0).

    numbers: the ending of their name.
    """

    numbers: str
    name = "MXFP4"
    columns = 32

    @property
    def tensors(self) -> Mapping[str, Sequence[str]]:
        return {self.numbers: ("U8",), _SCALES: ("U8", "F8_E8M0")}

    def shape(self, shapes: Mapping[str, Shape]) -> Shape | None:
        return _shape(shapes[self.numbers], shapes[_SCALES], self.columns)

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # Not at the top: names and shapes need no torch.
        import torch

        scales = tensors[_SCALES].view(torch.float8_e8m0fnu).float()
        return scaled(_numbers(tensors[self.numbers]), scales, self.columns)


def _shape(of_numbers: Shape, of_scales: Shape, columns: int) -> Shape | None:
    *rows, pairs = of_numbers
    return (*rows, 2 * pairs) if of_scales == (*rows, -(-2 * pairs // columns)) else None


def _numbers(pairs: torch.Tensor) -> torch.Tensor:
    """Read bytes, whose lower halves have the even columns, in float32."""
    # Not at the top: names and shapes need no torch.
    import torch

    numbers, bytes_ = torch.tensor(_NUMBERS), torch.arange(256)
    both = torch.stack([numbers[bytes_ & 15], numbers[bytes_ >> 4]], -1).view(torch.int64).flatten()
    return both.index_select(0, pairs.flatten().int()).view(torch.float32).view(*pairs.shape[:-1], -1)
