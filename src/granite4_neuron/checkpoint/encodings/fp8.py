"""FP8: numbers in float8 (E4M3), with a scale for the whole matrix, for each row or for each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from granite4_neuron.checkpoint.encodings.scales import FLOATS, scaled
from granite4_neuron.config.choices import FP8_GROUP

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
        return scaled(tensors["weight"].float(), *self._scales_of_rows(tensors))

    def may_stay(self, shapes: Mapping[str, Shape]) -> bool:
        """Return whether `ops.fp8` represents the matrix, and kernels read it: its columns are whole words."""
        all_columns, (_, columns) = shapes["weight"][-1], self._block_of(shapes)
        return all_columns % 4 == 0 and (columns == all_columns or columns % FP8_GROUP == 0)

    def parts(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and scales of `ops.fp8`, for a matrix that may stay."""
        numbers, (scales, columns) = tensors["weight"], self._scales_of_rows(tensors)
        scales = scales.repeat_interleave(-(-columns // FP8_GROUP), -1)[..., : -(-numbers.shape[-1] // FP8_GROUP)]
        return numbers, scales.expand(*numbers.shape[:-1], -1)

    def _scales_of_rows(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Return scales [..., rows, blocks] in float32, where axes of experts may have the length one, and the columns
        of a block.
        """
        *outer, all_rows, all_columns = tensors["weight"].shape
        rows, columns = self._block_of({ending: tuple(tensor.shape) for ending, tensor in tensors.items()})
        scales = tensors[self.scales].float()
        scales = scales.reshape(*(outer if scales.numel() > 1 else [1] * len(outer)), -1, -(-all_columns // columns))
        return scales.repeat_interleave(rows, dim=-2)[..., :all_rows, :], columns

    def _block_of(self, shapes: Mapping[str, Shape]) -> tuple[int, int]:
        block = self._block(shapes["weight"], shapes[self.scales])
        assert block is not None  # `shape` has said so
        return block

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
