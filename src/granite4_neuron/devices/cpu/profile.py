"""Measures where the time of the fused kernels goes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PartTimes(NamedTuple):
    """A part's time in seconds: wall time, and busy time summed over all threads."""

    seconds: float
    busy_seconds: float


def take_profile(on: bool) -> dict[str, PartTimes]:
    """Turn profiling of the fused kernels on or off; return the times since the last call, by part.

    There is one profile for all threads; it is meant for a program that calls kernels from one thread.
    """
    parts, *times = torch.ops.granite4_neuron.profile(on)
    return dict(zip(parts, map(PartTimes, *times), strict=True))
