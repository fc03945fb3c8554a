"""Asks an engine's drafter for proposals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from granite4_neuron.engine.best_effort import BestEffort
from granite4_neuron.engine.drafting.drafters import (
    Drafter,
    DraftRequest,
    HiddenStateDrafter,
    SeenTokens,
    StatefulDrafter,
    check_drafts,
)
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.runtime.interface import Row, Runtime, require


class Drafting:
    """The proposals of an engine's drafter. If it fails, there are none.

    Args:
        drafter: None for no proposals.
        runtime: verifies the proposals.
        draft_tokens: the most tokens to request for each sequence.

    Raises:
        UserError: the runtime cannot verify, or has no hidden states for a drafter that reads them.
    """

    def __init__(self, drafter: Drafter | None, runtime: Runtime, draft_tokens: int):
        if drafter is not None:
            require(runtime, "verify")
        self.reads_hidden_states = isinstance(drafter, HiddenStateDrafter)
        if self.reads_hidden_states:
            require(runtime, "hidden_states")
        self.drafter = drafter
        self._runtime = runtime
        self._draft_tokens = draft_tokens
        self._best_effort = BestEffort("The drafter")

    def allocate(self, num_sequences: int, max_length: int) -> None:
        """Have the drafter allocate its state, if it has one; see `StatefulDrafter.allocate`."""
        if isinstance(self.drafter, StatefulDrafter):
            self.drafter.allocate(num_sequences, max_length)

    def warm_up(self) -> None:
        """Have the drafter compile what its proposals need; see `StatefulDrafter.warm_up`."""
        if isinstance(self.drafter, StatefulDrafter):
            self.drafter.warm_up()

    def propose(self, sequences: Sequence[RunningSequence], interval: int | None) -> Sequence[Sequence[int]]:
        """Return proposed tokens for each sequence, no more than it has room for; or nothing at all.

        Args:
            interval: see `RunningSequence.most_drafts`.
        """
        if self.drafter is None:
            return ()
        longest = self._runtime.tokens_per_verification
        mosts = [each.most_drafts(min(self._draft_tokens, longest - each.num_unrun), interval) for each in sequences]
        requests = [
            DraftRequest(each.id, each.tokens, most, each.sampler, each.request.cache_salt)
            for each, most in zip(sequences, mosts, strict=True)
        ]
        with self._best_effort:
            return check_drafts(self.drafter.propose(requests), requests, self._runtime.config.vocab_size)
        return ()

    def see(self, steps: Iterable[tuple[RunningSequence, Row, torch.Tensor]]) -> None:
        """Show the drafter a step of sequences that have not ended: their rows, without rejected drafts, and the hidden
        states [tokens, hidden_size] of these.
        """
        if isinstance(self.drafter, HiddenStateDrafter):
            with self._best_effort:
                self.drafter.see([SeenTokens(each.id, row.start, each.tokens, states) for each, row, states in steps])

    def end(self, sequence: RunningSequence) -> None:
        """Have the drafter forget a sequence that has ended."""
        if self.drafter is not None:
            with self._best_effort:
                self.drafter.end(sequence.id)
