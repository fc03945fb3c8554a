"""A thread for native code that cannot be interrupted, on untrusted input, which decides the cost of the work."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

# Explicit, because the default depends on `ulimit -s`.
STACK_BYTES = 2**23
_LOWEST_PRIORITY = 19
_MOST_GIVEN_UP = 16  # abandoned pieces of work that still run; more would occupy all processors
_SECONDS_AT_EXIT = 5
_STACK_LOCK = threading.Lock()
_GIVEN_UP: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of all `BudgetedThread`s

Work = tuple["Future[Any]", Callable[[], Any]]


class OverBudget(Exception):
    """The work takes more processor time than it may."""


class BudgetedThread:
    """Runs one piece of work at a time in a thread with a stack of 8 MiB. Several threads may share one.

    The thread starts with the first piece. A piece that was abandoned continues in its thread at the lowest priority
    until it or the process ends (see `leave`), and the next piece starts another thread. While many such pieces run,
    further work is refused.

    The work must let other threads run: while it holds the GIL, it cannot be abandoned.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up: list[threading.Thread] = []

    def run(self, work: Callable[[], Result], seconds: float) -> tuple[Result, float]:
        """Return the result of the work, and the processor time that it took, in seconds.

        Args:
            seconds: the most processor time; time in which the thread waits for a processor does not count.

        Raises:
            OverBudget: it takes more, or too much abandoned work still runs.
            BaseException: any exception of the work.
        """
        with self._lock:
            self._given_up = [thread for thread in self._given_up if thread.is_alive()]
            if len(self._given_up) >= _MOST_GIVEN_UP:
                raise OverBudget
            if self._thread is None or not self._thread.is_alive():  # after a fork the thread is not alive
                self._thread = self._start()
            thread = self._thread
            assert thread.ident is not None  # it has started
            clock = time.pthread_getcpuclockid(thread.ident)
            started = time.clock_gettime(clock)
            future: Future[Result] = Future()
            self._work.put((future, work))
            try:
                while not future.done():
                    left = seconds - (time.clock_gettime(clock) - started)
                    if left <= 0:
                        raise OverBudget
                    with suppress(NotYet):
                        future.exception(left)
                used = time.clock_gettime(clock) - started
            finally:
                if not future.done():  # over the budget, or interrupted by Ctrl-C
                    self._give_up(thread)
        return future.result(), used

    def _start(self) -> threading.Thread:
        self._work = queue.SimpleQueue()
        weakref.finalize(self, self._work.put, None).atexit = False
        # A daemon, so that the process does not wait for it at its end; but see `leave`.
        thread = threading.Thread(target=_work, args=(self._work,), name=self._name, daemon=True)
        with with_stack():
            thread.start()
        return thread

    def _give_up(self, thread: threading.Thread) -> None:
        assert thread.native_id is not None  # it has started
        os.setpriority(os.PRIO_PROCESS, thread.native_id, _LOWEST_PRIORITY)
        self._work.put(None)
        self._given_up.append(thread)
        _GIVEN_UP.add(thread)
        self._thread = None


def leave(status: int) -> None:
    """End the process with this status if abandoned work still runs. Where the interpreter is taken down, native code
    that returns to it crashes the process.
    """
    if not any(thread.is_alive() for thread in _GIVEN_UP):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it may be closed
            stream.flush()
    os._exit(status)


@atexit.register
def _leave_later() -> None:
    """Wait a while for abandoned work, and then `leave`. Nothing tells the status of `sys.exit` here."""
    end = time.monotonic() + _SECONDS_AT_EXIT
    has_failed = hasattr(sys, "last_type")  # an error ends the program
    try:
        for thread in list(_GIVEN_UP):
            thread.join(max(0.0, end - time.monotonic()))
    finally:  # after Ctrl-C too
        leave(int(has_failed))


def _work(pieces: queue.SimpleQueue[Work | None]) -> None:
    """Do one piece of work after another, until None comes."""
    while (piece := pieces.get()) is not None:
        future, work = piece
        try:
            future.set_result(work())
        except BaseException as error:  # it is passed to whoever waits for the result
            future.set_exception(error)
        del piece, future, work


@contextmanager
def with_stack() -> Iterator[None]:
    """Give the threads that start within the block a stack of `STACK_BYTES`."""
    with _STACK_LOCK:  # the size is the whole process's
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
