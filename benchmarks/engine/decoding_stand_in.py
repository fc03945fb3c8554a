"""A CPU runtime that decodes as a device does: it keeps logits to itself, and runs tokens that it has chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from granite4_neuron.config.choices import NO_CHOICES
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.graphs.topk import drawn, draws_of, likeliest
from granite4_neuron.ops import sampling
from granite4_neuron.ops.sampling import Choice, Chosen, Logprobs, Penalties
from granite4_neuron.runtime.interface import FROM_DEVICE, UNDECIDED, Ability, Decoded, Row
from granite4_neuron.state.hybrid_state import HybridState

_LEFT_TO_HOST = 7  # one in this many draws


class _Decoded(NamedTuple):
    """The `Decoded` of the stand-in: [rows] and [rows, vocab_size]."""

    chosen: Sequence[int]
    row_logits: torch.Tensor
    reported: Sequence[Logprobs | None]

    def tokens(self) -> Sequence[int]:
        """See `Decoded.tokens`."""
        return self.chosen

    def reports(self) -> Sequence[Logprobs | None]:
        """See `Decoded.reports`."""
        return self.reported

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See `Decoded.logits`."""
        return self.row_logits[list(rows)]


class DecodingRuntime(CPURuntime):
    """Implements `Runtime.decode` with `step`. Values that it leaves unspecified are NaN here, or any token.

    ahead: rows that have run tokens that only this runtime knew. stopped: rows skipped because of a stop token.
    drawn: tokens that it has chosen by options. undecided: those left to the host, more than a device leaves.
    """

    cannot: Mapping[Ability, str] = {"choices": NO_CHOICES}
    packs_rows = False

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.ahead = self.stopped = self.drawn = self.undecided = 0
        self._chosen: dict[int, int] = {}  # by slot

    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Forget chosen tokens: no other call may come between a `decode` and the one that runs its tokens."""
        self._chosen.clear()
        return super().step(state, rows, all_logits)

    def decode(self, state: HybridState, rows: Sequence[Row]) -> Decoded:
        """See `Runtime.decode`."""
        assert all(row.start > 0 and len(row.tokens) == 1 for row in rows)
        known = [self._known(row) for row in rows]
        running = [number for number, row in enumerate(known) if row is not None]
        logits = torch.full((len(rows), self.config.vocab_size), math.nan)
        chosen = [Chosen(1)] * len(rows)
        if running:
            logits[running] = super().step(state, [row for row in known if row is not None])
        for number in running:
            row = known[number]
            assert row is not None
            chosen[number] = self._chosen_by(row, logits[number : number + 1])
        self._chosen = {rows[number].slot: chosen[number].token for number in running}
        return _Decoded([each.token for each in chosen], logits, [each.logprobs for each in chosen])

    def _chosen_by(self, row: Row, logits: torch.Tensor) -> Chosen:
        """Return the token that follows a row, by logits [1, vocab_size]."""
        chosen = Chosen(int(likeliest(logits)))
        if row.draw is None or chosen.token < 0:
            return chosen
        chosen = self._by_options(row, replace(row.draw, place=row.start + 1), logits)
        if chosen.token >= 0 and (row.start + row.slot) % _LEFT_TO_HOST == 0:
            chosen = Chosen(UNDECIDED)
        self.drawn, self.undecided = self.drawn + (chosen.token >= 0), self.undecided + (chosen.token == UNDECIDED)
        return chosen

    def _by_options(self, row: Row, choice: Choice, logits: torch.Tensor) -> Chosen:
        return Chosen(int(drawn(draws_of([choice]).float(), logits, likeliest(logits))))

    def _known(self, row: Row) -> Row | None:
        """Return a row with its token, or None if the token stops it."""
        if row.tokens[0] != FROM_DEVICE:
            return row
        token = self._chosen[row.slot]
        if token < 0 or token in row.stops:
            self.stopped += token != UNDECIDED
            return None
        self.ahead += 1
        return replace(row, tokens=[token])


class ChoosingRuntime(DecodingRuntime):
    """Takes all options of `Row.draw`.

    counted: how many times it needed to be told how often a sequence has its tokens.
    """

    cannot: Mapping[Ability, str] = {}

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.counted = 0
        self._counts: dict[tuple[int, int], dict[int, float]] = {}  # of tokens, by sequence and its length

    def _by_options(self, row: Row, choice: Choice, logits: torch.Tensor) -> Chosen:
        if choice.penalties is not None:
            choice = replace(choice, penalties=self._counted(row, choice.penalties))
        [chosen] = sampling.choose([logits[0]], [choice])
        return chosen if chosen.token >= 0 else Chosen(UNDECIDED)

    def _counted(self, row: Row, penalties: Penalties) -> Penalties:
        """Return the penalties with a row's token, which the host may not know."""
        at = row.sequence, row.start
        if at not in self._counts:
            assert row.counts is not None
            self.counted += 1
            tokens, counts = row.counts()
            self._counts[at] = dict(zip(tokens.tolist(), counts.tolist(), strict=True))
        held = self._counts[row.sequence, row.start + 1] = self._counts.pop(at)
        held[row.tokens[0]] = held.get(row.tokens[0], 0) + 1
        return penalties._replace(tokens=torch.tensor(list(held)), counts=torch.tensor(list(held.values())))
