"""Signals to this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS_TO_END = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def handling(numbers: Collection[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block these signals call a handler, but for SIGHUP where it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in numbers if not (is_ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
