"""Measures where the time of the fused kernels goes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PartTimes(NamedTuple):
    """A part's time in seconds: on the clock, and busy time added up over all threads."""

    seconds: float
    busy_seconds: float


def take_profile(on: bool) -> dict[str, PartTimes]:
    """Turn profiling of the fused kernels on or off; return the times since the last call, by part.

    It is for all threads that call kernels together, and meant for one.
    """
    parts, *times = torch.ops.granite4_neuron.profile(on)
    return dict(zip(parts, map(PartTimes, *times), strict=True))
