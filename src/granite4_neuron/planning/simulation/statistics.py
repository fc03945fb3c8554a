"""Percentiles of many numbers in little memory."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

_PER_DOUBLING = 128  # bins per factor of 2, so that numbers in a bin differ by half a percent
_ZERO = -(2**31)  # the bin of 0
_MOST_NEW = 4096  # numbers without a bin yet: numpy finds the bins of many at a time


def _no_numbers() -> array[float]:
    return array("d")


class Histogram:
    """Counts numbers of at least 0 in bins of their logarithm; a bin's numbers count as their mean."""

    def __init__(self) -> None:
        self._bins: dict[int, list[float]] = {}  # for each bin the count and the sum of its numbers
        self._new: dict[int, array[float]] = defaultdict(_no_numbers)  # by how often each of them counts

    def add(self, value: float, count: int = 1) -> None:
        """Add a number `count` times."""
        self.add_all((value,), count)

    def add_all(self, values: Iterable[float], count: int) -> None:
        """Add each of these numbers `count` times."""
        new = self._new[count]
        new.extend(values)
        if len(new) > _MOST_NEW:
            self._sort(count)

    def merge(self, other: Histogram) -> None:
        """Add the numbers of another histogram."""
        for number, (count, total) in other._sorted().items():
            self._add(number, count, total)

    @property
    def count(self) -> int:
        """The number of numbers."""
        return int(sum(count for count, _ in self._sorted().values()))

    def percentile(self, percent: float) -> float:
        """Return the percentile by nearest rank; NaN if there are no numbers."""
        rank: float = math.ceil(percent / 100 * self.count)
        for _, (count, total) in sorted(self._sorted().items()):
            rank -= count
            if rank <= 0:
                return total / count
        return math.nan

    def _sorted(self) -> dict[int, list[float]]:
        """Return the bins with all numbers."""
        for count in list(self._new):
            self._sort(count)
        return self._bins

    def _sort(self, count: int) -> None:
        """Move the new numbers that count this often to their bins."""
        values = np.frombuffer(self._new.pop(count))
        with np.errstate(divide="ignore"):
            bins = np.maximum(np.floor(np.log2(values) * _PER_DOUBLING), _ZERO).astype(np.int64)
        numbers, places = np.unique(bins, return_inverse=True)
        counts, totals = np.bincount(places), np.bincount(places, values)
        for number, occurrences, total in zip(numbers.tolist(), counts.tolist(), totals.tolist(), strict=True):
            self._add(number, count * occurrences, count * total)

    def _add(self, number: int, count: float, total: float) -> None:
        of_bin = self._bins.setdefault(number, [0, 0.0])
        of_bin[0] += count
        of_bin[1] += total
