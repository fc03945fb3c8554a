"""Threads whose stack has a size that does not depend on `ulimit -s`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")

STACK_BYTES = 2**23
_LOCK = threading.Lock()


@contextmanager
def with_stack() -> Iterator[None]:
    """Give the threads that start within the block a stack of `STACK_BYTES`."""
    with _LOCK:  # the size is the whole process's
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def in_large_stack(work: Callable[[], Result]) -> Result:
    """Return the result of work in a thread with a stack of `STACK_BYTES`."""
    with ThreadPoolExecutor(1) as threads:
        with with_stack():
            future = threads.submit(work)
        return future.result()
