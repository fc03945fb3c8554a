"""The interface of a runtime, which runs steps of a model. Engine, accuracy check and benchmark use nothing below it.

A sequence has a slot of a state; slots count from 1. A runtime's results do not depend, beyond rounding, on how a
sequence is cut into steps, nor on other rows of a step or on the contents of a slot before a row starts at position 0.
Where a prompt may be cut without any difference, `Runtime.prompt_cuts` tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from transformers import GenerationConfig

from granite4_neuron.config import ModelConfig
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.ops.xla import topk
from granite4_neuron.runtime.prompt_cuts import PromptCuts
from granite4_neuron.state.fingerprint import Fingerprint
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Layout, Snapshot

Ability = Literal["all_logits", "verify", "copy", "snapshot", "decode", "adapters"]
State = TypeVar("State", bound=HybridState | None)
MOST_TOP_K, UNDECIDED = topk.MOST_TOP_K, topk.UNDECIDED  # see `Draw` and `Decoded`
CHOSEN = -1  # in `Row.tokens`, see `Runtime.decode`
MOST_STOPS = 4  # of a row
StepInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # of `step_inputs` and `packed_inputs`


class Draw(NamedTuple):
    """How a row's token is drawn, by transformers' logits warpers in this order.

    temperature: above 0.
    top_k: at most `MOST_TOP_K`; 0 for none.
    top_p: 1 for none.
    min_p: 0 for none.
    noise: [vocab_size] in float32; of probabilities p the highest p / noise is drawn.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    noise: torch.Tensor


@dataclass(frozen=True)
class Row:
    """Tokens that a step adds to one sequence: a prompt or any piece of it, or tokens behind it, one or several.

    slot: of the sequence.
    start: the sequence's length so far.
    tokens: at least one new token.
    adapter: the number of the runtime's adapter that applies to all of them, from 1 on; 0 for none.
    stops: at most `MOST_STOPS` tokens; see `Runtime.decode`.
    draw: how `Runtime.decode` chooses the token that follows; None for the likeliest.
    is_prompt: whether they are a prompt or a piece of one, which may then be a single token.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    adapter: int = 0
    stops: Sequence[int] = ()
    draw: Draw | None = None
    is_prompt: bool = False


@dataclass(frozen=True)
class Verification:
    """The result of `Runtime.verify`, for `Runtime.commit`.

    logits: [rows, longest row, vocab_size], float32, after every token; unspecified beyond a shorter row.
    kept_inputs: the inputs of each Mamba layer's recurrence, in a form that only the runtime knows.
    """

    rows: Sequence[Row]
    logits: torch.Tensor
    kept_inputs: Sequence[torch.Tensor]


class Decoded(Protocol):
    """The result of `Runtime.decode`, on the device. It is read when it is asked for, also after later calls."""

    def tokens(self) -> Sequence[int]:
        """Return each row's token: the likeliest one, of equal ones the first, or that of its draw. It is -1 where the
        highest logit is not finite or one is NaN, and `UNDECIDED` where the host has to draw, because another way of
        rounding might draw another token. It waits for that step, and copies 4 bytes of each slot.
        """

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the float32 logits of rows, by their numbers: [len(rows), vocab_size]."""


