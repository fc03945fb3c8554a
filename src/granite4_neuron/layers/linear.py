"""The projection that all layers use."""

from __future__ import annotations

import torch
from torch import nn

from granite4_neuron.ops import TORCH, Operators


class Linear(nn.Linear):
    """torch's Linear, through `operators`."""

    operators: Operators = TORCH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.linear(x, self.weight, self.bias)
