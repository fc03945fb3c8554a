"""The scales of numbers in blocks of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# safetensors' names of the dtypes that scales may have as plain numbers.
FLOATS = ("F32", "BF16", "F16")


def scaled(numbers: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """Multiply numbers [..., rows, all columns] in place by scales [..., rows, blocks], each for a block of this many
    columns. The last block may be narrower.
    """
    whole = numbers.shape[-1] // columns
    numbers[..., : whole * columns].unflatten(-1, (whole, columns)).mul_(scales[..., :whole, None])
    numbers[..., whole * columns :].mul_(scales[..., whole:])
    return numbers
