"""The interface of a runtime, which runs steps of a model. Engine, accuracy check and benchmark use no lower layer.

A sequence has a slot of a state; slots count from 1. A runtime's results do not depend, beyond rounding, on how a
sequence is cut into steps, nor on other rows of a step or on the contents of a slot before a row starts at position 0.
`Runtime.prompt_cuts` says where a prompt may be cut without any difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from transformers import GenerationConfig

from granite4_neuron.config import ModelConfig
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.ops.sampling import Choice, Logprobs
from granite4_neuron.runtime.prompt_cuts import PromptCuts
from granite4_neuron.state.fingerprint import Fingerprint
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Layout, Snapshot

Ability = Literal["all_logits", "verify", "hidden_states", "copy", "snapshot", "decode", "choices", "adapters"]
State = TypeVar("State", bound=HybridState | None)
UNDECIDED = -2  # in place of a token, see `Decoded`
FROM_DEVICE = -1  # in `Row.tokens`, see `Runtime.decode`
MOST_STOPS = 4  # of a row
StepInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # of `step_inputs`


@dataclass(frozen=True)
class Row:
    """Tokens that a step adds to one sequence: a prompt or any piece of it, or one or several tokens after it.

    slot: of the sequence.
    start: the sequence's length so far.
    tokens: at least one new token.
    adapter: the number of the runtime's adapter that applies to all of them, from 1 on; 0 for none.
    stops: at most `MOST_STOPS` tokens; see `Runtime.decode`.
    draw: how `Runtime.decode` chooses the next token, but for its place, which is the row's end; None for the
        likeliest. Without the ability "choices" it has temperature, top_k, top_p and min_p alone, and never typical_p
        and `forbidden`. In rows of one sequence only mask and allowed differ.
    counts: returns tokens and counts of its penalties, for the tokens before the row's own; None without penalties.
    is_prompt: whether the tokens are a prompt or a piece of one, which may be a single token.
    sequence: a number of at least 0 that no other sequence has; -1 for none.
    is_kept: whether `Runtime.snapshot` is likely to be called after the step, with positions from `start` on, so that
        `step` may copy the state while the host waits for logits.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    adapter: int = 0
    stops: Sequence[int] = ()
    draw: Choice | None = None
    counts: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    is_prompt: bool = False
    sequence: int = -1
    is_kept: bool = False


@dataclass(frozen=True)
class Verification:
    """The result of `Runtime.verify`, for `Runtime.commit`.

    logits: [rows, longest row, vocab_size], float32, after every token; unspecified beyond a shorter row.
    kept_inputs: the inputs of each Mamba layer's recurrence, in a form that only the runtime knows.
    hidden_states: [rows, longest row, hidden_size], the head's input for every token, in the model's dtype; unspecified
        beyond a shorter row. None if the runtime lacks the ability "hidden_states".
    """

    rows: Sequence[Row]
    logits: torch.Tensor
    kept_inputs: Sequence[torch.Tensor]
    hidden_states: torch.Tensor | None = None


