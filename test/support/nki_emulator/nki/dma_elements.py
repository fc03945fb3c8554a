"""The elements of a DMA: pieces that are contiguous in both memories, which is what a DMA engine moves at a time."""

from __future__ import annotations

from collections import Counter
from math import lcm

import numpy as np


def dma_elements(dst: np.ndarray, src: np.ndarray, is_dst_on_chip: bool, is_src_on_chip: bool) -> Counter[int]:
    """Count the elements of a copy by their bytes, which are those of the wider dtype where the copy casts.

    Both arrays have the same number of entries, in the same order. On chip the first dimension is the partition, and no
    element spans two partitions.
    """
    runs = contiguous_entries(dst, is_dst_on_chip), contiguous_entries(src, is_src_on_chip)
    period = lcm(*runs)
    starts = sorted({start for run in runs for start in range(0, period, run)})
    itemsize, periods = max(dst.itemsize, src.itemsize), dst.size // period
    elements: Counter[int] = Counter()
    for start, end in zip(starts, [*starts[1:], period], strict=True):
        elements[(end - start) * itemsize] += periods
    return elements


def contiguous_entries(array: np.ndarray, is_on_chip: bool) -> int:
    """Return the length of the runs of entries that are contiguous in memory. Each run begins at a multiple of it."""
    dimensions = list(zip(array.strides, array.shape, strict=True))[1 if is_on_chip else 0 :]
    run = 1
    for stride, size in reversed(dimensions):
        if size > 1 and stride != run * array.itemsize:
            break
        run *= size
    return run
