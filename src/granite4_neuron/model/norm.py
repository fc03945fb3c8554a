"""Normalisation layers: weights for the functions in ops.norm."""

from __future__ import annotations

import torch
from torch import nn

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.binding import Module
from granite4_neuron.ops import rms_norm


class RMSNorm(Module):
    """`ops.rms_norm` with its weight."""

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.operators.rms_norm(hidden_states, self.weight, self.eps)


def norm_of(config: ModelConfig) -> RMSNorm:
    """Make a norm of the residual stream: before each half of a layer, or before the head."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps)


def why_not_fusible(norm: nn.Module) -> str | None:
    """Return why layer forms that also compute the norm do not support this one, as a clause; None if they do."""
    if type(norm) is not RMSNorm:
        return f"they compute RMS norms, and the model has a {type(norm).__name__}"
    return None


class RMSNormGated(Module):
    """`ops.rms_norm_gated` with its weight."""

    def __init__(self, channels: int, eps: float, n_groups: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.eps = eps
        self.n_groups = n_groups

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """Normalise [..., channels]; without a gate, hidden_states are already gated."""
        if gate is None:
            return rms_norm(hidden_states, self.weight, self.eps, self.n_groups)
        return self.operators.rms_norm_gated(hidden_states, gate, self.weight, self.eps, self.n_groups)
