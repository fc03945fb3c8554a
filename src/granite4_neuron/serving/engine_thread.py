"""The one thread that runs the engine. Requests come from the event loop; tokens go back to it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from granite4_neuron.engine import Engine, Output, Request
from granite4_neuron.engine.live_sequences import MOST_FAILED_STEPS
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.serving.errors import RequestError, too_many_requests
from granite4_neuron.serving.metrics import Metrics
from granite4_neuron.serving.text_times import TextTimes
from granite4_neuron.system.stack import with_stack

Batch = dict[int, list[Output]]  # new outputs by the number of a sequence, from 0
PAUSE_SECONDS = 5


class Generation:
    """The running sequences of one request to the server. It belongs to the event loop.

    Iterating over it gives the outputs that have come since the last time, of one engine step or of several if the
    reader is slow; and none, if none has come for `PAUSE_SECONDS`. It raises the error if the engine refuses the
    request.

    Args:
        requests: the sequences, `choices` for each prompt.
        arrived: when the request was there, in seconds.
        times: for those of each sequence that has begun.
    """

    def __init__(self, requests: Sequence[Request], choices: int, arrived: float, times: dict[int, TextTimes]):
        self.requests = requests
        self.choices = choices
        self.arrived = arrived
        self.started = time.perf_counter()
        self.unfinished = len(requests)
        self.ids: list[int] = []  # from `Engine.add`; only the engine's thread uses them
        self.first_time: float | None = None  # when the first token of any came
        self.times = times
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
        await self._has_news.wait()
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
        for index, outputs in batch.items():
            self.unfinished -= outputs[-1].finish_reason is not None
            if index in self._batch:
                self._batch[index] += outputs
            else:
                self._batch[index] = outputs
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


class EngineThread:
    """Runs an engine in its own thread, between `start` and `close`. Call all methods from the event loop.

    Args:
        engine: from here on only this thread may use it.
        most: how many sequences may run and wait, those of requests that are being prepared among them.
        on_end: called on the event loop when the thread has ended, after `close` or an unexpected error.
    """

    def __init__(self, engine: Engine, most: int, metrics: Metrics, on_end: Callable[[], None]):
        self._engine = engine
        self._most = most
        self._metrics = metrics
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._generations: dict[int, tuple[Generation, int]] = {}  # by the engine's ids; only the thread uses it
        self._live: set[Generation] = set()
        self._unloading: dict[str, asyncio.Future[None]] = {}  # by the name of an adapter; only the thread uses it
        self._preparing = 0
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        with with_stack():
            self._thread.start()

    def close(self) -> None:
        """End the thread after its current step, if it is running."""
        if self.is_alive:
            self._inbox.put(None)
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def adapters(self) -> Collection[str]:
        """The names of the runtime's adapters, also of one that is being unloaded."""
        return self._engine.runtime.adapters

    async def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Add an adapter between two steps; raise UserError if the runtime cannot."""
        done = self._loop.create_future()
        self._inbox.put(partial(self._load_adapter, name, adapter, done))
        await done

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter, once no text uses it."""
        done = self._loop.create_future()
        self._inbox.put(partial(self._unloading.__setitem__, name, done))
        await done

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
            RequestError: 429 if the queue is full; 500 if the thread has ended.
        """
        if self._has_ended:
            raise _engine_has_stopped()
        if sum(generation.unfinished for generation in self._live) + self._preparing + sequences > self._most:
            raise too_many_requests("the queue is full; try again later.")

    def submit(
        self, requests: Sequence[Request], choices: int, arrived: float, times: dict[int, TextTimes]
    ) -> Generation:
        """Queue the sequences of one request; see `Generation`.

        Raises:
            RequestError: as `check_room`.
        """
        self.check_room(len(requests))
        generation = Generation(requests, choices, arrived, times)
        self._metrics.prepared(generation.started - arrived)
        self._live.add(generation)
        self._inbox.put(partial(self._add, generation))
        return generation

    def end(self, generation: Generation) -> None:
        """Cancel what still runs of it, before the engine's next step."""
        generation.close()
        if generation in self._live:
            self._live.remove(generation)
            self._inbox.put(partial(self._cancel, generation))
            for _ in range(generation.unfinished):
                self._metrics.ended("abort", None)

    def _run(self) -> None:
        try:
            failed = 0
            # A supervisor of the process is expected to start the server again.
            while max(failed, self._engine.failed_steps) < MOST_FAILED_STEPS and self._take_in():
                failed = 0 if self._step() else failed + 1
        finally:
            self._loop.call_soon_threadsafe(self._ended)

    def _step(self) -> bool:
        """Run a step and give out what it returns; false if there was too little memory even to begin it."""
        stats = self._engine.stats
        before = stats.prompt_tokens + stats.generated_tokens
        try:
            outputs = self._engine.step()
        except MemoryError:  # outside of the work for sequences, so the next step can go on
            return False
        self._metrics.stepped(stats.prompt_tokens + stats.generated_tokens - before)
        self._give_out(outputs)
        return True

    def _take_in(self) -> bool:
        """Run the commands that have come in, waiting for one if there is no work; false if the thread is to end."""
        while True:
            self._unload_unused()
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _load_adapter(self, name: str, adapter: Adapter, done: asyncio.Future[None]) -> None:
        error = None
        try:
            self._engine.runtime.load_adapter(name, adapter)
        except (UserError, MemoryError) as failure:
            error = failure
        self._loop.call_soon_threadsafe(_settle, done, error)

    def _unload_unused(self) -> None:
        for name, done in list(self._unloading.items()):
            if any(generation.requests[index].adapter == name for generation, index in self._generations.values()):
                continue
            self._engine.runtime.unload_adapter(name)
            del self._unloading[name]
            self._loop.call_soon_threadsafe(_settle, done, None)

    def _add(self, generation: Generation) -> None:
        try:
            for index, request in enumerate(generation.requests):
                id = self._engine.add(request)
                generation.ids.append(id)
                self._generations[id] = generation, index
        except Exception as error:  # such as too little memory; other requests must not notice
            self._cancel(generation)
            self._loop.call_soon_threadsafe(self._fail, generation, error)

    def _cancel(self, generation: Generation) -> None:
        for id in generation.ids:
            self._engine.cancel(id)
            self._generations.pop(id, None)

    def _give_out(self, outputs: Sequence[Output]) -> None:
        batches: dict[Generation, Batch] = {}
        for output in outputs:
            generation, index = self._generations[output.id]
            batches.setdefault(generation, {}).setdefault(index, []).append(output)
            if output.finish_reason is not None:
                del self._generations[output.id]
        if batches:
            self._loop.call_soon_threadsafe(self._deliver, batches)

    def _deliver(self, batches: dict[Generation, Batch]) -> None:
        now = time.perf_counter()
        for generation, batch in batches.items():
            if generation not in self._live:
                continue
            self._measure(generation, batch, now)
            generation.add(batch, now)
            if not generation.unfinished:
                self._live.remove(generation)
                for choices in _grouped(range(len(generation.requests)), generation.choices):
                    tokens = [generation.times[index].tokens for index in choices if index in generation.times]
                    if tokens:
                        self._metrics.answered_prompt(tokens)

    def _measure(self, generation: Generation, batch: Batch, now: float) -> None:
        """Record the times of new tokens, in seconds."""
        for index, outputs in batch.items():
            times = generation.times.get(index)
            if times is not None:
                self._metrics.next_tokens(now - times.latest)
                times.latest = now
            elif (prompt := outputs[0].prompt) is not None:
                request, when = generation.requests[index], (generation.arrived, generation.started, prompt.started)
                lengths = len(request.tokens), prompt.cached_tokens, request.max_tokens
                times = generation.times[index] = TextTimes(*lengths, *when, first=now, latest=now)
                self._metrics.first_token(times)
            if times is not None:
                times.tokens += sum(output.token is not None for output in outputs)
            if (reason := outputs[-1].finish_reason) is not None:
                self._metrics.ended(reason, times)

    def _fail(self, generation: Generation, error: Exception) -> None:
        generation.fail(error)
        self._live.discard(generation)

    def _ended(self) -> None:
        self._has_ended = True
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
