"""An engine that a simulation drives from event to event.

It is the engine with its scheduler, its slots and its prefix cache. Between two events, such as an arrival, the end of
an answer or a snapshot of the prefix cache, all steps of decode have the same rows, each one token longer than before;
these steps are taken at once. Everything else is a step like any other.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from granite4_neuron.engine import Engine, Output, Request
from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.pace import STEPS
from granite4_neuron.engine.prefix_cache import PrefixCache
from granite4_neuron.engine.scheduler import ScheduledStep
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.slot_prefix_cache import SlotPrefixCache
from granite4_neuron.engine.text import TextStream
from granite4_neuron.runtime.interface import Row
from granite4_neuron.simulation.runtime import SimulatedRuntime
from granite4_neuron.simulation.statistics import Histogram
from granite4_neuron.simulation.traffic import Arrival


class _Row:
    """A `Row` of which only times are asked, and which takes less time to make."""

    __slots__ = ("start", "tokens")

    def __init__(self, start: int, tokens: Sequence[int]):
        self.start, self.tokens = start, tokens


class SimulatedSequence(RunningSequence):
    """A request of the traffic while it runs. Its tokens need no checks, and its answer is zeros, which are among its
    tokens when something happens to it: it ends, or a snapshot of it is due.

    arrived: in seconds; None after its first token.
    prompt_tokens: the length of its prompt.
    left: how many tokens further something happens to it.
    """

    arrived: float | None
    prompt_tokens: int
    left: int
    _last_row: _Row

    def like(self, id: int, arrival: Arrival, max_length: int) -> SimulatedSequence:
        """Return a new sequence with the options of this one, which has not begun."""
        sequence = object.__new__(SimulatedSequence)
        request = object.__new__(Request)
        request.__dict__.update(self.request.__dict__, tokens=range(arrival.prompt), max_tokens=arrival.answer)
        sequence.__dict__.update(
            self.__dict__,
            id=id,
            request=request,
            limit=min(arrival.prompt + arrival.answer, max_length),
            tokens=arrival.tokens(),
            cuts=set(),
            arrived=arrival.time,
            _last_row=_Row(0, range(1)),
            prompt_tokens=arrival.prompt,
        )
        return sequence

    @property
    def is_prompt(self) -> bool:
        """Whether tokens of the prompt have still to be run."""
        return self.stored < self.prompt_tokens

    def look_ahead(self, interval: int | None) -> None:
        """Find out how many tokens are left until something happens to it.

        Args:
            interval: of the prefix cache's snapshots.
        """
        self.left = self.most_drafts(self.limit, interval) + 1

    def next_row(self, stop: int, drafts: Sequence[int] = ()) -> Row:
        """Return a row with as many tokens as the next one has."""
        return cast(Row, _Row(self.stored, range(stop - self.stored)))

    def last_row(self, drafts: Sequence[int]) -> Row:
        """Return a row with a token, the same one each time."""
        self._last_row.start = self.stored
        return self._last_row  # type: ignore[return-value]  # it is asked for often

    def choose(self, logits: Sequence[torch.Tensor], drafts: Sequence[int] = ()) -> list[Output]:
        """Choose token 0."""
        return [self.append(0)]

    def append(self, token: int, logits: torch.Tensor | None = None) -> Output:
        """Add a token, which ends the sequence at its limit."""
        self.tokens.append(token)
        return Output(self.id, token, "", "length" if len(self.tokens) == self.limit else None)

    def grow(self, steps: int) -> Output:
        """Add the tokens of steps so far and of so many further ones; return the last one's output. That step is still
        to be counted.
        """
        self.stored += steps - 1
        self.tokens += [0] * (self.stored + 1 - len(self.tokens))
        return self.append(0)


class SimulatedEngine(Engine):
    """An engine of a `SimulatedRuntime`, and what its requests saw.

    Attributes:
        runtime: with the clock.
        first_tokens: the seconds from arrivals to first tokens.
        gaps: the seconds between two tokens of an answer.
        waited: the sum over time of the number of sequences that wait for a slot, in seconds.
        most_waiting: the largest such number.
        refused: requests that are too long.
        prompt_tokens: of those that are not.
    """

    runtime: SimulatedRuntime

    def __init__(
        self,
        runtime: SimulatedRuntime,
        num_sequences: int,
        *,
        max_length: int | None = None,
        prefix_cache: PrefixCache | SlotPrefixCache | None = None,
        max_gap: float | None = None,
    ):
        super().__init__(
            runtime,
            num_sequences,
            max_length=max_length,
            prefix_cache=prefix_cache,
            max_gap=max_gap,
            clock=lambda: runtime.clock,
        )
        self.first_tokens, self.gaps = Histogram(), Histogram()
        self.waited, self.most_waiting, self.refused, self.prompt_tokens = 0.0, 0, 0, 0
        self._ends: list[float] = []  # of the last steps at once
        self._last_times: dict[float, int] = {}  # when the last tokens of those that decode came: how many then
        request = Request([0], temperature=0.0, stop_token_ids=[])
        request = replace(request.with_defaults(runtime.generation_config), tokens=[0])
        text = TextStream(None, ())
        self._template = SimulatedSequence(0, request, 1, text, AppliedAdapter(), runtime.prompt_cuts)
        self._ids = itertools.count(1)
        self._sequences: dict[int, SimulatedSequence] = {}

    def arrive(self, arrival: Arrival) -> None:
        """Queue a request, or refuse it as `add` does."""
        if arrival.prompt >= self.max_length:
            self.refused += 1
            return
        sequence = self._template.like(next(self._ids), arrival, self.max_length)
        self._sequences[sequence.id] = sequence
        self.prompt_tokens += arrival.prompt
        self._live.waiting.append(sequence)
        # It may have come within the last steps, between which nobody could begin.
        steps_since = self._ends[bisect.bisect_left(self._ends, arrival.time) :]
        if len(steps_since) > 1:
            self.waited += steps_since[-1] - steps_since[0]
            self.most_waiting = max(self.most_waiting, len(self._live.waiting))

    def advance(self, until: float = math.inf) -> None:
        """Run a step, and those after it in which nothing else happens: those that begin before `until`, when a request
        comes, or even later ones if it could not begin because all slots are taken.
        """
        runtime, began = self.runtime, self.runtime.clock
        self._live.keep_due()
        self._scheduler.admit()
        waiting, started = len(self._live.waiting), runtime.clock
        step = self._scheduler.schedule()
        count = len(step.rows) - step.prompt_rows  # of sequences that decode, which come first
        sequences = cast(Sequence[SimulatedSequence], step.sequences[:count])
        if step.prompt_rows:
            logits, ends = self._run(step)[count:], [runtime.clock]
            self._grow(sequences, ends)
            self._choose(ScheduledStep(step.sequences[count:], step.rows[count:]), logits)
        elif sequences:
            # Others have got their first tokens from the prefix cache just now, or all decode.
            most = min([each.left for each in sequences]) if count == len(self._live.running) else 1
            is_full = len(self._live.running) == self.num_sequences
            ends = runtime.run_decode([row.start for row in step.rows], most, math.inf if is_full else until)
            self._grow(sequences, ends)
        else:
            ends = [runtime.clock]
        ends[-1] = runtime.clock  # the last tokens come after the snapshots that end their sequences
        if sequences:
            self._note_gaps(len(sequences), ends)
        if self._live.outputs:
            for output in self._live.outputs:
                self._note(output)
            self._live.outputs.clear()
        times = [end - begin for begin, end in itertools.pairwise([started, *ends][-STEPS - 1 :])]
        self._scheduler.record(step, *times)  # no more of them have an effect
        self._ends = ends
        self.waited += waiting * (runtime.clock - began)
        self.most_waiting = max(self.most_waiting, waiting)

    def _grow(self, sequences: Sequence[SimulatedSequence], ends: Sequence[float]) -> None:
        """Add a token of so many steps to each sequence, the last one as the engine does if something happens then."""
        steps, special = len(ends), []
        for sequence in sequences:
            if sequence.left == steps:
                special.append(sequence)
            else:
                sequence.left -= steps
                sequence.stored += steps
        for sequence in special:
            self._live.count(sequence, 1, self.runtime.logits, [sequence.grow(steps)])
            sequence.look_ahead(self._prefixes.interval)

    def _note_gaps(self, sequences: int, ends: Sequence[float]) -> None:
        """Record the times between tokens of sequences that decode together, each of which got one at these times."""
        for last_time, count in self._last_times.items():
            self.gaps.add(ends[0] - last_time, count)
        if len(ends) > 1:
            self.gaps.add_all([end - before for before, end in itertools.pairwise(ends)], sequences)
        self._last_times = {ends[-1]: sequences}

    def _note(self, output: Output) -> None:
        """Note that a sequence has its first token, or has ended."""
        if output.error is not None:
            raise RuntimeError(output.error)
        sequence, now = self._sequences[output.id], self.runtime.clock
        if sequence.arrived is not None:
            self.first_tokens.add(now - sequence.arrived)
            self._last_times[now] = self._last_times.get(now, 0) + 1
            sequence.arrived = None
        if output.finish_reason is None:
            sequence.look_ahead(self._prefixes.interval)
        else:
            self._last_times[now] -= 1
            del self._sequences[output.id]
