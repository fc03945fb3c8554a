"""Where drafts come from. What a drafter proposes changes how fast a text comes, never the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row, Runtime, require
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


class DraftModel:
    """Proposes what a small model says, chosen as the target's tokens are: greedily, or with the same random numbers.

    Where both models give a token the same probability it is then also drawn at the same time, so that a sampled draft
    is accepted about as often as the distributions overlap, while the text stays what the target alone would say
    (Daliri et al., https://arxiv.org/abs/2408.07978).

    Its state has only seen tokens that are certain: drafts are run by `Runtime.verify` and never committed, and there
    is nothing to roll back when the target rejects them.

    Args:
        runtime: of the small model; any that can verify.
        vocab_size: the target model's.
        num_sequences, max_length: how many sequences it follows, and how far; beyond it proposes nothing.

    Raises:
        UserError: the vocabularies differ in size, or the runtime cannot verify or has no room.
    """

    def __init__(self, runtime: Runtime, vocab_size: int, num_sequences: int, max_length: int):
        require(runtime, "verify")
        if runtime.config.vocab_size != vocab_size:
            raise UserError(
                f"the draft model has a vocabulary of {runtime.config.vocab_size:,} tokens and the model one of "
                f"{vocab_size:,}; they must have the same."
            )
        self._runtime = runtime
        self._max_length = min(max_length, runtime.config.max_position_embeddings)
        self._state = runtime.allocate(num_sequences, self._max_length)
        self._free = list(range(num_sequences, 0, -1))
        self._followed: dict[int, _Followed] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """As `Drafter.propose`. A sequence's first call reads its whole prompt."""
        drafts = [_Draft(request, self._follow(request), self._most(request)) for request in requests]
        growing = [draft for draft in drafts if draft.followed is not None and draft.most > 0]
        if growing:
            logits = self._read(growing)
            while growing := [draft for draft, of_one in zip(growing, logits, strict=True) if draft.grow(of_one)]:
                logits = self._last_logits([draft.row for draft in growing])
        return [draft.tokens for draft in drafts]

    def end(self, id: int) -> None:
        """As `Drafter.end`."""
        if id in self._followed:
            self._free.append(self._followed.pop(id).slot)

    def _follow(self, request: DraftRequest) -> _Followed | None:
        if request.id not in self._followed and self._free:
            self._followed[request.id] = _Followed(self._free.pop())
        return self._followed.get(request.id)

    def _most(self, request: DraftRequest) -> int:
        """The last draft is never run."""
        room = self._max_length - len(request.tokens)
        return min(request.most, room + 1, self._runtime.tokens_per_verification + 1) if room >= 0 else 0

    def _read(self, drafts: Sequence[_Draft]) -> list[torch.Tensor]:
        """Bring the state up to the last certain token of each sequence, and give the logits there."""
        for draft in drafts:
            followed, tokens = draft.followed, draft.request.tokens
            # A prompt, or what came while other sequences had no room for drafts.
            while followed.stored == 0 < len(tokens) - 1 or len(tokens) - followed.stored > self._longest:
                stop = min(followed.stored + self._runtime.tokens_per_step, len(tokens) - 1)
                self._runtime.step(self._state, [followed.row(tokens[followed.stored : stop])])
                followed.stored = stop
        rows = [draft.followed.row(draft.request.tokens[draft.followed.stored :]) for draft in drafts]
        verification = self._runtime.verify(self._state, rows)
        self._runtime.commit(self._state, verification, [len(row.tokens) for row in rows])
        for draft, row in zip(drafts, rows, strict=True):
            draft.followed.stored += len(row.tokens)
        return [logits[len(row.tokens) - 1] for logits, row in zip(verification.logits, rows, strict=True)]

    def _last_logits(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        logits = self._runtime.verify(self._state, rows).logits
        return [of_row[len(row.tokens) - 1] for of_row, row in zip(logits, rows, strict=True)]

    @property
    def _longest(self) -> int:
        return self._runtime.tokens_per_verification


@dataclass
class _Followed:
    """Where the small model's state of a sequence is, and how many of its tokens it has seen."""

    slot: int
    stored: int = 0

    def row(self, tokens: Sequence[int]) -> Row:
        return Row(self.slot, self.stored, tokens)


@dataclass
class _Draft:
    """What one sequence's drafts are so far."""

    request: DraftRequest
    followed: _Followed | None
    most: int
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chooser = self.request.chooser.fork()

    @property
    def row(self) -> Row:
        return self.followed.row(self.tokens)

    def grow(self, logits: torch.Tensor) -> bool:
        """Add a draft; whether there may be a further one."""
        try:
            self.tokens.append(self._chooser(logits, [*self.request.tokens, *self.tokens]))
        except UserError:  # the small model's logits are not finite, which is no matter of the sequence
            return False
        return len(self.tokens) < self.most
