"""Work for requests that is done beside the event loop and the engine."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from granite4_neuron.serving.errors import too_many_requests
from granite4_neuron.system.sandbox.limited_process import Stop, starting

Result = TypeVar("Result")


class WorkQueue:
    """Threads for one kind of work, for which a limited number of requests may wait. Call all methods from the event
    loop.

    All threads start at once: a pool whose threads start with the work keeps work for which it could start none.

    Args:
        name: of the threads.
        threads: how many.
        most: how many requests may be in it, waiting or being worked on; any number if this is not given.
        full: the message to further ones.

    Raises:
        NoProcess: the threads cannot be started.
    """

    def __init__(self, name: str, threads: int, most: float = math.inf, full: str = ""):
        self._executor = ThreadPoolExecutor(threads, name)
        started = threading.Event()
        try:
            with starting():
                for _ in range(threads):  # each takes one, because none ends before all have started
                    self._executor.submit(started.wait)
        finally:
            started.set()
        self._most = most
        self._full = full
        self.num_requests = 0  # in it, waiting or being worked on

    async def run(self, work: Callable[[Stop], Result]) -> Result:
        """Return the result of the work of one request. If this is cancelled, work that waits is never begun.

        Args:
            work: gets a `Stop`, which is set if this is cancelled while it runs.

        Raises:
            RequestError: 429, it is full.
        """
        if self.num_requests >= self._most:
            raise too_many_requests(self._full)
        stop = Stop()
        self.num_requests += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, stop)
        finally:
            self.num_requests -= 1
            stop.set()

    def close(self) -> None:
        """Begin no further work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class WorkQueues:
    """The queues of all kinds of work.

    prompts: parsing and tokenizing for completions and chats.
    tokenize: the same for requests that only ask for tokens or their text.
    grammars: compiling, one at a time.
    answers: encoding what may be long.
    markdown: parsing answers for the page, one at a time.
    adapters: reading one to load.

    Args:
        most: how many requests may be in each but the queues of answers and adapters: an answer was admitted before.
    """

    def __init__(self, most: int):
        busy = "too many requests wait for {}; try again later."
        self.prompts = WorkQueue("prompts", 4, most, busy.format("tokenizing"))
        self.tokenize = WorkQueue("tokenize", 2, most, busy.format("tokenizing"))
        self.grammars = WorkQueue("grammars", 1, most, busy.format("their grammar"))
        self.answers = WorkQueue("answers", 4)
        self.markdown = WorkQueue("markdown", 1, most, busy.format("their Markdown"))
        self.adapters = WorkQueue("adapters", 1)

    def close(self) -> None:
        for queue in (self.prompts, self.tokenize, self.grammars, self.answers, self.markdown, self.adapters):
            queue.close()
