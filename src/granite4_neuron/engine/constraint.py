"""Constraints on the text of a sequence, such as a grammar. The engine knows only this interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch


class Constraint(Protocol):
    """Decides after each token which tokens may follow, end-of-sequence tokens among them.

    The engine makes its own copy when the sequence gets a slot, and advances it by each chosen token and never by a
    draft, so nothing has to be rolled back.
    """

    def fork(self) -> Constraint:
        """Return a copy that advances independently."""

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of logits [vocab_size] in which those of tokens that may not follow are -inf. Which these
        are does not depend on the logits; the engine gives zeros.

        Raises:
            NoTokenLeft: no token may follow, or finding one takes too long.
        """

    def accept(self, token: int) -> None:
        """Advance by a token that may follow."""

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may follow one after another."""

    def forced(self, most: int) -> Sequence[int]:
        """Return the next tokens that have no alternative, `most` at most.

        They only save time: it is never wrong to return fewer, or none. Each must be the only one in its mask.
        """


@runtime_checkable
class BitConstraint(Constraint, Protocol):
    """A constraint that has its masks as bits, which costs less."""

    def bits(self, vocab_size: int) -> np.ndarray:
        """Return a bit for each token, 1 if it may follow, lowest bit first: [vocab_size / 8, rounded up] uint8. Bits
        beyond the vocabulary are 0.

        Raises: see `mask`.
        """
