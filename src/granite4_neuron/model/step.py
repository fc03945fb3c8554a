"""A step's tokens and slots, which all layers share."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState


class Step(ABC):
    """Tokens that a step adds, and the sequences they belong to. Subclasses differ in the recurrent state's layout.

    All tensors are computed when the step is made, so that a step can be traced whole.

    A Mamba layer gets its rows' state from `read` and gives it back to `write`. With a null slot (`NullSlotStep`) these
    are state[read_slots] and state[slots] = rows. Without one (`DenseStep`) both use state[sequences], or the whole
    state if the rows are all sequences in order; new sequences read zeros.

    Args:
        positions: [batch, tokens], integer, each token's position in its sequence, consecutive within a row.
        lengths: [batch], integer, how many of a row's tokens are real; the rest is padding on the right.
        slots: [batch], integer, each row's slot in the caches of keys and values.
        kv_length: how many cache entries attention visits; above every real position.
        verifies: whether the step leaves recurrent state as it is, for `Mamba2.advance`.
        adapters: [batch], int64, the number of each row's adapter, 0 for none; None for a step without adapters.
        in_order: whether row i is in slot i + 1, so that no row of a cache has to be looked up. A row without tokens
            may still be in the null slot.

    Attributes:
        is_real: [batch, tokens], false for padding.
        looked_up: [batch], the slot of each row's recurrent state, for kernels that look it up; None if they need not.
    """

    looked_up: torch.Tensor | None = None
    has_null_slot: ClassVar[bool] = False

    def __init__(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        kv_length: int,
        *,
        verifies: bool = False,
        adapters: torch.Tensor | None = None,
        in_order: bool = False,
    ):
        self.positions, self.lengths, self.slots = positions, lengths, slots
        self.adapters = adapters
        self.kv_length, self.verifies, self.in_order = kv_length, verifies, in_order
        self.is_real = self._are_real()

    def _are_real(self) -> torch.Tensor:
        return self._offsets() < self.lengths[:, None]

    @property
    def is_decode(self) -> bool:
        """Whether it is one token of each row, of a state without a null slot; see `DenseStep`."""
        return False

    @property
    def is_last(self) -> torch.Tensor:
        """[batch, tokens], true for each row's last real token, or for its first token if none is real."""
        return self._offsets() == (self.lengths - 1).clamp(min=0)[:, None]

    def last_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Select each row's last real token: [batch, tokens, hidden_size] to [rows, hidden_size]."""
        if hidden_states.shape[1] == 1:
            return hidden_states[:, 0]
        # By a mask and not by an index: compilers for static shapes handle masks better.
        return hidden_states.masked_fill(~self.is_last[..., None], 0.0).sum(1)

    def _offsets(self) -> torch.Tensor:
        """Return each token's number in its row, [tokens]."""
        return torch.arange(self.positions.shape[1], dtype=self.positions.dtype, device=self.positions.device)

    @property
    def starts(self) -> torch.Tensor:
        """[batch], the position of each row's first token."""
        return self.positions[:, 0]

    @property
    def last_positions(self) -> torch.Tensor:
        """[batch], the position of each row's last real token."""
        return self.starts + self.lengths - 1

    def rows(self) -> dict[str, torch.Tensor]:
        """Return arguments of fused kernels, each [batch]: where each row begins among all of the step's tokens, how
        many of its tokens are real, and its place in the state.

        Raises:
            ValueError: the state has no null slot.
        """
        raise ValueError("fused layers take a state with a null slot; allocate one, or bind the model without them.")

    @abstractmethod
    def read(self, state: torch.Tensor) -> torch.Tensor:
        """Return each row's part of a recurrent state, [batch, ...]; it may be overwritten if `write` follows."""

    def write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [batch, ...] back into the state in place, unless the step verifies."""
        if not self.verifies:
            self._write(state, rows)

    @abstractmethod
    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [batch, ...] back into the state."""


class NullSlotStep(Step):
    """A step over recurrent state [slots, ...] whose null slot holds zeros. Rows at position 0 read the null slot.

    Rows of length 0 read and write the null slot at any position: they write back the zeros that they read.

    Attributes:
        read_slots: [batch], the slot that each row's recurrent state is read from.
    """

    has_null_slot = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.read_slots = self._read_slots()

    def _read_slots(self) -> torch.Tensor:
        begun = (self.starts > 0) & (self.lengths > 0)
        return self.slots.where(begun, NULL_SLOT)

    def rows(self) -> dict[str, torch.Tensor]:
        """Return arguments of fused kernels. write_slots is -1, for nowhere, if the step verifies."""
        write_slots = torch.full_like(self.slots, -1) if self.verifies else self.slots
        return {
            "offsets": self._row_offsets(),
            "lengths": self.lengths,
            "read_slots": self.read_slots,
            "write_slots": write_slots,
            "starts": self.starts.contiguous(),
        }

    def _row_offsets(self) -> torch.Tensor:
        """Return the number of each row's first token among all of the step's, [batch]."""
        batch, tokens = self.positions.shape
        return torch.arange(batch) * tokens

    def read(self, state: torch.Tensor) -> torch.Tensor:
        return state.index_select(0, self.read_slots)

    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        state.index_copy_(0, self.slots, rows)