class Runtime(Protocol[State]):
    """A model with its generation defaults, ready to run steps.

    State is what `allocate` returns and the other methods take: a `HybridState`, or None where the runtime keeps its
    state itself.

    All attributes are read-only.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def generation_config(self) -> GenerationConfig:
        """The checkpoint's defaults for generation."""

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """By name; a row has the number of its adapter."""

    @property
    def cannot(self) -> Mapping[Ability, str]:
        """A sentence for each ability that it lacks, saying why: "all_logits" (of `step`), "verify" (and `commit`),
        "copy", "snapshot" (and `slot_layout`, `restore`), "decode", "adapters" (`load_adapter` and `unload_adapter`).
        See `require`.
        """

    @property
    def tokens_per_step(self) -> int:
        """The most prompt tokens of a step, with the padding of a runtime that does not pack rows."""

    @property
    def rows_per_step(self) -> int:
        """The most prompts of a step. Single tokens of any number of sequences share a step."""

    @property
    def tokens_per_verification(self) -> int:
        """The most tokens of a row in `verify`."""

    @property
    def own_slots(self) -> int:
        """The number of slots of a state that the runtime keeps itself; 0 if `allocate` makes a state."""

    @property
    def prompt_cuts(self) -> PromptCuts:
        """Where a prompt may be cut without changing its numbers. It is `ANYWHERE` if a sequence's results are the same
        bit by bit however all its tokens are cut into steps, those of its answer too.
        """

    @property
    def packs_rows(self) -> bool:
        """Whether rows of different lengths share a step without padding: then a step of a prompt's piece and of other
        sequences' tokens reads the weights once for both. Such a runtime is exact at any cut.
        """

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence: the model's longest, or the most that it was compiled for."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of the cache."""

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of SSM states."""

    @property
    def is_quantized(self) -> bool:
        """Whether the large weights are quantized."""

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """A sentence for each faster way of computing that it does not take."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Tells its states from those of other weights, and from those that other kernels have computed."""

    def allocate(self, num_sequences: int, max_length: int) -> State:
        """Allocate slots 1 to `num_sequences`, of up to `max_length` tokens each.

        Raises:
            UserError: the runtime has no room for so many or so long sequences.
        """

    def warm_up(self, state: State, verified_tokens: int = 0) -> None:
        """Compile all that `step` needs with this state, and `verify` and `commit` of rows of up to `verified_tokens`
        tokens, so that none of them waits for it. No slot changes.
        """

    def step(self, state: State, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Add each row's tokens to its sequence. No two rows have the same slot. Rows may differ in length, and in
        whether their sequence has begun.

        Returns:
            float32 logits after each row's last token, [rows, vocab_size]; with `all_logits` after every token,
            [rows, longest row, vocab_size], unspecified where a row is shorter.

        Raises:
            UserError: this runtime cannot do `all_logits`.
        """

    def decode(self, state: State, rows: Sequence[Row]) -> Decoded:
        """Do as `step` for rows of one token whose sequences have begun, and leave the results on the device. It may
        return before the device has finished.

        A row's token may be `CHOSEN`: that of `Decoded.tokens` after the last call, which was this one, and in which
        the sequence had a row. So a step can begin before the host knows its tokens. If that token is one of the row's
        stops, -1 or `UNDECIDED`, nothing is added to the sequence, and the row's results are unspecified.
        """

    def verify(self, state: State, rows: Sequence[Row]) -> Verification:
        """Return the logits of `step` with `all_logits`, without making the sequences longer.

        It does not write recurrent state. It writes keys and values after the sequence's end, where the next step
        overwrites them. Rows have at most `tokens_per_verification` tokens.
        """

    def commit(self, state: State, verification: Verification, accepted: Sequence[int]) -> None:
        """Add the first `accepted[i]` tokens, 0 to all, of row i of a verification to its sequence.

        Nothing may have been added to those sequences since. The cost does not depend on their length.
        """

    def copy(self, state: State, source: int, destination: int, length: int) -> None:
        """Copy a sequence of `length` tokens from slot `source` to slot `destination`."""

    def snapshot(self, state: State, slot: int, length: int, start: int = 0) -> Snapshot:
        """Return a copy of a slot with a sequence of `length` tokens: the recurrent state after the last of them, and
        the keys and values from position `start` on.
        """

    def prepare_snapshot(self, is_wanted: bool) -> None:
        """Hold memory for the recurrent state of the next snapshot, so that taking it is no more than a copy; or hold
        none. A runtime may do nothing.
        """

    def slot_layout(self, start: int, length: int) -> Layout:
        """Return the shape and dtype of each tensor of a snapshot of positions `start` to `length` - 1."""

    def restore(self, state: State, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Restore a sequence into a slot, from one snapshot or from several, each of which starts at the length of the
        one before it. The sequence continues exactly as the original, bit by bit.

        Raises:
            UserError: a snapshot is of another model or dtype, or longer than the state.
        """

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Add an adapter of this model, for sequences that begin from now on."""

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter that no sequence uses."""


def require(runtime: Runtime, ability: Ability) -> None:
    """Check, before any work, that a runtime has an ability.

    Raises:
        UserError: it lacks it; the message says why.
    """
    if ability in runtime.cannot:
        raise UserError(runtime.cannot[ability])


def adapters_of(rows: Sequence[Row]) -> torch.Tensor | None:
    """Return the number of each row's adapter, [rows]; None if no row has one."""
    numbers = [row.adapter for row in rows]
    return torch.tensor(numbers) if any(numbers) else None


def step_inputs(rows: Sequence[Row], tokens: int, dtype: torch.dtype = torch.int64) -> StepInputs:
    """Pad rows on the right to the model's inputs: input_ids, positions [rows, tokens]; lengths, slots [rows]."""
    return (
        torch.tensor([[*row.tokens, *[0] * (tokens - len(row.tokens))] for row in rows], dtype=dtype),
        torch.tensor([list(range(row.start, row.start + tokens)) for row in rows], dtype=dtype),
        torch.tensor([len(row.tokens) for row in rows], dtype=dtype),
        torch.tensor([row.slot for row in rows], dtype=dtype),
    )


def packed_inputs(rows: Sequence[Row]) -> StepInputs:
    """Put rows one after another for `forward_packed`: input_ids, positions [tokens]; lengths, slots [rows]."""
    return (
        torch.tensor([token for row in rows for token in row.tokens]),
        torch.cat([torch.arange(row.start, row.start + len(row.tokens)) for row in rows]),
        torch.tensor([len(row.tokens) for row in rows]),
        torch.tensor([row.slot for row in rows]),
    )


def check_verification(runtime: Runtime, rows: Sequence[Row]) -> None:
    """Check that a runtime can verify these rows.

    Raises:
        ValueError: one has too many tokens.
    """
    longest = max(len(row.tokens) for row in rows)
    if longest > runtime.tokens_per_verification:
        raise ValueError(
            f"{longest} tokens of a row are to be verified; at most {runtime.tokens_per_verification} can."
        )


def accepted_rows(rows: Sequence[Row], accepted: Sequence[int]) -> list[Row]:
    """Return a verification's rows with their first `accepted[i]` tokens only.

    Raises:
        ValueError: there are fewer tokens than that in a row.
    """
    for row, count in zip(rows, accepted, strict=True):
        if not 0 <= count <= len(row.tokens):
            raise ValueError(f"{count} tokens are accepted of a row of {len(row.tokens)}.")
    return [replace(row, tokens=row.tokens[:count]) for row, count in zip(rows, accepted, strict=True)]
