"""A step's tokens and slots, which all layers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from granite4_neuron.model.state import NULL_SLOT
from granite4_neuron.ops.launch_parameters import HEURISTIC, LaunchParameters


@dataclass(frozen=True)
class Step(ABC):
    """Which tokens a step adds to which sequences. Subclasses differ in the layout of the recurrent state.

    positions: [batch, tokens], integer, each token's position in its sequence, consecutive within a row.
    lengths: [batch], integer, how many of a row's tokens are real; the rest is padding on the right.
    slots: [batch], integer, each row's slot in the caches of keys and values.
    kv_length: how many cache entries attention visits; above every real position.
    launch_parameters: of the CPU kernels; other devices have their own constants.
    kept_inputs: None, or a list in a step that verifies. Such a step does not change recurrent state; it collects the
        inputs of each Mamba layer's recurrence here, for `Mamba2.advance`.
    """

    positions: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    kv_length: int
    launch_parameters: LaunchParameters = field(default=HEURISTIC, kw_only=True)
    kept_inputs: list[torch.Tensor] | None = field(default=None, kw_only=True)

    has_null_slot: ClassVar[bool] = False

    @cached_property
    def is_real(self) -> torch.Tensor:
        """[batch, tokens], false for padding."""
        return torch.arange(self.positions.shape[1], device=self.positions.device) < self.lengths[:, None]

    @cached_property
    def is_last(self) -> torch.Tensor:
        """[batch, tokens], true for each row's last real token, or for its first token if none is real."""
        tokens = torch.arange(self.positions.shape[1], device=self.positions.device)
        return tokens == (self.lengths - 1).clamp(min=0)[:, None]

    @cached_property
    def last_positions(self) -> torch.Tensor:
        """[batch], the position of each row's last real token."""
        return self.positions[:, 0] + self.lengths - 1

    @abstractmethod
    def read(self, state: torch.Tensor) -> torch.Tensor:
        """Each row's part of a recurrent state, [batch, ...]; it may be overwritten if `write` follows."""

    def write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [batch, ...] back into the state in place, unless the step only verifies."""
        if self.kept_inputs is None:
            self._write(state, rows)

    def keep(self, inputs: torch.Tensor) -> None:
        """Keep a Mamba layer's inputs if the step only verifies."""
        if self.kept_inputs is not None:
            self.kept_inputs.append(inputs)

    @abstractmethod
    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [batch, ...] back into the state."""


@dataclass(frozen=True)
class NullSlotStep(Step):
    """A step over recurrent state [slots, ...] whose null slot holds zeros. Rows at position 0 read the null slot.

    Rows of length 0 read and write the null slot at any position: they write back the zeros that they read.
    """

    has_null_slot = True

    @cached_property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """The arguments of fused kernels: each row's length, the slot it reads, the slot it writes or -1, and its first
        token's position; each [batch].
        """
        write_slots = self.slots if self.kept_inputs is None else torch.full_like(self.slots, -1)
        return self.lengths, self.read_slots, write_slots, self.positions[:, 0].contiguous()

    @cached_property
    def read_slots(self) -> torch.Tensor:
        """[batch], the slot that each row's recurrent state is read from."""
        begun = (self.positions[:, 0] > 0) & (self.lengths > 0)
        return self.slots.where(begun, NULL_SLOT)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        return state.index_select(0, self.read_slots)

    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        state.index_copy_(0, self.slots, rows)


@dataclass(frozen=True)
class DenseStep(Step):
    """A step over recurrent state [sequences, ...] without a null slot.

    Rows of length 0 also have their own sequence and leave its state unchanged, bit by bit: with dt = 0 it becomes
    1 * state + 0.

    Decode takes one token of every sequence, in order, and updates the state in place. Its contract: each row has begun
    (its position is above 0) or has length 0. Starting a row from zeros means selecting between zeros and its state,
    which costs as much as advancing it; so only steps of several tokens, or those that look up their sequences, do it.

    sequences: [batch], integer, all different; None if row i is sequence i.
    """

    sequences: torch.Tensor | None

    @property
    def is_decode(self) -> bool:
        """Whether the contract above holds."""
        return self.sequences is None and self.positions.shape[1] == 1

    @cached_property
    def is_fresh(self) -> torch.Tensor:
        """[batch], true for rows that start from zeros, whatever the state of their sequence."""
        return (self.positions[:, 0] == 0) & (self.lengths > 0)

    def rows_of(self, state: torch.Tensor) -> torch.Tensor:
        """Each row's part [batch, ...] of a state [sequences, ...]."""
        return state if self.sequences is None else state.index_select(0, self.sequences)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        rows = self.rows_of(state)
        if self.is_decode:
            # Not a copy in a graph. torch_xla donates tensors that are written as a whole, and loses track of views.
            return rows.clone()
        return rows.where(~self.is_fresh.view(-1, *[1] * (state.dim() - 1)), 0.0)

    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        if self.sequences is None:
            state.copy_(rows)
        else:
            state.index_copy_(0, self.sequences, rows)
