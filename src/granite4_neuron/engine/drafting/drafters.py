"""Drafters. Their proposals change the speed of a text, never the text."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from granite4_neuron.engine.drafting.ngram import ngram_propose
from granite4_neuron.engine.sampling_params import is_list, is_whole
from granite4_neuron.errors import UserError


class TokenChooser(Protocol):
    """Chooses a sequence's next token, see `engine.Sampler`."""

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        """Choose the token after `tokens` from logits [vocab_size]; raises a UserError if none can be chosen."""

    def fork(self) -> TokenChooser:
        """Return a copy that chooses the same tokens and leaves this one unchanged."""


@dataclass(frozen=True)
class DraftRequest:
    """A sequence to draft for.

    id: of the sequence; the same in each call.
    tokens: prompt and accepted tokens, more of them in later calls. They belong to the engine; do not change them.
    most: the most drafts; may be 0.
    chooser: how its tokens are chosen.
    cache_salt: of its request.
    """

    id: int
    tokens: Sequence[int]
    most: int
    chooser: TokenChooser
    cache_salt: str | None = None


@dataclass
class Draft:
    """The drafts of one sequence so far, chosen as the sequence chooses its own tokens.

    most: the most drafts.
    """

    request: DraftRequest
    most: int
    tokens: list[int] = field(default_factory=list)
    chooser: TokenChooser | None = None

    def grow(self, logits: torch.Tensor) -> bool:
        """Add a draft; return whether another one may follow."""
        try:
            self.chooser = self.chooser or self.request.chooser.fork()
            self.tokens.append(self.chooser(logits, [*self.request.tokens, *self.tokens]))
        except UserError:  # such as logits that are not finite; the sequence goes on without drafts
            return False
        return len(self.tokens) < self.most


class Drafter(Protocol):
    """Proposes the next tokens of sequences."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Propose 0 to `most` tokens that may follow, for each sequence."""

    def end(self, id: int) -> None:
        """Forget a sequence that has ended. It may never have been in a call of `propose`."""


class SeenTokens(NamedTuple):
    """Tokens that a step has added to a sequence, prompt or new ones, without rejected drafts.

    id: of the sequence.
    start: its length before them.
    tokens: all of its tokens so far, also those that no step has seen yet. They belong to the engine.
    hidden_states: [how many the step has added, hidden_size], see `Runtime.step_with_hidden_states`.
    """

    id: int
    start: int
    tokens: Sequence[int]
    hidden_states: torch.Tensor


@runtime_checkable
class HiddenStateDrafter(Drafter, Protocol):
    """A drafter that reads the model's hidden states. Its engine needs a runtime with that ability."""

    def see(self, steps: Sequence[SeenTokens]) -> None:
        """Take the hidden states of a step of some sequences. Those of a prompt's beginning that comes from a prefix
        cache are never seen.
        """


@runtime_checkable
class StatefulDrafter(Drafter, Protocol):
    """A drafter with a state of its own, which is allocated for the sequences of its engine."""

    def allocate(self, num_sequences: int, max_length: int) -> None:
        """Allocate the state for an engine's sequences, or for as many and as long ones as the drafter takes. What it
        knows of other sequences may be lost.

        Raises:
            UserError: there is no room for the state.
        """

    def warm_up(self) -> None:
        """Compile everything that proposals need with this state, so that no step waits for a compiler."""


@dataclass(frozen=True)
class NgramDrafter:
    """Proposes the tokens that followed an earlier occurrence of the sequence's last `min_n` to `max_n` tokens."""

    min_n: int = 2
    max_n: int = 4

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See `Drafter.propose`."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> list[int]:
        length = len(request.tokens) + request.most
        return ngram_propose(request.tokens, self.min_n, self.max_n, length, request.most).tolist()

    def end(self, id: int) -> None:
        """See `Drafter.end`."""


def check_drafts(drafts: object, requests: Sequence[DraftRequest], vocab_size: int) -> list[list[int]]:
    """Check and return a drafter's proposals.

    Raises:
        UserError: they are not one list for each request, with at most `most` token ids.
    """
    if not is_list(drafts) or len(drafts) != len(requests):
        raise UserError(f"the drafts are {reprlib.repr(drafts)}, and must be {len(requests)} lists.")
    for its_drafts, request in zip(drafts, requests, strict=True):
        if not is_list(its_drafts) or len(its_drafts) > request.most:
            raise UserError(f"drafts are {reprlib.repr(its_drafts)}, and must be a list of at most {request.most}.")
        if not all(is_whole(token) and 0 <= token < vocab_size for token in its_drafts):
            raise UserError(f"drafts are {reprlib.repr(its_drafts)}; token ids are 0 to {vocab_size - 1}.")
    return [list(its_drafts) for its_drafts in drafts]
