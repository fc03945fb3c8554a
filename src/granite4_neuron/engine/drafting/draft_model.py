"""Drafts from a small model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from granite4_neuron.engine.drafting.drafters import Draft, DraftRequest
from granite4_neuron.engine.prefix.cache import PrefixCache
from granite4_neuron.engine.prefix.interface import salted
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row, Runtime, require
from granite4_neuron.state.hybrid_state import HybridState


class DraftModel:
    """Proposes tokens of a small model, chosen as the target chooses its own: greedily, or with the same random
    numbers.

    With the same random numbers, a sampled draft is accepted about as often as the two distributions overlap, and the
    text stays the target's own (Daliri et al., https://arxiv.org/abs/2408.07978).

    Its state advances only by accepted tokens. It runs drafts with `Runtime.verify` and never commits them, so there is
    nothing to roll back when the target rejects them.

    Args:
        runtime: of the small model; it must be able to verify.
        vocab_size: the target model's.
        num_sequences: how many sequences it can follow; for others it proposes nothing.
        max_length: the most tokens of a sequence; beyond that it proposes nothing. An engine for fewer or shorter
            sequences has the state allocated for these.
        prefix_cache: of the small model's runtime. It keeps the states at the ends of prompts and of sequences, for
            sequences with the same beginning.

    Raises:
        UserError: the vocabularies differ in size, or the runtime cannot verify.
    """

    def __init__(
        self,
        runtime: Runtime,
        vocab_size: int,
        num_sequences: int,
        max_length: int,
        prefix_cache: PrefixCache | None = None,
    ):
        require(runtime, "verify")
        if runtime.config.vocab_size != vocab_size:
            raise UserError(
                f"the draft model has a vocabulary of {runtime.config.vocab_size:,} tokens and the model one of "
                f"{vocab_size:,}; they must have the same."
            )
        self._runtime = runtime
        self._cache = prefix_cache
        # Of sequences, and of tokens of each.
        self._most = num_sequences, min(max_length, runtime.max_length)
        self._num_sequences = self._max_length = 0  # of the state
        self._state: HybridState | None = None
        self._followed: dict[int, _Followed] = {}
        self._unfinished: Sequence[int] = ()  # ids of sequences whose state a call is changing

    def allocate(self, num_sequences: int, max_length: int) -> None:
        """See `StatefulDrafter.allocate`. A state of that size stays as it is."""
        most_sequences, longest = self._most
        sizes = min(num_sequences, most_sequences), min(max_length, longest)
        if sizes == (self._num_sequences, self._max_length):
            return
        self._num_sequences, self._state = 0, None  # free the old state's memory first
        self._followed, self._unfinished = {}, ()
        self._state = self._runtime.allocate(*sizes)
        self._num_sequences, self._max_length = sizes

    def warm_up(self) -> None:
        """See `StatefulDrafter.warm_up`. A sequence that had no drafts for a while is caught up with by a verification
        of any length.
        """
        self._runtime.warm_up(self._state, verified_tokens=self._runtime.tokens_per_verification)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See `Drafter.propose`. The first call for a sequence runs its prompt, except for a cached prefix."""
        if not self._num_sequences:  # no engine has had the state allocated
            self.allocate(*self._most)
        self._forget_unfinished()
        self._forget_others(requests)
        drafts = [self._begin(request) for request in requests]
        growing = [draft for draft in drafts if draft is not None]
        if growing:
            self._unfinished = [draft.request.id for draft in growing]
            logits = self._read(growing)
            self._unfinished = ()
            while growing := [draft for draft, last in zip(growing, logits, strict=True) if draft.grow(last)]:
                logits = self._last_logits([draft.row for draft in growing])
        return [[] if draft is None else draft.tokens for draft in drafts]

    def end(self, id: int) -> None:
        """See `Drafter.end`."""
        self._forget_unfinished()
        followed = self._followed.pop(id, None)
        if followed is not None:
            self._keep(followed)

    @property
    def _free(self) -> list[int]:
        in_use = {followed.slot for followed in self._followed.values()}
        return [slot for slot in range(1, self._num_sequences + 1) if slot not in in_use]

    def _forget_unfinished(self) -> None:
        """Forget the sequences that a failed call was running: it is not known which tokens their state has seen."""
        for id in self._unfinished:
            self._followed.pop(id, None)
        self._unfinished = ()

    def _forget_others(self, requests: Sequence[DraftRequest]) -> None:
        """If there is no slot for a new sequence, forget those without a request: their engine is gone."""
        ids = {request.id for request in requests}
        if not self._free and not ids <= self._followed.keys():
            self._followed = {id: followed for id, followed in self._followed.items() if id in ids}

    def _begin(self, request: DraftRequest) -> _Draft | None:
        """Return an empty list of drafts for a sequence; None if it gets no drafts."""
        followed, most = self._follow(request), self._most_drafts(request)
        return _Draft(request, most, followed=followed) if followed is not None and most > 0 else None

    def _follow(self, request: DraftRequest) -> _Followed | None:
        if request.id not in self._followed and (free := self._free):
            self._followed[request.id] = _Followed(free[0])
        followed = self._followed.get(request.id)
        if followed is not None:
            followed.tokens, followed.cache_salt = request.tokens, request.cache_salt
        return followed

    def _most_drafts(self, request: DraftRequest) -> int:
        """Return the most drafts for a sequence: one more than there is room for, as the last draft is never run."""
        room = self._max_length - len(request.tokens)
        return min(request.most, room + 1, self._runtime.tokens_per_verification + 1) if room >= 0 else 0

    def _read(self, drafts: Sequence[_Draft]) -> list[torch.Tensor]:
        """Advance the state to the last token of each sequence; return the logits [vocab_size] after each."""
        for draft in drafts:
            self._catch_up(draft.followed)
        rows = [draft.followed.next_row(len(draft.followed.tokens)) for draft in drafts]
        verification = self._runtime.verify(self._state, rows)
        self._runtime.commit(self._state, verification, [len(row.tokens) for row in rows])
        last_logits = _after_last_tokens(verification.logits, rows)
        for draft, row, logits in zip(drafts, rows, last_logits, strict=True):
            draft.followed.add(row, logits)
        return last_logits

    def _catch_up(self, followed: _Followed) -> None:
        """Run a prompt, or tokens added without a call of `propose`, except for the last token."""
        last, is_prompt = len(followed.tokens) - 1, followed.stored == 0
        if is_prompt:
            self._restore(followed)
        most = 0 if is_prompt else self._runtime.tokens_per_verification - 1
        while last - followed.stored > most:
            row = followed.next_row(min(followed.stored + self._runtime.tokens_per_step, last))
            [logits] = self._runtime.step(self._state, [row])
            followed.add(row, logits)
        if is_prompt:
            self._keep(followed)

    def _restore(self, followed: _Followed) -> None:
        """Start from the cached prefix of a prompt, if there is one."""
        if self._cache is None:
            return
        prefix = self._cache.match_prefix(salted(followed.tokens, followed.cache_salt)[:-1])
        if prefix is not None:
            self._cache.restore(prefix, self._state, followed.slot)
            self._cache.release(prefix)
            followed.stored, followed.logits = prefix.length, prefix.logits

    def _keep(self, followed: _Followed) -> None:
        """Keep the state in the cache, if there is one and the state has seen tokens."""
        if self._cache is not None and followed.logits is not None:
            keys = salted(followed.tokens, followed.cache_salt)[: followed.stored]
            self._cache.insert(keys, self._state, followed.slot, followed.logits)

    def _last_logits(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        return _after_last_tokens(self._runtime.verify(self._state, rows).logits, rows)


def _after_last_tokens(logits: torch.Tensor, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Return the logits [vocab_size] after each row's last token from the logits of a verification."""
    return [row_logits[len(row.tokens) - 1] for row_logits, row in zip(logits, rows, strict=True)]


@dataclass
class _Followed:
    """The small model's state of a sequence.

    tokens: the sequence's tokens, without drafts.
    cache_salt: of its request.
    stored: how many of them the state has seen.
    logits: [vocab_size], after the last of those; None before the first.
    """

    slot: int
    tokens: Sequence[int] = ()
    cache_salt: str | None = None
    stored: int = 0
    logits: torch.Tensor | None = None

    def next_row(self, stop: int) -> Row:
        """Return the tokens to run next, up to `stop`."""
        return Row(self.slot, self.stored, self.tokens[self.stored : stop])

    def add(self, row: Row, logits: torch.Tensor) -> None:
        """Record that the state has seen the row; `logits` [vocab_size] come after its last token."""
        self.stored += len(row.tokens)
        self.logits = logits


@dataclass
class _Draft(Draft):
    """The drafts of one sequence so far."""

    followed: _Followed = field(kw_only=True)

    @property
    def row(self) -> Row:
        return Row(self.followed.slot, self.followed.stored, self.tokens)
