"""An engine that a simulation drives from event to event.

It is the engine with its scheduler, its slots and its prefix cache. Between two events, such as an arrival, the end of
an answer or a snapshot of the prefix cache, all steps of decode have the same rows, each one token longer than before;
these steps are taken at once. Everything else is a step like any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from granite4_neuron.engine import Engine, Output, Request
from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.prefix_cache import PrefixCache
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.slot_prefix_cache import SlotPrefixCache
from granite4_neuron.engine.text import TextStream
from granite4_neuron.runtime.interface import Row
from granite4_neuron.simulation.runtime import SimulatedRuntime
from granite4_neuron.simulation.statistics import Histogram
from granite4_neuron.simulation.traffic import Arrival


class _Row(NamedTuple):
    """A `Row`, which takes less time to make."""

    slot: int
    start: int
    tokens: Sequence[int]
    adapter: int = 0
    stops: Sequence[int] = ()


class SimulatedSequence(RunningSequence):
    """A request of the traffic while it runs. Its tokens need no checks, and its answer is zeros.

    arrived: in seconds. last_time: when its last token came; None before the first.
    prompt_tokens: the length of its prompt.
    left: how many tokens further something happens to it: it ends, or a snapshot of it is due.
    """

    arrived: float
    last_time: float | None
    prompt_tokens: int
    left: int

    def like(self, id: int, arrival: Arrival, max_length: int) -> SimulatedSequence:
        """Return a new sequence with the options of this one, which has not begun."""
        sequence = object.__new__(SimulatedSequence)
        request = object.__new__(Request)
        tokens = arrival.tokens()
        request.__dict__.update(self.request.__dict__, tokens=tokens, max_tokens=arrival.answer)
        sequence.__dict__.update(
            self.__dict__,
            id=id,
            request=request,
            limit=min(arrival.prompt + arrival.answer, max_length),
            tokens=tokens.copy(),
            cuts=set(),
            arrived=arrival.time,
            last_time=None,
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
        return cast(Row, _Row(self.slot, self.stored, range(self.stored, stop)))

    def choose(self, logits: Sequence[torch.Tensor], drafts: Sequence[int] = ()) -> list[Output]:
        """Choose token 0."""
        return [self.append(0)]


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

    def advance(self, until: float = math.inf) -> None:
        """Run a step, and those after it that begin before `until` and in which nothing else happens."""
        runtime, began = self.runtime, self.runtime.clock
        self._prefixes.keep_due(self._live.running.values())
        self._scheduler.admit()
        waiting, started = len(self._live.waiting), runtime.clock
        step = self._scheduler.schedule()
        count = len(step.rows) - step.prompt_rows  # of sequences that decode, which come first
        sequences = cast(Sequence[SimulatedSequence], step.sequences[:count])
        if step.prompt_rows:
            logits, ends = self._run(step)[count:], [runtime.clock]
            self._grow(sequences, 1)
            prompts = step._replace(sequences=step.sequences[count:], rows=step.rows[count:])
            self._choose(prompts, logits)
        elif sequences:
            # Others have got their first tokens from the prefix cache just now, or all decode.
            most = min([each.left for each in sequences]) if count == len(self._live.running) else 1
            ends = runtime.run_decode([row.start for row in step.rows], most, until)
            self._grow(sequences, len(ends))
        else:
            ends = [runtime.clock]
        ends[-1] = runtime.clock  # the last tokens come after the snapshots that end their sequences
        self._note_gaps(sequences, ends)
        for output in self._live.outputs:
            self._note(output)
        self._live.outputs.clear()
        for begin, end in itertools.pairwise([started, *ends]):
            self._scheduler.record(step, end - begin)
        self.waited += waiting * (runtime.clock - began)
        self.most_waiting = max(self.most_waiting, waiting)

    def _grow(self, sequences: Sequence[SimulatedSequence], steps: int) -> None:
        """Add a token of so many steps to each sequence, the last one as the engine does if something happens then."""
        zeros, special = [0] * steps, []
        for sequence in sequences:
            if sequence.left == steps:
                special.append(sequence)
            else:
                sequence.left -= steps
                sequence.stored += steps
                sequence.tokens.extend(zeros)
        for sequence in special:
            sequence.stored += steps - 1
            sequence.tokens.extend(zeros[1:])
            self._live.count(sequence, 1, self.runtime.logits, [sequence.append(0)])
            sequence.look_ahead(self._prefixes.interval)

    def _note_gaps(self, sequences: Sequence[SimulatedSequence], ends: Sequence[float]) -> None:
        """Record the times between tokens of sequences that got one at each of these times."""
        for last_time, group in itertools.groupby([sequence.last_time for sequence in sequences]):
            self.gaps.add(ends[0] - cast(float, last_time), sum(1 for _ in group))
        for sequence in sequences:
            sequence.last_time = ends[-1]
        if sequences:
            self.gaps.add_all([end - before for before, end in itertools.pairwise(ends)], len(sequences))

    def _note(self, output: Output) -> None:
        """Record when a token came, unless that has been done, and forget a sequence that has ended."""
        if output.error is not None:
            raise RuntimeError(output.error)
        sequence = self._sequences[output.id]
        now = self.runtime.clock
        if sequence.last_time is None:
            self.first_tokens.add(now - sequence.arrived)
        elif sequence.last_time != now:
            self.gaps.add(now - sequence.last_time)
        sequence.last_time = now
        if output.finish_reason is None:
            sequence.look_ahead(self._prefixes.interval)
        else:
            del self._sequences[output.id]
