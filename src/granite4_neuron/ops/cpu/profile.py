"""Where the time of the fused kernels goes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PartTimes(NamedTuple):
    """A part's time on the clock, and on all threads together that in which they had work; in seconds."""

    seconds: float
    busy_seconds: float


def take_profile(on: bool) -> dict[str, PartTimes]:
    """Take the time of the fused kernels from now on, or no longer; return that since the last call, by part.

    It is for all threads that call kernels together, and meant for one.
    """
    parts, *times = torch.ops.granite4_neuron.profile(on)
    return dict(zip(parts, map(PartTimes, *times), strict=True))
