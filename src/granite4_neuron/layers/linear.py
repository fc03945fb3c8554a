"""The projection that all layers use, of weights that may be quantized."""

from __future__ import annotations

import torch
from torch import nn

from granite4_neuron.ops import TORCH, Operators


class Linear(nn.Linear):
    """torch's Linear, through `operators`. A quantized weight has a scale beside it, see `ops.linear`."""

    operators: Operators = TORCH

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__(in_features, out_features, bias=bias)
        self.register_parameter("weight_scale", None)

    def reset_parameters(self) -> None:
        """Nothing: weights come from a checkpoint. Torch's own would import its compiler for weights on "meta"."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.linear(x, self.weight, self.bias, self.weight_scale)
