"""MLX's files: affine numbers of 4 or 8 bits, and convolutions with other axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from granite4_neuron.checkpoint.encodings.scales import FLOATS, scaled

if TYPE_CHECKING:
    import torch

    from granite4_neuron.checkpoint.encodings import Shape


@dataclass(frozen=True)
class Affine:
    """A weight is a number times its scale, plus its bias. The first number is in a word's lowest bits.

    bits: of a number, 4 or 8.
    columns: how many of a row share a scale and a bias.
    """

    bits: int
    columns: int

    @property
    def name(self) -> str:
        return f"MLX's {self.bits} bits"

    @property
    def tensors(self) -> Mapping[str, Sequence[str]]:
        return {"weight": ("U32",), "scales": FLOATS, "biases": FLOATS}

    def shape(self, shapes: Mapping[str, Shape]) -> Shape | None:
        *rows, words = shapes["weight"]
        columns = words * 32 // self.bits
        blocks = (*rows, columns // self.columns)
        fits = columns % self.columns == 0 and shapes["scales"] == shapes["biases"] == blocks
        return (*rows, columns) if fits else None

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # Not at the top: names and shapes need no torch.
        import torch

        numbers = tensors["weight"].view(torch.uint8)
        if self.bits == 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2)
        weight = scaled(numbers.float(), tensors["scales"].float(), self.columns)
        weight.unflatten(-1, (-1, self.columns)).add_(tensors["biases"].float()[..., None])
        return weight


class Convolution:
    """The taps of a depthwise convolution, [channels, taps, 1]."""

    name = "MLX's layout"

    @property
    def tensors(self) -> Mapping[str, Sequence[str]]:
        return {"weight": FLOATS}

    def shape(self, shapes: Mapping[str, Shape]) -> Shape | None:
        shape = shapes["weight"]
        return (shape[0], 1, shape[1]) if len(shape) == 3 and shape[2] == 1 else None

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].transpose(1, 2).float()
