"""What all layers of one step share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from granite4_neuron.ops.launch_parameters import HEURISTIC, LaunchParameters
from granite4_neuron.state import NULL_SLOT


@dataclass(frozen=True)
class Step(ABC):
    """Which tokens a step adds to which sequences. Its kinds differ in where the rows' recurrent state lies.

    positions: [batch, tokens], each token's place in its sequence, consecutive within a row.
    lengths: [batch], how many of a row's tokens are real; the rest is padding on the right.
    slots: [batch], each row's slot in the caches of keys and values.
    kv_length: how many cache entries attention visits; above every real position.
    launch_parameters: how the kernels of a CPU cut up the step; other devices have their own constants.
    kept_inputs: None, or of a step that verifies: recurrent state stays as it is, and what the recurrence of each Mamba
        layer would take in is collected here, for `Mamba2.advance`.
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
        """[batch, tokens], true for each row's last real token; for the first where a row has none."""
        tokens = torch.arange(self.positions.shape[1], device=self.positions.device)
        return tokens == (self.lengths - 1).clamp(min=0)[:, None]

    @cached_property
    def last_positions(self) -> torch.Tensor:
        """[batch], of each row's last real token."""
        return self.positions[:, 0] + self.lengths - 1

    @abstractmethod
    def read(self, state: torch.Tensor) -> torch.Tensor:
        """Each row's own part of a recurrent state, [batch, ...], to be overwritten at will if `write` follows."""

    def write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows [batch, ...] back to where they live, in place, unless the step only verifies."""
        if self.kept_inputs is None:
            self._write(state, rows)

    def keep(self, inputs: torch.Tensor) -> None:
        """Remember a Mamba layer's inputs if the step only verifies."""
        if self.kept_inputs is not None:
            self.kept_inputs.append(inputs)

    @abstractmethod
    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows back."""


@dataclass(frozen=True)
class NullSlotStep(Step):
    """Over recurrent state [slots, ...] whose null slot holds zeros: rows at position 0 read it.

    Rows of length 0 have the null slot for their own, at any position: they write back the zeros that they read.

    sources: [batch], the slots that rows at other positions read; None for their own.
    """

    sources: torch.Tensor | None = field(default=None, kw_only=True)

    has_null_slot = True

    @cached_property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """Each row's length, where its recurrent state is read, and written or -1, and its first token's position, as
        fused kernels take them.
        """
        write_slots = self.slots if self.kept_inputs is None else torch.full_like(self.slots, -1)
        return self.lengths, self.read_slots, write_slots, self.positions[:, 0].contiguous()

    @cached_property
    def read_slots(self) -> torch.Tensor:
        """[batch], where each row's recurrent state is read."""
        begun = (self.positions[:, 0] > 0) & (self.lengths > 0)
        return (self.slots if self.sources is None else self.sources).where(begun, NULL_SLOT)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        return state.index_select(0, self.read_slots)

    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        state.index_copy_(0, self.slots, rows)


@dataclass(frozen=True)
class DenseStep(Step):
    """Over recurrent state [sequences, ...], without a null slot.

    Rows of length 0 have a sequence of their own too, and leave its state as it is, bit by bit: with dt = 0 it becomes
    1 * state + 0.

    Decode takes all sequences in their order, one token of each, and works on the state where it lies. Its contract:
    each row has begun (its position is above 0), or it is of length 0. To start a row from zeros is to select between
    them and its state, which costs as much as to advance it: that is left to steps of several tokens, and to those that
    look their sequences up.

    sequences: [batch], no two the same; None if row i is sequence i.
    sources: [batch], the sequences whose state rows read; None for their own.
    """

    sequences: torch.Tensor | None
    sources: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def is_decode(self) -> bool:
        """Whether the contract above holds."""
        return self.sequences is None and self.positions.shape[1] == 1

    @cached_property
    def is_fresh(self) -> torch.Tensor:
        """[batch], true for rows that start from zeros, whatever their sequence's state holds."""
        return (self.positions[:, 0] == 0) & (self.lengths > 0)

    def rows_of(self, state: torch.Tensor) -> torch.Tensor:
        """What any state [sequences, ...] holds of each row, [batch, ...]."""
        return state if self.sequences is None else state.index_select(0, self.sequences)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        rows = self.rows_of(state) if self.sources is None else state.index_select(0, self.sources)
        if self.is_decode:
            # In a graph no copy. torch_xla donates what is written as a whole, and loses track of views of it.
            return rows.clone()
        return rows.where(~self.is_fresh.view(-1, *[1] * (state.dim() - 1)), 0.0)

    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        if self.sequences is None:
            state.copy_(rows)
        else:
            state.index_copy_(0, self.sequences, rows)
