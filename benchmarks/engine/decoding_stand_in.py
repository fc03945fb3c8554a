"""A CPU runtime that decodes as a device does: it keeps logits to itself, and runs tokens that it has chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.graphs.topk import drawn, draws_of, likeliest
from granite4_neuron.runtime.interface import FROM_DEVICE, UNDECIDED, Ability, Decoded, Row
from granite4_neuron.state.hybrid_state import HybridState

_LEFT_TO_HOST = 7  # one in this many draws


class _Decoded(NamedTuple):
    """The `Decoded` of the stand-in: [rows] and [rows, vocab_size]."""

    chosen: Sequence[int]
    row_logits: torch.Tensor

    def tokens(self) -> Sequence[int]:
        """See `Decoded.tokens`."""
        return self.chosen

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See `Decoded.logits`."""
        return self.row_logits[list(rows)]


class DecodingRuntime(CPURuntime):
    """Implements `Runtime.decode` with `step`. Values that it leaves unspecified are NaN here, or any token.

    ahead: rows that have run tokens that only this runtime knew. stopped: rows skipped because of a stop token.
    drawn: tokens that it has drawn. undecided: draws left to the host, more than a device leaves.
    """

    cannot: Mapping[Ability, str] = {}
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
        tokens = [1] * len(rows)
        if running:
            logits[running] = super().step(state, [row for row in known if row is not None])
        for number in running:
            tokens[number] = self._chosen_by(rows[number], logits[number : number + 1])
        self._chosen = {rows[number].slot: tokens[number] for number in running}
        return _Decoded(tokens, logits)

    def _chosen_by(self, row: Row, logits: torch.Tensor) -> int:
        """Return the token that follows a row, by logits [1, vocab_size]."""
        token = likeliest(logits)
        if row.draw is not None:
            token = drawn(draws_of([row.draw]).float(), logits, token)
            if token >= 0 and (row.start + row.slot) % _LEFT_TO_HOST == 0:
                token.fill_(UNDECIDED)
            self.drawn, self.undecided = self.drawn + int(token >= 0), self.undecided + int(token == UNDECIDED)
        return int(token)

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
