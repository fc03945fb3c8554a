"""Modules whose weight is a matrix, and the projection that all layers use."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from granite4_neuron.model.binding import Module
from granite4_neuron.ops import CompactWeight, Weight


class Matrix(Module):
    """A module whose `weight` is a matrix, or one of each expert: a parameter, or in its place a `CompactWeight`.

    The memory of a new one is not written: weights come from a checkpoint.
    """

    may_be_quantized: ClassVar[bool] = True
    weight: Weight

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def set_compact_weight(self, weight: CompactWeight) -> None:
        """Put a compact weight in the parameter's place."""
        if "weight" in self._parameters and not self._is_bound:
            del self.weight
        self.weight = weight


class Projection(Matrix):
    """Weights under the names of torch's Linear: `weight`, [out_features, in_features], and `bias` or None."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__(out_features, in_features)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)


class Linear(Projection):
    """Torch's Linear, computed by `operators`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.linear(x, self.weight, self.bias)
