"""The running launch, to which the emulator's instructions and tensors report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nki.emulation import Launch

_launches: list[Launch] = []


@contextmanager
def launching(launch: Launch) -> Iterator[None]:
    """Make `launch` the one whose kernel is running. Afterwards it is the last one."""
    _launches[:] = [launch]
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        yield


def last_launch() -> Launch:
    """Return the running launch, or the last one."""
    return _launches[0]
