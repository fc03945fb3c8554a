"""Asks an engine's drafter for proposals."""

from __future__ import annotations

from collections.abc import Sequence

from granite4_neuron.engine.drafters import Drafter, DraftRequest, check_drafts
from granite4_neuron.engine.saving_time import SavingTime
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.runtime.interface import Runtime


class Drafting:
    """The proposals of an engine's drafter. If it fails, there are none.

    Args:
        drafter: None for no proposals.
        runtime: verifies the proposals.
        draft_tokens: the most tokens to request for each sequence.
    """

    def __init__(self, drafter: Drafter | None, runtime: Runtime, draft_tokens: int):
        self.drafter = drafter
        self._runtime = runtime
        self._draft_tokens = draft_tokens
        self._saving_time = SavingTime("The drafter")

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
        with self._saving_time:
            return check_drafts(self.drafter.propose(requests), requests, self._runtime.config.vocab_size)
        return ()

    def end(self, sequence: RunningSequence) -> None:
        """Have the drafter forget a sequence that has ended."""
        if self.drafter is not None:
            with self._saving_time:
                self.drafter.end(sequence.id)