class PackedStep(NullSlotStep):
    """A step whose rows have different lengths and no padding: all tokens are side by side, as a batch of one. It is
    for fused layers, which look up each row's tokens. It is made of numbers on the host, and not traced. A step that is
    one call takes these; the tensors, which take as long as a layer of a small model, are made when one is needed.

    Args:
        starts: the position of each row's first token.
        lengths, slots: of each row; no length is 0.
        kv_length: as for other steps.
        adapters: [rows], int64, or None.

    Attributes:
        on_host: starts, lengths and slots.

    Source: the layout of flash-attention's functions for sequences of varying length.
    """

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        kv_length: int,
        *,
        adapters: torch.Tensor | None = None,
    ):
        self.on_host = {"starts": starts, "lengths": lengths, "slots": slots}
        self.kv_length, self.adapters = kv_length, adapters

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("__") or "positions" in vars(self):  # the tensors are made
            raise AttributeError(name)
        self._make_tensors(**self.on_host)
        return getattr(self, name)

    def _make_tensors(self, starts: Sequence[int], lengths: Sequence[int], slots: Sequence[int]) -> None:
        *firsts, _ = itertools.accumulate(lengths, initial=0)
        read_slots = [slot if start else NULL_SLOT for slot, start in zip(slots, starts, strict=True)]
        numbers = torch.tensor([starts, lengths, slots, read_slots, firsts])
        self._row_starts, row_lengths, row_slots, self._rows_read, self._first_tokens = numbers.unbind()
        rows = zip(starts, lengths, strict=True)
        positions = torch.tensor([[place for start, length in rows for place in range(start, start + length)]])
        super().__init__(positions, row_lengths, row_slots, self.kv_length, adapters=self.adapters)

    def _are_real(self) -> torch.Tensor:
        return torch.ones_like(self.positions, dtype=torch.bool)

    def _read_slots(self) -> torch.Tensor:
        return self._rows_read

    @property
    def starts(self) -> torch.Tensor:
        return self._row_starts

    def last_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[0, self._first_tokens + self.lengths - 1]

    def _row_offsets(self) -> torch.Tensor:
        return self._first_tokens


class DenseStep(Step):
    """A step over recurrent state [sequences, ...] without a null slot.

    Rows of length 0 also belong to a sequence of their own. They leave its state unchanged, bit by bit: with dt = 0 it
    becomes 1 * state + 0.

    Decode takes one token of each row and updates the state in place. Its contract: each row has begun (its position is
    above 0) or has length 0. Starting a row from zeros means selecting between zeros and its state, which costs as much
    as advancing it; so only other steps do it.

    Args:
        sequences: [batch], integer, all different; None if row i is sequence i, and then a step of one token is decode.
        decodes: whether a step of one token is decode, if there are `sequences`.

    Attributes:
        is_fresh: [batch], true for rows that start from zeros, whatever the state of their sequence.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        kv_length: int,
        sequences: torch.Tensor | None,
        *,
        verifies: bool = False,
        in_order: bool = False,
        decodes: bool = False,
    ):
        super().__init__(positions, lengths, slots, kv_length, verifies=verifies, in_order=in_order)
        self.sequences, self.decodes = sequences, decodes or sequences is None
        self.is_fresh = (self.starts == 0) & (lengths > 0)

    @property
    def is_decode(self) -> bool:
        """Whether the contract above holds."""
        return self.decodes and self.positions.shape[1] == 1

    def rows_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return each row's part [batch, ...] of a state [sequences, ...]."""
        return state if self.sequences is None else state.index_select(0, self.sequences)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        rows = self.rows_of(state)
        if self.is_decode:
            # No copy in a graph: torch_xla donates only tensors that are written as a whole, and loses track of views.
            return rows.clone()
        return rows.where(~self.is_fresh.view(-1, *[1] * (state.dim() - 1)), 0.0)

    def _write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        if self.sequences is None:
            state.copy_(rows)
        else:
            # Not index_copy_, which is lowered for Neuron with an index as large as the state.
            state[self.sequences] = rows


def step_of(
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    state: HybridState,
    *,
    kv_length: int | None = None,
    adapters: torch.Tensor | None = None,
    verifies: bool = False,
) -> Step:
    """Return the kind of step that a state needs, for rows that are padded to one length.

    Args:
        positions: [batch, tokens], int64, each token's place in its sequence, consecutive within a row. A row whose
            first position is 0 starts from zeros, whatever its slot held.
        lengths: [batch], int64, 0 to tokens: how many of a row's tokens are real; the rest is padding on the right.
        slots: [batch], int64; no two rows with real tokens share one, and none of them is the null slot. If
            `state.has_null_slot` is false this also holds for rows of length 0. None if there is one row per sequence
            of the state, in the order of the slots; a step of one token then has a contract, see `DenseStep`.
        kv_length: how many cache entries attention visits, above every real position; None for all of them.
        adapters: [batch], int64, the number of each row's adapter, 0 for none; None for a step without adapters.
        verifies: whether the tokens may be taken back: keys and values are written, recurrent state is not.
    """
    if slots is None:
        row_slots = torch.arange(1, state.num_sequences + 1, dtype=positions.dtype, device=positions.device)
    else:
        row_slots = slots
    cache_slots = row_slots.where(lengths > 0, NULL_SLOT)
    index = (positions, lengths, cache_slots, state.max_length if kv_length is None else kv_length)
    if state.has_null_slot:
        return NullSlotStep(*index, verifies=verifies, adapters=adapters)
    sequences = None if slots is None else slots - 1
    return DenseStep(*index, sequences, verifies=verifies, in_order=slots is None)
