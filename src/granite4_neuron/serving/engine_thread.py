"""The one thread that runs the engine; requests reach it from the event loop, and their tokens come back there."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from granite4_neuron.engine import Engine, Output, Request
from granite4_neuron.errors import UserError
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.serving.metrics import Metrics

RETRY_AFTER_SECONDS = 1

Batch = list[tuple[int, Output]]


class Generation:
    """The sequences of one request to the server, as they go on. Lives on the event loop.

    Iterated over, it gives what each of the engine's steps brings: pairs of a sequence's number, from 0 on, and its
    output. It raises what the engine thinks of the request.
    """

    def __init__(self, requests: Sequence[Request]):
        self.requests = requests
        self.started = time.perf_counter()
        self.unfinished = len(requests)
        self.ids: list[int] = []  # of the engine; the engine's thread's only
        self.last_times: dict[int, float] = {}  # of each sequence's latest tokens
        self.batches: asyncio.Queue[Batch | Exception] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Batch]:
        ended = 0
        while ended < len(self.requests):
            batch = await self.batches.get()
            if isinstance(batch, Exception):
                raise batch
            ended += sum(output.finish_reason is not None for _, output in batch)
            yield batch


class EngineThread:
    """Runs an engine in a thread of its own, between `start` and `close`. All methods are for the event loop.

    Args:
        engine: nobody else's from here on.
        num_sequences: how many it runs at a time.
        max_queue: how many more may wait.
        on_end: called when the thread has ended, by `close` or by an error that nobody expected.
    """

    def __init__(
        self, engine: Engine, num_sequences: int, max_queue: int, metrics: Metrics, on_end: Callable[[], None]
    ):
        self._engine = engine
        self._most = num_sequences + max_queue
        self._metrics = metrics
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._generations: dict[int, tuple[Generation, int]] = {}  # by the engine's ids; the thread's only
        self._live: set[Generation] = set()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """End the thread after its present step, if it runs."""
        if self.is_alive:
            self._inbox.put(None)
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> Generation:
        """Have sequences run.

        Raises:
            RequestError: 400, they are more than there is ever room for; 429, there is no room now; 500, the thread has
                ended.
        """
        if self._has_ended:
            raise _engine_has_stopped()
        if len(requests) > self._most:
            raise RequestError(
                400, f"the request asks for {len(requests)} texts; this server takes {self._most} at most."
            )
        if sum(generation.unfinished for generation in self._live) + len(requests) > self._most:
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            raise RequestError(429, "the queue is full; try again later.", headers=headers)
        generation = Generation(requests)
        self._live.add(generation)
        self._inbox.put(partial(self._add, generation))
        return generation

    def end(self, generation: Generation) -> None:
        """Nobody wants more of it: its sequences that still run end before the engine's next step."""
        if generation in self._live:
            self._live.remove(generation)
            self._inbox.put(partial(self._cancel, generation))

    def _run(self) -> None:
        try:
            while self._take_in():
                self._give_out(self._engine.step())
        finally:
            self._loop.call_soon_threadsafe(self._ended)

    def _take_in(self) -> bool:
        """What has come in; waits for something where there is nothing to do. False if this is the end."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, generation: Generation) -> None:
        try:
            for index, request in enumerate(generation.requests):
                id = self._engine.add(request)
                generation.ids.append(id)
                self._generations[id] = generation, index
        except UserError as error:
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
            batches.setdefault(generation, []).append((index, output))
            if output.finish_reason is not None:
                del self._generations[output.id]
        if batches:
            self._loop.call_soon_threadsafe(self._deliver, batches)

    def _deliver(self, batches: dict[Generation, Batch]) -> None:
        now = time.perf_counter()
        for generation, batch in batches.items():
            if generation not in self._live:
                continue
            self._metrics.observe(generation.started, generation.last_times, [index for index, _ in batch], now)
            generation.unfinished -= sum(output.finish_reason is not None for _, output in batch)
            generation.batches.put_nowait(batch)
            if not generation.unfinished:
                self._live.remove(generation)

    def _fail(self, generation: Generation, error: Exception) -> None:
        generation.batches.put_nowait(error)
        self._live.discard(generation)

    def _ended(self) -> None:
        self._has_ended = True
        for generation in list(self._live):
            self._fail(generation, _engine_has_stopped())
        self._on_end()


def _engine_has_stopped() -> RequestError:
    return RequestError(500, "the server's engine has stopped.")
