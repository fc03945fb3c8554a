"""Other processes that compete for the processor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BUSY = """
print(flush=True)
while True:
    pass
"""


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep this many processes computing without pause within the block."""
    processes = []
    try:
        for _ in range(number):
            processes.append(subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE))
            processes[-1].stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
