"""FP8: numbers in float8 (E4M3), with a scale for the whole matrix, for each row or for each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from granite4_neuron.checkpoint.encodings.scales import FLOATS, scaled

if TYPE_CHECKING:
    import torch

    from granite4_neuron.checkpoint.encodings import Shape


@dataclass(frozen=True)
class FP8:
    """A weight is a number times its scale.

    scales: the ending of their name. Their shape says which rows and columns share one.
    blocks: the possible rows and columns of a block; the last blocks of a matrix may be smaller.
    """

    scales: str
    blocks: Sequence[tuple[int, int]]
    name = "FP8"

    @property
    def tensors(self) -> Mapping[str, Sequence[str]]:
        return {"weight": ("F8_E4M3",), self.scales: FLOATS}

    def shape(self, shapes: Mapping[str, Shape]) -> Shape | None:
        shape = shapes["weight"]
        return None if self._block(shape, shapes[self.scales]) is None else shape

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        numbers, scales = tensors["weight"].float(), tensors[self.scales].float()
        block = self._block(tuple(numbers.shape), tuple(scales.shape))
        assert block is not None  # `shape` has said so
        rows, columns = block
        *outer, all_rows, all_columns = numbers.shape
        scales = scales.reshape(*(outer if scales.numel() > 1 else [1] * len(outer)), -1, -(-all_columns // columns))
        return scaled(numbers, scales.repeat_interleave(rows, dim=-2)[..., :all_rows, :], columns)

    def _block(self, shape: Shape, of_scales: Shape) -> tuple[int, int] | None:
        """Return how many rows and columns share a scale; None if the scales do not fit the matrix."""
        *outer, rows, columns = shape
        if _without_ones(of_scales) in ((), _without_ones(outer)):
            return rows, columns
        if _without_ones(of_scales) == _without_ones((*outer, rows)) and rows > 1:
            return 1, columns
        for block in self.blocks:
            grid = -(-rows // block[0]), -(-columns // block[1])
            if _without_ones(of_scales) == _without_ones((*outer, *grid)):
                return block
        return None


def _without_ones(shape: Sequence[int]) -> Shape:
    """Return a shape without its axes of length one: tools differ in those of scales."""
    return tuple(size for size in shape if size != 1)