class Decoded(Protocol):
    """The result of `Runtime.decode`, on the device. It may be read after later calls too."""

    def tokens(self) -> Sequence[int]:
        """Return each row's token: the likeliest one (the first of equal ones), or the one that `Row.draw`
        chooses.

        The token is -1 if the highest logit is not finite or any logit is NaN. It is `UNDECIDED` if the host has to
        choose, because another rounding might draw another token, or the options leave none. The call waits for the
        step, and copies 4 bytes per slot.
        """

    def reports(self) -> Sequence[Logprobs | None]:
        """Return the report on each row's token that `Row.draw` asks for; unspecified for a token below 0."""

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the float32 logits of rows, by their numbers: [len(rows), vocab_size]."""


class MTPLayers(Protocol):
    """A model's layers for multi-token prediction, see `model.mtp`: they predict the token after the next one."""

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        """Allocate slots 1 to `num_sequences` of their own cache, of up to `max_length` rows each."""

    def step(self, state: HybridState, rows: Sequence[Row], hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add rows to sequences, each from any row on that its cache has: what was behind it there is lost.

        Args:
            rows: with the token that follows each hidden state; their starts count rows of the cache.
            hidden_states: for each row [its tokens, hidden_size]: the model's, see `Runtime.step_with_hidden_states`,
                or results of this function.

        Returns:
            The last result of each row, [rows, hidden_size].
        """

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what these results predict: [rows, vocab_size], float32."""


@runtime_checkable
class HasMTP(Protocol):
    """A runtime that can run layers for multi-token prediction."""

    @property
    def mtp(self) -> MTPLayers | None:
        """Those of its model; None if it was loaded without them."""


class Runtime(Protocol[State]):
    """A model with its generation defaults, ready to run steps.

    State is what `allocate` returns and the other methods take: a `HybridState`, or None if the runtime keeps its own
    state.

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
        """For each ability that it lacks, a sentence that says why: "all_logits" (of `step`), "verify" (and `commit`),
        "hidden_states" (`step_with_hidden_states`, and those of `Verification`), "copy", "snapshot" (and `slot_layout`,
        `restore`), "decode", "choices" (all options of `Row.draw`), "adapters" (`load_adapter` and `unload_adapter`).
        See `require`.
        """

    @property
    def tokens_per_step(self) -> int:
        """The most prompt tokens of a step that is not long, including the padding of a runtime that does not pack
        rows. Prompts are cut at its multiples, unless a step is long.
        """

    @property
    def tokens_per_long_step(self) -> int:
        """The most tokens of a step with a part of one prompt whose numbers do not depend on where it is cut:
        `tokens_per_step` or more. Long prompts take less time in such steps, and others wait longer.
        """

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
        """Where a prompt may be cut without changing its numbers. It is `ANYWHERE` if a sequence's results are
        bit-identical however its tokens, also generated ones, are cut into steps.
        """

    @property
    def packs_rows(self) -> bool:
        """Whether rows of different lengths share a step without padding. Then a step with a prompt's piece and with
        other sequences' tokens reads the weights once for both. Such a runtime is exact at any cut.
        """

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence: the model's limit, or the most that it was compiled for."""

    @property
    def begins_snapshots(self) -> bool:
        """Whether `step` begins the snapshots of rows that are kept, see `Row`; then `snapshot` only returns them."""

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
        """For each faster implementation that it does not use, a sentence that says why."""

    @property
    def sampling(self) -> ModuleType | None:
        """How tokens are chosen from logits on the host: `ops.sampling` or a form of it; None for the fastest there."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Distinguishes its states from states of other weights, kernels or options."""

    def sequences_that_fit(self, max_length: int) -> int | None:
        """Return how many sequences of up to `max_length` tokens there is room for, which may be none: its own slots,
        or as many as half of the memory holds that states can take now. None if that is not known.
        """

    def allocate(self, num_sequences: int, max_length: int) -> State:
        """Allocate slots 1 to `num_sequences`, of up to `max_length` tokens each.

        Raises:
            UserError: the runtime has no room for so many or so long sequences.
        """

    def warm_up(self, state: State, verified_tokens: int = 0) -> None:
        """Compile everything that `step` needs with this state, and `verify` and `commit` with rows of up to
        `verified_tokens` tokens, so that later calls do not wait for a compiler. No slot changes.
        """

    def step(self, state: State, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Add each row's tokens to its sequence. No two rows have the same slot. Rows may differ in length, and some
        sequences may have begun while others have not.

        Returns:
            float32 logits after each row's last token, [rows, vocab_size]; with `all_logits` after every token,
            [rows, longest row, vocab_size], unspecified beyond a shorter row.

        Raises:
            UserError: this runtime cannot do `all_logits`.
        """

    def step_with_hidden_states(
        self, state: State, rows: Sequence[Row], all_logits: bool = False
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Like `step`, and also return the final hidden states, which the head reads: of each row
        [its tokens, hidden_size] in the model's dtype, after its last norm.
        """

    def decode(self, state: State, rows: Sequence[Row]) -> Decoded:
        """Like `step`, for rows of one token whose sequences have begun, but leave the results on the device. The call
        may return before the device has finished.

        A row's token may be `FROM_DEVICE`: the sequence's token in `Decoded.tokens` of the previous call, which must
        have been `decode` with a row for this sequence. So a step can begin before the host knows its tokens. If that
        token is one of the row's stops, -1 or `UNDECIDED`, nothing is added to the sequence, and the row's results are
        unspecified.
        """

    def verify(self, state: State, rows: Sequence[Row]) -> Verification:
        """Return the logits of `step` with `all_logits` without extending the sequences.

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
        """Preallocate memory for the recurrent state of the next snapshot, so that taking it is only a copy; or release
        that memory. A runtime may do nothing.
        """

    def slot_layout(self, start: int, length: int) -> Layout:
        """Return the shape and dtype of each tensor of a snapshot of positions `start` to `length` - 1."""

    def restore(self, state: State, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Restore a sequence into a slot from one snapshot or several, each of which starts at the length of the
        previous one. The sequence continues exactly as the original, bit by bit.

        Raises:
            UserError: a snapshot belongs to another model or dtype, or is longer than the state.
        """

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Add an adapter of this model, for sequences that begin from now on."""

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter that no sequence uses."""


def _refused(ability: Ability) -> Callable[..., Any]:
    def refuse(self: Refusals, *arguments: object, **named: object) -> NoReturn:
        raise UserError(self.cannot[ability])

    return refuse


class Refusals:
    """The methods that need an ability: they raise UserError, and the message says why the runtime lacks it.

    A `Runtime` that is derived from this overrides those that it has.
    """

    cannot: Mapping[Ability, str]
    step_with_hidden_states = _refused("hidden_states")
    decode = _refused("decode")
    verify = commit = _refused("verify")
    snapshot = prepare_snapshot = slot_layout = restore = _refused("snapshot")
    load_adapter = unload_adapter = _refused("adapters")


def require(runtime: Runtime, ability: Ability) -> None:
    """Check, before any work, that a runtime has an ability.

    Raises:
        UserError: it lacks the ability; the message says why.
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


def check_verification(runtime: Runtime, rows: Sequence[Row]) -> None:
    """Check that a runtime can verify these rows; raise ValueError if a row has too many tokens."""
    longest = max(len(row.tokens) for row in rows)
    if longest > runtime.tokens_per_verification:
        raise ValueError(
            f"{longest} tokens of a row are to be verified; at most {runtime.tokens_per_verification} can."
        )


def accepted_rows(rows: Sequence[Row], accepted: Sequence[int]) -> list[Row]:
    """Return a verification's rows with their first `accepted[i]` tokens only.

    Raises:
        ValueError: a row has fewer tokens than that.
    """
    for row, count in zip(rows, accepted, strict=True):
        if not 0 <= count <= len(row.tokens):
            raise ValueError(f"{count} tokens are accepted of a row of {len(row.tokens)}.")
    return [replace(row, tokens=row.tokens[:count]) for row, count in zip(rows, accepted, strict=True)]
