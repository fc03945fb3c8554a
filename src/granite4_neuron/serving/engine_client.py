"""What the event loop has of the engine, which runs in a process of its own: an `EngineLoop` behind a channel."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from granite4_neuron.engine import Output, Request
from granite4_neuron.errors import UserError
from granite4_neuron.generation.structured_outputs import CompiledGrammar
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.serving.channel import Channel
from granite4_neuron.serving.engine_loop import CLOSE, EngineFacts
from granite4_neuron.serving.errors import RequestError, server_failed, too_many_requests
from granite4_neuron.serving.metrics import Metrics
from granite4_neuron.serving.text_times import TextTimes

Batch = dict[int, list[Output]]  # new outputs by the number of a sequence, from 0
PAUSE_SECONDS = 5

# How long the event loop leaves messages of the engine unread where they come faster. Nobody sees a millisecond in a
# stream, and waking the event loop for a token takes several times as long as everything else that is done for it.
READING_SECONDS = 0.001


class Generation:
    """The running sequences of one request to the server. It belongs to the event loop.

    Iterating over it gives the outputs that have come since the last time, of one engine step or of several if the
    reader is slow; and none, if none has come for `PAUSE_SECONDS`. It raises the error if the engine refuses the
    request.

    take: gets the outputs of a step while the iteration waits for some; returns whether it has taken them, so that the
        iteration waits on. It is for most tokens, because changing tasks costs more than the work for a token.

    Args:
        requests: the sequences, `choices` for each prompt.
        first: the number of the first sequence's text for the engine; the others follow.
        arrived: when the request was there, in seconds.
        times: for those of each sequence that has begun.
    """

    def __init__(
        self, requests: Sequence[Request], choices: int, arrived: float, times: dict[int, TextTimes], first: int = 0
    ):
        self.requests = requests
        self.first = first
        self.choices = choices
        self.arrived = arrived
        self.started = time.perf_counter()
        self.unfinished = len(requests)
        self.first_time: float | None = None  # when the first token of any came
        self.times = times
        self.take: Callable[[Batch], bool] = lambda _: False
        self._is_waiting = False
        self._latest = self.started  # when outputs came
        self._batch: Batch = {}
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        self._pause()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Batch:
        if not self.unfinished and not self._batch:
            raise StopAsyncIteration
        self._is_waiting = True
        await self._has_news.wait()
        self._is_waiting = False
        batch, self._batch = self._batch, {}
        if self._error is None:
            self._has_news.clear()
        elif not batch:
            raise self._error
        return batch

    def add(self, batch: Batch, now: float) -> None:
        """Add outputs that have come now."""
        self.first_time = self.first_time or now
        self._latest = now
        self.unfinished -= sum([outputs[-1].finish_reason is not None for outputs in batch.values()])
        try:
            if self._is_waiting and not self._has_news.is_set() and self.take(batch):
                return
        except Exception as error:  # in the iteration it would end this request alone, too
            return self.fail(error)
        for index, outputs in batch.items():
            self._batch.setdefault(index, []).extend(outputs)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """End the iteration with an error, after the outputs that have come."""
        self._error = error
        self._has_news.set()

    def close(self) -> None:
        """Wake nobody any more."""
        self._pausing.cancel()

    def _pause(self) -> None:
        left = self._latest + PAUSE_SECONDS - time.perf_counter()
        if left <= 0:
            self._has_news.set()
            left = PAUSE_SECONDS
        self._pausing = asyncio.get_running_loop().call_later(left, self._pause)


class EngineClient:
    """Uses an engine between `start` and `close`. Call all methods from the event loop.

    Args:
        channel: to the engine's loop.
        most: how many sequences may run and wait, those of requests that are being prepared among them.
        adapters: the names of the runtime's adapters.
        on_end: called when the engine has ended, after `close` or by itself.
    """

    def __init__(
        self, channel: Channel, most: int, adapters: Collection[str], metrics: Metrics, on_end: Callable[[], None]
    ):
        self._channel = channel
        self._most = most
        self._metrics = metrics
        self._on_end = on_end
        self._places: dict[int, tuple[Generation, int]] = {}  # by the numbers of texts
        self._next = 0  # the number of the next text
        self._live: set[Generation] = set()
        self._changing: dict[str, asyncio.Future[None]] = {}  # by the names of adapters that are loaded and unloaded
        self._preparing = 0
        self._received = -math.inf  # when messages came
        self._reading: asyncio.TimerHandle | None = None
        self.adapters = adapters  # also one that is being unloaded
        self.is_alive = True

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.incoming, self._receive)

    def started(self, port: int) -> None:
        """Say that clients can connect."""
        self._send("started", port)

    def close(self) -> None:
        """End the engine after its current step, if it is running."""
        if self.is_alive:
            self._channel.send(CLOSE, waits=True)
            self._ended()

    async def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Add an adapter between two steps.

        Raises:
            UserError: the runtime cannot.
            RequestError: 500 if the engine has ended, or ends before.
        """
        await self._change("load_adapter", name, adapter)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter, once no text uses it.

        Raises:
            RequestError: 500 if the engine has ended, or ends before.
        """
        await self._change("unload_adapter", name)

    @property
    def num_requests(self) -> int:
        """Requests to the server whose sequences run or wait."""
        return len(self._live)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Keep room for one sequence of a request while the number of its sequences is unknown.

        Raises:
            RequestError: as `check_room`.
        """
        self.check_room(1)
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    def check_room(self, sequences: int) -> None:
        """Check that so many sequences could be submitted now.

        Raises:
            RequestError: 429 if the queue is full; 500 if the engine has ended.
        """
        self._check_alive()
        if sum(generation.unfinished for generation in self._live) + self._preparing + sequences > self._most:
            raise too_many_requests("the queue is full; try again later.")

    def submit(
        self,
        requests: Sequence[Request],
        grammar: CompiledGrammar | None,
        choices: int,
        arrived: float,
        times: dict[int, TextTimes],
    ) -> Generation:
        """Queue the sequences of one request, whose texts follow a grammar or none; see `Generation`.

        Raises:
            RequestError: as `check_room`.
        """
        self.check_room(len(requests))
        generation = Generation(requests, choices, arrived, times, self._next)
        self._next += len(requests)
        self._metrics.prepared(generation.started - arrived)
        self._live.add(generation)
        for index in range(len(requests)):
            self._places[generation.first + index] = generation, index
        self._send("add", generation.first, requests, grammar)
        return generation

    def end(self, generation: Generation) -> None:
        """Cancel what still runs of it, before the engine's next step."""
        generation.close()
        if generation in self._live:
            self._forget(generation)
            self._send("cancel", generation.first, len(generation.requests))
            for _ in range(generation.unfinished):
                self._metrics.ended("abort", None)

    def _send(self, *message: object) -> None:
        if self.is_alive and not self._channel.send(message):
            self._loop.add_writer(self._channel.outgoing, self._flush)

    def _flush(self) -> None:
        if self._channel.flush():
            self._loop.remove_writer(self._channel.outgoing)

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise _engine_has_stopped()

    async def _change(self, how: str, name: str, *adapter: Adapter) -> None:
        self._check_alive()
        done = self._changing[name] = self._loop.create_future()
        self._send(how, name, *adapter)
        await done

    def _receive(self) -> None:
        try:
            messages = self._channel.receive(waits=False)
        except EOFError:
            return self._ended()
        now = time.perf_counter()
        if messages:
            if len(messages) > 1 or now - self._received < READING_SECONDS:
                self._loop.remove_reader(self._channel.incoming)
                self._reading = self._loop.call_later(READING_SECONDS, self._read_on)
            self._received = now
        # Of all steps that were read at once, so that a busy loop makes one event of them.
        batches: dict[Generation, Batch] = {}
        for kind, *values in messages:
            if kind == "outputs":
                rows, step_tokens, *facts = values
                self._metrics.stepped(step_tokens, EngineFacts(*facts))
                self._sort_in(batches, rows, now)
            elif kind == "adapter":
                name, error, self.adapters = values
                _settle(self._changing.pop(name), error)
            else:
                self._failed(*values)
        for generation, batch in batches.items():
            generation.add(batch, now)
            if not generation.unfinished:
                self._forget(generation)
                for choices in _grouped(range(len(generation.requests)), generation.choices):
                    tokens = [generation.times[index].tokens for index in choices if index in generation.times]
                    if tokens:
                        self._metrics.answered_prompt(tokens)

    def _read_on(self) -> None:
        self._loop.add_reader(self._channel.incoming, self._receive)
        self._receive()

    def _sort_in(self, batches: dict[Generation, Batch], rows: Sequence[tuple], now: float) -> None:
        """Add the outputs of a step to those of their requests, and record their times."""
        before = None
        for row in rows:
            if row[0] in self._places:  # otherwise it has been cancelled
                generation, index = self._places[row[0]]
                output = Output(*row)
                batches.setdefault(generation, {}).setdefault(index, []).append(output)
                self._measure(generation, index, output, now, row[0] != before)
                before = row[0]

    def _measure(self, generation: Generation, index: int, output: Output, now: float, is_first: bool) -> None:
        """Record the times of an output, in seconds; `is_first` is that of its text in a step."""
        times = generation.times.get(index)
        if times is not None and is_first:
            self._metrics.next_tokens(now - times.latest)
            times.latest = now
        elif times is None and (prompt := output.prompt) is not None:
            request, when = generation.requests[index], (generation.arrived, generation.started, prompt.started)
            lengths = len(request.tokens), prompt.cached_tokens, request.max_tokens
            times = generation.times[index] = TextTimes(*lengths, *when, first=now, latest=now)
            self._metrics.first_token(times)
        if times is not None:
            times.tokens += output.token is not None
        if output.finish_reason is not None:
            self._metrics.ended(output.finish_reason, times)

    def _failed(self, first: int, error: UserError | None) -> None:
        if first in self._places:
            generation, _ = self._places[first]
            self._fail(generation, error or server_failed())

    def _fail(self, generation: Generation, error: Exception) -> None:
        generation.fail(error)
        self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        self._live.remove(generation)
        for index in range(len(generation.requests)):
            del self._places[generation.first + index]

    def _ended(self) -> None:
        self.is_alive = False
        if self._reading is not None:
            self._reading.cancel()
        self._loop.remove_reader(self._channel.incoming)
        self._loop.remove_writer(self._channel.outgoing)
        self._channel.close()
        for done in self._changing.values():
            _settle(done, _engine_has_stopped())
        for generation in list(self._live):
            self._fail(generation, _engine_has_stopped())
        self._on_end()


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():  # its client is gone
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _grouped(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))


def _engine_has_stopped() -> RequestError:
    return RequestError(500, "the server's engine has stopped.")
