"""Work for requests that is done beside the event loop and the engine, before the engine gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from granite4_neuron.serving.errors import too_many_requests
from granite4_neuron.system.sandbox.limited_process import Stop, starting

Result = TypeVar("Result")


class WorkQueue:
    """Threads for one kind of work, for which a limited number of requests may wait. Call all methods from the event
    loop.

    Args:
        name: of the threads.
        threads: how many.
        most: how many requests may be in it, waiting or being worked on.
        full: the message to further ones.
    """

    def __init__(self, name: str, threads: int, most: int, full: str):
        self._executor = ThreadPoolExecutor(threads, name)
        self._most = most
        self._full = full
        self.num_requests = 0  # in it, waiting or being worked on

    async def run(self, work: Callable[[Stop], Result]) -> Result:
        """Return the result of the work of one request. If this is cancelled, work that waits is never begun.

        Args:
            work: gets a `Stop`, which is set if this is cancelled while it runs.

        Raises:
            RequestError: 429, it is full.
            NoProcess: no thread can be started.
        """
        if self.num_requests >= self._most:
            raise too_many_requests(self._full)
        stop = Stop()
        self.num_requests += 1
        try:
            with starting():
                working = asyncio.get_running_loop().run_in_executor(self._executor, work, stop)
            return await working
        finally:
            self.num_requests -= 1
            stop.set()

    def close(self) -> None:
        """Begin no further work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Preparation:
    """The queues of requests that the engine does not have yet.

    prompts: parsing and tokenizing for completions and chats.
    tokenize: the same for requests that only ask for tokens or their text.
    grammars: compiling, one at a time.
    markdown: parsing answers for the page, one at a time.

    Args:
        most: how many requests may be in each.
    """

    def __init__(self, most: int):
        busy = "too many requests wait for {}; try again later."
        self.prompts = WorkQueue("prompts", 4, most, busy.format("tokenizing"))
        self.tokenize = WorkQueue("tokenize", 2, most, busy.format("tokenizing"))
        self.grammars = WorkQueue("grammars", 1, most, busy.format("their grammar"))
        self.markdown = WorkQueue("markdown", 1, most, busy.format("their Markdown"))

    def close(self) -> None:
        for queue in (self.prompts, self.tokenize, self.grammars, self.markdown):
            queue.close()
