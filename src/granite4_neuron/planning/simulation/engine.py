"""An engine that a simulation drives from event to event.

It has the engine's scheduler, slots and prefix cache. Between two events, such as an arrival, the end of an answer or a
snapshot of the prefix cache, all steps of decode have the same rows, each one token longer than before. The simulation
takes these steps together, and all others one by one: with `Engine.step` a day of a million requests would take hours.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from granite4_neuron.engine import Output, Request
from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.drafting.drafting import Drafting
from granite4_neuron.engine.live_sequences import LiveSequences
from granite4_neuron.engine.prefill_budget import STEPS
from granite4_neuron.engine.prefix.cache import PrefixCache
from granite4_neuron.engine.prefix.reuse import PrefixReuse
from granite4_neuron.engine.prefix.slot_cache import SlotPrefixCache
from granite4_neuron.engine.request import GenerationStats
from granite4_neuron.engine.scheduler import Scheduler
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.slots import Slots
from granite4_neuron.engine.text import TextStream
from granite4_neuron.errors import UserError
from granite4_neuron.ops.sampling import Chosen, Logprobs
from granite4_neuron.planning.simulation.runtime import SimulatedRuntime
from granite4_neuron.planning.simulation.statistics import Histogram
from granite4_neuron.planning.simulation.traffic import Arrival
from granite4_neuron.runtime.interface import Row


class _Row:
    """A cheap `Row`, with only what step times depend on."""

    __slots__ = ("start", "tokens")

    def __init__(self, start: int, tokens: Sequence[int]):
        self.start, self.tokens = start, tokens


class SimulatedSequence(RunningSequence):
    """A request of the traffic while it runs. Its tokens need no checks. Its answer is zeros, which are added to its
    tokens only at its next event: its end, or a snapshot.

    arrived: in seconds; None after its first token.
    prompt_tokens: the length of its prompt.
    left: the number of tokens until its next event.
    """

    arrived: float | None
    prompt_tokens: int
    left: int
    _last_row: _Row

    def like(self, id: int, arrival: Arrival, max_length: int) -> SimulatedSequence:
        """Return a new sequence, not yet begun, with the options of this one."""
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
        """Whether some tokens of the prompt have not run yet."""
        return self.stored < self.prompt_tokens

    def look_ahead(self, interval: int | None) -> None:
        """Set `left`, the number of tokens until its next event.

        Args:
            interval: tokens between two snapshots of the prefix cache.
        """
        self.left = self.most_drafts(self.limit, interval) + 1

    def next_row(self, stop: int, drafts: Sequence[int] = (), is_kept: bool = False) -> Row:
        """Return a row with the right number of tokens."""
        return cast(Row, _Row(self.stored, range(stop - self.stored)))

    def last_row(self, drafts: Sequence[int]) -> Row:
        """Return a row with one token; always the same object."""
        self._last_row.start = self.stored
        return self._last_row  # type: ignore[return-value]  # called often

    def choose(
        self,
        logits: Sequence[torch.Tensor],
        drafts: Sequence[int] = (),
        answers: Sequence[Chosen | UserError] = (),
    ) -> list[Output]:
        """Choose token 0."""
        return [self.append(0)]

    def append(self, token: int, report: Logprobs | None = None) -> Output:
        """Add a token, which ends the sequence at its limit."""
        self.tokens.append(token)
        return Output(self.id, token, "", "length" if len(self.tokens) == self.limit else None)

    def grow(self, steps: int) -> Output:
        """Add the tokens of earlier steps and of `steps` further ones; return the output of the last step, which is not
        counted yet.
        """
        self.stored += steps - 1
        self.tokens += [0] * (self.stored + 1 - len(self.tokens))
        return self.append(0)


class SimulatedEngine:
    """The parts of an `Engine` on a `SimulatedRuntime`. It records its requests' latencies.

    Attributes:
        runtime: has the clock.
        first_tokens: the seconds from arrivals to first tokens.
        gaps: the seconds between two tokens of an answer.
        waited: the integral over time of the number of sequences that wait for a slot, in seconds.
        most_waiting: the largest number of waiting sequences.
        refused: the number of requests that are too long.
        prompt_tokens: the number of prompt tokens of the other requests.
    """

    def __init__(
        self,
        runtime: SimulatedRuntime,
        num_sequences: int,
        *,
        max_length: int | None = None,
        prefix_cache: PrefixCache | SlotPrefixCache | None = None,
        max_gap: float | None = None,
    ):
        self.runtime = runtime
        self.num_sequences = num_sequences
        self.max_length = runtime.max_length if max_length is None else min(max_length, runtime.max_length)
        self.stats = GenerationStats()
        set_aside = () if prefix_cache is None else prefix_cache.slots
        slots, drafting = Slots(runtime, num_sequences, self.max_length, None, set_aside), Drafting(None, runtime, 1)
        self._prefixes = PrefixReuse(prefix_cache, runtime, slots, self.stats)
        self._live = LiveSequences(self._prefixes, drafting, self.stats)
        parts = slots, self._live, self._prefixes, drafting
        self._scheduler = Scheduler(runtime, *parts, False, max_gap, lambda: runtime.clock)
        self.first_tokens, self.gaps = Histogram(), Histogram()
        self.waited, self.most_waiting, self.refused, self.prompt_tokens = 0.0, 0, 0, 0
        self._ends: list[float] = []  # the ends of the steps that were last taken together
        # {time of a decoding sequence's last token: number of sequences with a token at that time}.
        self._last_times: dict[float, int] = {}
        request = Request([0], temperature=0.0, stop_token_ids=[])
        request = replace(request.with_defaults(runtime.generation_config), tokens=[0])
        text = TextStream(None, ())
        self._template = SimulatedSequence(0, request, 1, text, AppliedAdapter(), runtime.prompt_cuts)
        self._ids = itertools.count(1)
        # Arrivals beyond those that the engine knows of: a sequence with its tokens takes much more memory.
        self._queue: deque[Arrival] = deque()
        self._sequences: dict[int, SimulatedSequence] = {}

    def arrive(self, arrival: Arrival) -> None:
        """Queue a request, or refuse it as `Engine.add` does."""
        if arrival.prompt >= self.max_length:
            self.refused += 1
            return
        self.prompt_tokens += arrival.prompt
        self._queue.append(arrival)
        # It may have arrived during the steps that were last taken together, between which no sequence could begin.
        steps_since = self._ends[bisect.bisect_left(self._ends, arrival.time) :]
        if len(steps_since) > 1:
            self.waited += steps_since[-1] - steps_since[0]
            self.most_waiting = max(self.most_waiting, self.num_waiting)

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return bool(self._queue) or self._live.has_work

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._queue) + len(self._live.waiting)

    def advance(self, until: float = math.inf) -> None:
        """Run a step, and further steps without an event. These begin before `until`, when the next request arrives, or
        also later, if all slots are taken so that the request could not begin.
        """
        runtime, began = self.runtime, self.runtime.clock
        self._take_from_queue()
        self._live.keep_due()
        self._scheduler.admit()
        waiting, started = self.num_waiting, runtime.clock
        step = self._scheduler.schedule()
        count = len(step.rows) - step.prompt_rows  # decoding sequences, which come first
        sequences = cast(Sequence[SimulatedSequence], step.sequences[:count])
        if step.prompt_rows:
            runtime.step(None, step.rows)
            times, ends = [runtime.clock - started], [runtime.clock]
            self._grow(sequences, ends)
            for sequence, row in zip(step.sequences[count:], step.rows[count:], strict=True):
                is_run = row.start + len(row.tokens) == len(sequence.tokens)
                first = sequence.choose([runtime.logits]) if is_run else []
                self._live.count(sequence, len(row.tokens), runtime.logits, first)
        elif sequences:
            # If not all sequences decode, some have just got their first tokens from the prefix cache.
            most = min([each.left for each in sequences]) if count == len(self._live.running) else 1
            is_full = len(self._live.running) == self.num_sequences
            scheduled = runtime.clock
            times, ends = runtime.run_decode([row.start for row in step.rows], most, math.inf if is_full else until)
            times[0] += scheduled - started
            self._grow(sequences, ends)
        else:
            times, ends = [runtime.clock - started], [runtime.clock]
        # The last tokens come after the snapshots that end their sequences.
        times[-1] += runtime.clock - ends[-1]
        ends[-1] = runtime.clock
        if sequences:
            self._note_gaps(len(sequences), times, ends)
        if self._live.outputs:
            for output in self._live.outputs:
                self._note(output)
            self._live.outputs.clear()
        self._scheduler.record(step, *times[-STEPS:])  # earlier ones would have no effect
        self._ends = ends
        self.waited += waiting * (runtime.clock - began)
        self.most_waiting = max(self.most_waiting, waiting)

    def _take_from_queue(self) -> None:
        """Let the engine know of as many waiting requests as can start in a step, and of one that waits for them."""
        while self._queue and len(self._live.waiting) <= self.num_sequences:
            sequence = self._template.like(next(self._ids), self._queue.popleft(), self.max_length)
            self._sequences[sequence.id] = sequence
            self._live.waiting.append(sequence)

    def _grow(self, sequences: Sequence[SimulatedSequence], ends: Sequence[float]) -> None:
        """Add a token for each of these steps to each sequence. A sequence with an event gets the last one as in the
        engine.
        """
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

    def _note_gaps(self, sequences: int, times: Sequence[float], ends: Sequence[float]) -> None:
        """Record the times between tokens of sequences that decode together: each got one after each of these steps.

        Args:
            times, ends: of the steps.
        """
        for last_time, count in self._last_times.items():
            self.gaps.add(ends[0] - last_time, count)
        if len(times) > 1:
            self.gaps.add_all(times[1:], sequences)
        self._last_times = {ends[-1]: sequences}

    def _note(self, output: Output) -> None:
        """Record a sequence's first token or its end."""
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
