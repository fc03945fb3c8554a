"""Where drafts come from. What a drafter proposes changes how fast a text comes, never the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from granite4_neuron.speculation.ngram import ngram_propose


class TokenChooser(Protocol):
    """How a sequence's next token is chosen, see `engine.Sampler`."""

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        """The token after `tokens`, by logits [vocab_size]; a UserError if none can be chosen."""

    def fork(self) -> TokenChooser:
        """One that chooses as this one would, and leaves this one as it is."""


@dataclass(frozen=True)
class DraftRequest:
    """A sequence that can be taken further.

    id: the same at each call, of one sequence only.
    tokens: all of it that is certain; at a later call, more of them.
    most: drafts at most; may be 0.
    chooser: how its tokens are chosen.
    """

    id: int
    tokens: Sequence[int]
    most: int
    chooser: TokenChooser


class Drafter(Protocol):
    """What proposes tokens to come."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """For each sequence 0 to `most` tokens that may follow."""

    def end(self, id: int) -> None:
        """The sequence comes no more, and may never have come."""


@dataclass(frozen=True)
class NgramDrafter:
    """Proposes what followed when a sequence's last `min_n` to `max_n` tokens stood in it before."""

    min_n: int = 2
    max_n: int = 4

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """As `Drafter.propose`."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> list[int]:
        length = len(request.tokens) + request.most
        return ngram_propose(request.tokens, self.min_n, self.max_n, length, request.most).tolist()

    def end(self, id: int) -> None:
        """As `Drafter.end`."""
