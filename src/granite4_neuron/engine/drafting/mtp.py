"""Drafts from a model's own layers for multi-token prediction."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from granite4_neuron.engine.drafting.drafters import Draft, DraftRequest, SeenTokens
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import HasMTP, Row, Runtime, require
from granite4_neuron.state.hybrid_state import HybridState

# A sequence's hidden states are read when it gets drafts, or when there are this many: then reading them costs little
# for each, and they take little memory.
_MOST_UNREAD = 64


class MTPDrafter:
    """Proposes what a model's layers for multi-token prediction predict, chosen as `DraftModel` chooses.

    The first draft comes from the model's hidden states, and further ones from the layers' own results. The keys and
    values of drafts lie behind those of accepted tokens, and later tokens overwrite them, so there is nothing to roll
    back.

    The layers attend to the tokens whose hidden states the drafter has seen without a gap. It sees none of a prompt's
    beginning that comes from a prefix cache. The layers then know this beginning only from the hidden states of later
    tokens, and fewer drafts may be accepted. They have no rotary positions, so their cache may begin anywhere.

    Args:
        runtime: of the model, loaded with these layers.
        num_sequences: how many sequences it can follow. In place of one that a step does not have, it follows a new
            one; for others it proposes nothing.
        max_length: the most tokens of a sequence to which the layers attend; after as many they begin again. An
            engine for fewer or shorter sequences has the cache allocated for these.

    Raises:
        UserError: the model was loaded without the layers, or the runtime has no hidden states, cannot verify.
    """

    def __init__(self, runtime: Runtime, num_sequences: int, max_length: int):
        require(runtime, "verify")
        require(runtime, "hidden_states")
        layers = runtime.mtp if isinstance(runtime, HasMTP) else None
        if layers is None:
            raise UserError("the model was loaded without layers for multi-token prediction; load it with mtp=True.")
        self._mtp = layers
        # Of sequences, and of tokens of each.
        self._most = num_sequences, min(max_length, runtime.max_length)
        self._num_sequences = self._max_length = 0  # of the cache
        self._state: HybridState | None = None
        self._followed: dict[int, _Followed] = {}  # by id, in the order in which they were last seen

    def allocate(self, num_sequences: int, max_length: int) -> None:
        """See `StatefulDrafter.allocate`. A cache of that size stays as it is."""
        most_sequences, longest = self._most
        sizes = min(num_sequences, most_sequences), min(max_length, longest)
        if sizes == (self._num_sequences, self._max_length):
            return
        self._num_sequences, self._state = 0, None  # free the old cache's memory first
        self._followed = {}
        self._state = self._mtp.allocate(*sizes)
        self._num_sequences, self._max_length = sizes

    def warm_up(self) -> None:
        """There is nothing to compile: only the backend cpu has hidden states."""

    def see(self, steps: Sequence[SeenTokens]) -> None:
        """See `HiddenStateDrafter.see`."""
        if not self._num_sequences:  # no engine has had the cache allocated
            self.allocate(*self._most)
        ids = {step.id for step in steps}
        seen = []
        for step in map(self._end_of, steps):
            followed = self._followed.pop(step.id, None)
            slot = self._slot(ids) if followed is None else followed.slot
            if slot is None:
                continue
            if followed is None or not self._continues(followed, step):
                followed = _Followed(slot, step.start)
            self._followed[step.id] = followed
            followed.take(step)
            seen.append(followed)
        self._read([followed for followed in seen if followed.num_unread >= _MOST_UNREAD])

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See `Drafter.propose`. A sequence gets drafts only if its last token alone has not run."""
        drafts = [self._begin(request) for request in requests]
        begun = [(draft, self._followed[draft.request.id]) for draft in drafts if draft is not None]
        self._read([followed for _, followed in begun if followed.num_unread])
        growing = [(draft, followed, followed.result) for draft, followed in begun]
        while growing:
            logits = self._mtp.logits(torch.stack([result for _, _, result in growing]))
            growing = [each for each, of_draft in zip(growing, logits, strict=True) if each[0].grow(of_draft)]
            if growing:
                assert self._state is not None  # it follows sequences
                rows = [followed.row_of_drafts(draft.tokens) for draft, followed, _ in growing]
                results = self._mtp.step(self._state, rows, [result[None] for _, _, result in growing])
                growing = [(*each[:2], result) for each, result in zip(growing, results, strict=True)]
        return [[] if draft is None else draft.tokens for draft in drafts]

    def end(self, id: int) -> None:
        """See `Drafter.end`."""
        self._followed.pop(id, None)

    def _slot(self, ids: Collection[int]) -> int | None:
        """Return a free slot, or that of the sequence not seen for longest, if it is none of `ids`; None if all are."""
        if len(self._followed) == self._num_sequences:
            oldest = next((id for id in self._followed if id not in ids), None)
            return None if oldest is None else self._followed.pop(oldest).slot
        in_use = {followed.slot for followed in self._followed.values()}
        return next(slot for slot in range(1, self._num_sequences + 1) if slot not in in_use)

    def _end_of(self, step: SeenTokens) -> SeenTokens:
        """Return the last tokens of a step that are not too many for the cache."""
        beyond = max(0, len(step.hidden_states) - self._max_length)
        return step._replace(start=step.start + beyond, hidden_states=step.hidden_states[beyond:])

    def _continues(self, followed: _Followed, step: SeenTokens) -> bool:
        """Return whether a step's tokens come directly after those seen before, and fit into the cache."""
        length = followed.stored + followed.num_unread + len(step.hidden_states)
        return followed.end == step.start and length <= self._max_length

    def _begin(self, request: DraftRequest) -> Draft | None:
        """Return an empty list of drafts for a sequence; None if it gets no drafts."""
        followed = self._followed.get(request.id)
        if followed is None or followed.end != len(request.tokens) - 1:
            return None
        # One more than there is room for, as the last draft is never run.
        most = min(request.most, self._max_length - followed.stored - followed.num_unread + 1)
        return Draft(request, most) if most > 0 else None

    def _read(self, sequences: Sequence[_Followed]) -> None:
        """Run the unread hidden states of sequences, except those whose next token is not known."""
        parts = [followed.take_unread() for followed in sequences]
        if parts:
            assert self._state is not None  # it follows sequences
            results = self._mtp.step(self._state, [row for row, _ in parts], [states for _, states in parts])
            for followed, (row, _), result in zip(sequences, parts, results, strict=True):
                followed.result = result
                followed.stored += len(row.tokens)  # last: if an interrupt comes between them, tokens are missing


