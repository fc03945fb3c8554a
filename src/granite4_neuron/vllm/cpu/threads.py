"""Places the kernels' threads in a process whose threads vLLM binds to processors. Nothing here imports vLLM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from granite4_neuron.devices.cpu import operators as cpu

# Variables with processor numbers that vLLM sets for a worker, to bind OpenMP's threads.
_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def bound_processors(environment: Mapping[str, str]) -> set[int]:
    """Return the processors that OpenMP's threads are bound to; empty if they are not bound."""
    return {int(number) for name in _BINDINGS for number in re.findall(r"\d+", environment.get(name, ""))}


def spread_threads() -> None:
    """Start the kernels' threads on the processors that the main thread does not use.

    OpenMP binds the main thread to the first processor. Threads that it starts inherit this, so all of them would share
    one processor.
    """
    if not hasattr(os, "sched_getaffinity"):
        return
    own = os.sched_getaffinity(0)
    others = bound_processors(os.environ) - own
    if not others:
        return
    os.sched_setaffinity(0, others)
    try:
        cpu.pack(torch.zeros(64 * torch.get_num_threads(), 64), torch.float32)  # a loop with tasks for all threads
    finally:
        os.sched_setaffinity(0, own)
