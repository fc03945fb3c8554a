"""The current distance between the machine's processors, measured by two threads.

A virtual machine's processors may move closer together or further apart within seconds. That changes how long threads
wait for each other and how fast memory is read, and so the results of a benchmark.
"""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from granite4_neuron import UserError

_SOURCE = Path(__file__).with_suffix(".cpp")
_SECONDS = 0.01


def load_round_trip() -> Callable[[], float | None]:
    """Return a function that measures for 0.01 s how many seconds a word in memory takes from one thread to another and
    back. It returns None if two threads cannot run at the same time.

    Raises:
        UserError: there is no C++ compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "round_trip.so"
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = [*compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", str(_SOURCE), "-o", str(library)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f"the round trip between threads needs a C++ compiler ({error}).") from None
        function = ctypes.CDLL(str(library)).round_trip
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]

    def measure() -> float | None:
        seconds = function(_SECONDS)
        return seconds if math.isfinite(seconds) else None

    return measure
