"""What runs steps of a model somewhere: the interface that engine, accuracy and benchmark know, and nothing below it.

A sequence lives in a slot of a state; slots count from 1. What a runtime gives does not depend on how a sequence was
cut into steps, on what else a step held, or on what a slot held before a row started at position 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from transformers import GenerationConfig

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.snapshot import Snapshot
from granite4_neuron.state import HybridState

Ability = Literal["all_logits", "source", "verify", "copy", "snapshot"]


@dataclass(frozen=True)
class Row:
    """Tokens that a step adds to one sequence.

    slot: where the sequence lives.
    start: its length so far.
    tokens: at least one new token.
    source: the slot that the recurrent state is read from, and that keeps it as it is; None for `slot`. The keys and
        values of the first `start` tokens are read in `slot` all the same.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    source: int | None = None


@dataclass(frozen=True)
class Verification:
    """What `Runtime.verify` found out, for `Runtime.commit`.

    logits: [rows, longest row, vocab_size], float32, after every token; unspecified where a row is shorter.
    kept_inputs: what each Mamba layer's recurrence would have taken in; the runtime's own matter.
    """

    rows: Sequence[Row]
    logits: torch.Tensor
    kept_inputs: Sequence[torch.Tensor]


class Runtime(Protocol):
    """A model with its generation defaults, ready to run steps.

    tokens_per_step: how many tokens of prompts a step takes at most, padding included; no more of one prompt pay.
    rows_per_step: how many prompts share a step at most. Single tokens of any number of sequences share one.
    tokens_per_verification: how many tokens of a row `verify` takes at most.
    own_slots: of a state that it keeps itself, slots 1 to that; 0 where `allocate` makes a state.
    cannot: what it cannot do, and why, in one sentence each: "all_logits" (of `step`), "source" (of a row), "verify"
        (and `commit`), "copy", "snapshot" (and `restore`). See `require`.
    generation_config: the checkpoint's defaults for generation.
    """

    tokens_per_step: int
    rows_per_step: int
    tokens_per_verification: int
    own_slots: int
    cannot: Mapping[Ability, str]
    generation_config: GenerationConfig

    @property
    def config(self) -> GraniteMoeHybridConfig: ...

    @property
    def max_length(self) -> int:
        """Of a sequence: the model's longest, or what it was compiled for."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of the cache."""

    @property
    def state_dtype(self) -> torch.dtype:
        """Of SSM states."""

    @property
    def is_quantized(self) -> bool:
        """Whether the large weights are int8 or int4."""

    @property
    def refusals(self) -> tuple[str, ...]:
        """A sentence for each faster way of computing that it does not take."""

    @property
    def fingerprint(self) -> str:
        """Tells this model's weights from others, see `snapshot.fingerprint`."""

    def allocate(self, num_sequences: int, max_length: int) -> HybridState | None:
        """State for slots 1 to `num_sequences`, each of up to `max_length` tokens; None where the model keeps its own.

        Raises:
            UserError: the runtime has no room for so many or so long sequences.
        """

    def step(self, state: HybridState | None, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Add each row's tokens to its sequence. No two rows have the same slot, and none reads what another writes.

        Returns:
            float32 logits after each row's last token, [rows, vocab_size]; with `all_logits` after every token,
            [rows, longest row, vocab_size], unspecified where a row is shorter.

        Raises:
            UserError: `all_logits`, or a row's source, is what this runtime cannot do.
        """

    def verify(self, state: HybridState | None, rows: Sequence[Row]) -> Verification:
        """What `step` with `all_logits` would give, while every sequence stays as long as it is.

        Recurrent state is not written. Keys and values are, behind the sequence's end, where the next step overwrites
        them. Rows have no source, and `tokens_per_verification` tokens at most.
        """

    def commit(self, state: HybridState | None, verification: Verification, accepted: Sequence[int]) -> None:
        """Add the first `accepted[i]` tokens, 0 to all, of row i of a verification to its sequence.

        Nothing may have been added to those sequences in between. What it costs does not depend on their length.
        """

    def copy(self, state: HybridState | None, source: int, destination: int, length: int) -> None:
        """Make slot `destination` hold what slot `source` holds of a sequence of `length` tokens."""

    def snapshot(self, state: HybridState | None, slot: int, length: int, start: int = 0) -> Snapshot:
        """A copy of what a slot holds of a sequence of `length` tokens: the recurrent state after the last of them, and
        the keys and values of all; of those from position `start` on where others are kept already.
        """

    def restore(self, state: HybridState | None, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Make a slot hold a sequence as it was: that of one snapshot, or of several where each starts at the length of
        the one before. It goes on as the original does, bit by bit.

        Raises:
            UserError: a snapshot is of another model or dtype, or longer than the state.
        """


def require(runtime: Runtime, ability: Ability) -> None:
    """See, before any work, whether a runtime can do something.

    Raises:
        UserError: it cannot; the message says why.
    """
    if ability in runtime.cannot:
        raise UserError(runtime.cannot[ability])


def step_inputs(rows: Sequence[Row], tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows as the model takes them, padded on the right: input_ids, positions [rows, tokens]; lengths, slots [rows]."""
    input_ids = torch.tensor([[*row.tokens, *[0] * (tokens - len(row.tokens))] for row in rows])
    positions = torch.tensor([[row.start] for row in rows]) + torch.arange(tokens)
    lengths = torch.tensor([len(row.tokens) for row in rows])
    return input_ids, positions, lengths, torch.tensor([row.slot for row in rows])


def sources(rows: Sequence[Row]) -> torch.Tensor | None:
    """The slots that rows read their recurrent state from, [rows]; None where each reads its own."""
    if all(row.source is None for row in rows):
        return None
    return torch.tensor([row.slot if row.source is None else row.source for row in rows])


def check_verification(runtime: Runtime, rows: Sequence[Row]) -> None:
    """See whether a runtime verifies these rows.

    Raises:
        ValueError: one has a source, or too many tokens.
    """
    longest = max(len(row.tokens) for row in rows)
    if longest > runtime.tokens_per_verification:
        raise ValueError(
            f"{longest} tokens of a row are to be verified; at most {runtime.tokens_per_verification} can."
        )
    if any(row.source is not None for row in rows):
        raise ValueError("rows that are verified read their state in their own slot.")


def accepted_rows(rows: Sequence[Row], accepted: Sequence[int]) -> list[Row]:
    """A verification's rows with their first `accepted[i]` tokens only.

    Raises:
        ValueError: there are fewer tokens than that in a row.
    """
    for row, count in zip(rows, accepted, strict=True):
        if not 0 <= count <= len(row.tokens):
            raise ValueError(f"{count} tokens are accepted of a row of {len(row.tokens)}.")
    return [Row(row.slot, row.start, row.tokens[:count]) for row, count in zip(rows, accepted, strict=True)]
