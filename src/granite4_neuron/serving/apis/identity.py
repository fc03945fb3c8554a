"""The ids and times of answers: random and current ones, or within `deterministic_ids` the same each time."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_NUMBERS: ContextVar[random.Random | None] = ContextVar("_NUMBERS", default=None)


def new_id() -> str:
    """Return 32 hexadecimal digits."""
    numbers = _NUMBERS.get()
    return uuid.uuid4().hex if numbers is None else f"{numbers.getrandbits(128):032x}"


def now() -> int:
    """Return the time in seconds since 1970; within `deterministic_ids` 0."""
    return 0 if _NUMBERS.get() is not None else int(time.time())


@contextmanager
def deterministic_ids(seed: str) -> Iterator[None]:
    """Have ids within the block depend on the seed and their number only, so that an answer that is made again has the
    same bytes.
    """
    token = _NUMBERS.set(random.Random(seed))
    try:
        yield
    finally:
        _NUMBERS.reset(token)