class _Followed:
    """What the layers know of a sequence.

    stored: how many tokens the cache has, from the first one seen.
    result: the layers' last result, [hidden_size]; none before the first.

    Args:
        slot: of the cache.
        origin: the sequence's length before the first token seen.
    """

    def __init__(self, slot: int, origin: int):
        self.slot = slot
        self.stored = 0
        self.result = torch.empty(0)
        self._origin = origin
        self._tokens: Sequence[int] = ()  # the sequence's
        self._unread = torch.empty(0, 0)

    @property
    def num_unread(self) -> int:
        """The number of hidden states that have not run."""
        return len(self._unread)

    @property
    def end(self) -> int:
        """The sequence's length after the last token seen. It is less than that if a call failed."""
        return self._origin + self.stored + self.num_unread

    def take(self, step: SeenTokens) -> None:
        """Add a step's hidden states to the unread ones."""
        self._tokens = step.tokens
        self._unread = torch.cat([self._unread, step.hidden_states]) if self.num_unread else step.hidden_states

    def take_unread(self) -> tuple[Row, torch.Tensor]:
        """Remove unread hidden states whose next token is known; return the row that runs them."""
        first = self._origin + self.stored + 1
        tokens = self._tokens[first : first + self.num_unread]
        states, rest = self._unread[: len(tokens)], self._unread[len(tokens) :]
        self._unread = rest.clone()  # a view would keep all of them in memory
        return Row(self.slot, self.stored, tokens), states

    def row_of_drafts(self, drafts: Sequence[int]) -> Row:
        """Return the row that runs the last draft."""
        return Row(self.slot, self.stored + len(drafts) - 1, [drafts[-1]])
