"""Where the kernels' threads run in a process whose threads vLLM binds to processors. Nothing here imports vLLM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from granite4_neuron.ops import cpu

# By which vLLM binds OpenMP's threads when it starts a worker, each with numbers of processors.
_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def bound_processors(environment: Mapping[str, str]) -> set[int]:
    """Those that OpenMP's threads are bound to; none where they are not bound."""
    return {int(number) for name in _BINDINGS for number in re.findall(r"\d+", environment.get(name, ""))}


def spread_threads() -> None:
    """Start the kernels' threads beside the main thread.

    OpenMP binds the main thread to the first processor, and a thread that it starts inherits that: all of them would
    share one. They get the others.
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
