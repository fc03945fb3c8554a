"""Sequences that grow by verified tokens, on any runtime, compared with the uncut sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.runtime.interface import Row, Runtime
from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState, KeyValueState, MambaState
from test.support.stepping import random_tokens

LONGEST = 120


@dataclass(frozen=True)
class Round:
    """A step that verifies counts[i] tokens of row i, of which the first accepted[i] are the sequence's own."""

    counts: Sequence[int]
    accepted: Sequence[int]


def streams(vocab_size: int, num_sequences: int) -> list[list[int]]:
    """Return the tokens of the tests' sequences, by slot from 1 on."""
    return random_tokens(vocab_size, num_sequences, LONGEST, seed=3).tolist()


def poison(state: HybridState) -> None:
    """Write NaN into everything but the null slot's zeros."""
    for layer in state.layers:
        for tensor in vars(layer).values():
            tensor[NULL_SLOT + (state.has_null_slot and isinstance(layer, MambaState)) :] = math.nan


def poison_behind(state: HybridState, lengths: Sequence[int]) -> None:
    """Write NaN into the caches after the sequences' ends. The sequence in slot i + 1 has lengths[i] tokens."""
    for layer in state.layers:
        if isinstance(layer, KeyValueState):
            for slot, length in enumerate(lengths, start=1):
                layer.key[slot, :, length:] = layer.value[slot, :, length:] = math.nan


def verified_error(
    runtime: Runtime,
    uncut: Sequence[torch.Tensor],
    prefixes: Sequence[int],
    rounds: Sequence[Round],
    *,
    prepare: Callable[[HybridState], None] = poison,
    after_commit: Callable[[HybridState, Sequence[int]], None] = poison_behind,
) -> float:
    """Return the largest difference of logits from the uncut sequences': for prefixes in one step, rounds, and decode.

    Args:
        uncut: each sequence's logits, [LONGEST, vocab_size].
        prefixes: tokens of each sequence before the first round; may be 0.
        rounds: verifications; tokens beyond the accepted ones are not the sequence's own.
        prepare: poisons the new state.
        after_commit: poisons it again, given the sequences' lengths.
    """
    vocab_size, numbers = runtime.config.vocab_size, range(len(prefixes))
    tokens, done = streams(vocab_size, len(prefixes)), [0] * len(prefixes)
    state = runtime.allocate(len(prefixes), LONGEST)
    prepare(state)
    errors = [0.0]

    def compare(i: int, logits: torch.Tensor) -> None:
        """Compare logits of consecutive tokens, [n, vocab_size], from the current length of sequence i on."""
        difference = (
            (logits - uncut[i][done[i] : done[i] + len(logits)]).abs().max() if len(logits) else torch.zeros(())
        )
        errors.append(math.inf if difference.isnan() else difference.item())

    def step(counts: Sequence[int]) -> None:
        rows = [Row(i + 1, done[i], tokens[i][done[i] : done[i] + counts[i]]) for i in numbers if counts[i]]
        for row, logits in zip(rows, runtime.step(state, rows), strict=True):
            done[row.slot - 1] += len(row.tokens) - 1
            compare(row.slot - 1, logits[None])
            done[row.slot - 1] += 1

    if any(prefixes):
        step(prefixes)
    for round in rounds:
        rows = []
        for i in numbers:
            own = tokens[i][done[i] : done[i] + round.accepted[i]]
            others = [(token + 1) % vocab_size for token in tokens[i][done[i] + len(own) : done[i] + round.counts[i]]]
            rows.append(Row(i + 1, done[i], own + others))
        verification = runtime.verify(state, rows)
        for i, logits in enumerate(verification.logits):
            compare(i, logits[: round.accepted[i]])
        runtime.commit(state, verification, round.accepted)
        for i in numbers:
            done[i] += round.accepted[i]
        after_commit(state, done)
    for _ in range(2):
        step([1] * len(prefixes))
    return max(errors)


@dataclass
class Stand:
    """A runtime on the CPU, its sequences by slot from 1 on, and their logits, [sequences, LONGEST, vocab_size]."""

    runtime: CPURuntime
    tokens: list[list[int]]
    uncut: torch.Tensor

    def begin(self, *lengths: int) -> HybridState:
        """Return a poisoned state with the first tokens of a sequence in each slot."""
        state = self.runtime.allocate(len(self.tokens), LONGEST)
        poison(state)
        self.runtime.step(state, [self.row(slot, 0, length) for slot, length in enumerate(lengths, start=1)])
        return state

    def row(self, slot: int, start: int, stop: int, number: int | None = None) -> Row:
        """Return tokens of sequence `number`, by default the slot's."""
        return Row(slot, start, self.tokens[(number or slot) - 1][start:stop])

    def error(self, state: HybridState, *rows: Row, number: int | None = None) -> float:
        """Return the largest difference of a step's logits from the uncut sequences'."""
        logits = self.runtime.step(state, rows)
        expected = [self.uncut[(number or row.slot) - 1][row.start + len(row.tokens) - 1] for row in rows]
        return number_of(logits - torch.stack(expected))


def number_of(difference: torch.Tensor) -> float:
    largest = difference.abs().max().item()
    return math.inf if math.isnan(largest) else largest


def changed(before: list[torch.Tensor], state: HybridState, *slots: int) -> float:
    """Return 1 if anything of these slots has changed, else 0."""
    pairs = zip(before, state.tensors(), strict=True)
    return float(
        not all(torch.equal(old[slot].nan_to_num(), new[slot].nan_to_num()) for old, new in pairs for slot in slots)
    )


def copies(state: HybridState) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.tensors()]
