"""Modules whose weight is a matrix, and the projection that all layers use."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from granite4_neuron.model.binding import Module
from granite4_neuron.ops import CompactWeight


class Matrix(Module):
    """A module whose `weight` is a matrix, or one of each expert: a parameter, or in its place a `CompactWeight`."""

    may_be_quantized: ClassVar[bool] = True

    def set_compact_weight(self, weight: CompactWeight) -> None:
        """Put a compact weight in the parameter's place."""
        if "weight" in self._parameters and not self._is_bound:
            del self.weight
        self.weight = weight


class Linear(Matrix, nn.Linear):
    """torch's Linear, through `operators`."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Do nothing: weights come from a checkpoint. Torch's own would import its compiler for weights on "meta"."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.linear(x, self.weight, self.bias)
