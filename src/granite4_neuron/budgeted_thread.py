"""A thread for work in native code whose cost a stranger decides, and that nothing can interrupt."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from typing import TypeVar

Result = TypeVar("Result")

# Explicit, because the default depends on `ulimit -s`.
STACK_BYTES = 2**23
_LOWEST_PRIORITY = 19


class OverBudget(Exception):
    """The work takes more of the processor's time than it may."""


class BudgetedThread:
    """Runs one piece of work at a time in a thread with a stack of 8 MiB. Several threads may share one.

    The thread starts with the first piece, and another one after a piece that was given up: that piece goes on at the
    lowest priority until it ends by itself.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Result], seconds: float) -> tuple[Result, float]:
        """Return the result of the work, and how much of the processor's time it took, in seconds.

        Args:
            seconds: of the processor's time at most; the time in which the thread waits for a processor is free.

        Raises:
            OverBudget: it takes more.
            BaseException: what the work raises.
        """
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # it is not alive in a forked process
                self._start()
            clock = time.pthread_getcpuclockid(self._thread.ident)
            started = time.clock_gettime(clock)
            future = self._executor.submit(work)
            try:
                while not future.done():
                    left = seconds - (time.clock_gettime(clock) - started)
                    if left <= 0:
                        raise OverBudget
                    with suppress(NotYet):
                        future.exception(left)
                used = time.clock_gettime(clock) - started
            finally:
                if not future.done():  # too much, or Ctrl-C
                    self._give_up()
        return future.result(), used

    def _start(self) -> None:
        self._executor = ThreadPoolExecutor(1, self._name)
        with with_stack():
            self._thread = self._executor.submit(threading.current_thread).result()

    def _give_up(self) -> None:
        os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _LOWEST_PRIORITY)
        self._executor.shutdown(wait=False)
        self._thread = None


@contextmanager
def with_stack() -> Iterator[None]:
    """Give the threads that start within the block a stack of `STACK_BYTES`."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
