"""What all layers of one step share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from granite4_neuron.state import NULL_SLOT


@dataclass(frozen=True)
class Step:
    """Which tokens a step adds to which sequences.

    positions: [batch, tokens], each token's place in its sequence, consecutive within a row.
    lengths: [batch], how many of a row's tokens are real; the rest is padding on the right.
    slots: [batch], each row's slot in the state.
    kv_length: how many cache entries attention visits; above every real position.
    """

    positions: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    kv_length: int

    @cached_property
    def is_real(self) -> torch.Tensor:
        """[batch, tokens], false for padding."""
        return torch.arange(self.positions.shape[1], device=self.positions.device) < self.lengths[:, None]

    @cached_property
    def read_slots(self) -> torch.Tensor:
        """[batch], where each row's recurrent state is read: at position 0 that is the null slot, which holds zeros."""
        return self.slots.where(self.positions[:, 0] > 0, NULL_SLOT)

    @cached_property
    def is_last(self) -> torch.Tensor:
        """[batch, tokens], true for each row's last real token; for the first where a row has none."""
        tokens = torch.arange(self.positions.shape[1], device=self.positions.device)
        return tokens == (self.lengths - 1).clamp(min=0)[:, None]

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """Each row's own part of a recurrent state: state [slots, ...] to [batch, ...], zeros at position 0."""
        return state.index_select(0, self.read_slots)

    def write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows [batch, ...] back to where `read` took them from, in place."""
        state.index_copy_(0, self.slots, rows)
