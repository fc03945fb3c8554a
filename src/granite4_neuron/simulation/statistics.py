"""Percentiles of many numbers in little memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

_PER_DOUBLING = 128  # bins per factor of 2, so that numbers in a bin differ by half a percent
_ZERO = -(2**31)  # the bin of 0


class Histogram:
    """Counts positive numbers in bins of their logarithm; a bin's numbers count as their mean."""

    def __init__(self) -> None:
        self._bins: dict[int, list[float]] = {}  # for each bin the count and the sum of its numbers

    def add(self, value: float, count: int = 1) -> None:
        """Add a number `count` times."""
        self._add(_bin_of(value), count, count * value)

    def add_all(self, values: Sequence[float], count: int) -> None:
        """Add each of these numbers, of which there is at least one, `count` times."""
        number = _bin_of(min(values))
        if number == _bin_of(max(values)):
            self._add(number, count * len(values), count * sum(values))
        else:
            for value in values:
                self.add(value, count)

    def merge(self, other: Histogram) -> None:
        """Add the numbers of another histogram."""
        for number, (count, total) in other._bins.items():
            self._add(number, count, total)

    @property
    def count(self) -> int:
        """The number of numbers."""
        return int(sum(count for count, _ in self._bins.values()))

    def percentile(self, percent: float) -> float:
        """Return the percentile by nearest rank; NaN if there are no numbers."""
        rank: float = math.ceil(percent / 100 * self.count)
        for number in sorted(self._bins):
            count, total = self._bins[number]
            rank -= count
            if rank <= 0:
                return total / count
        return math.nan

    def _add(self, number: int, count: float, total: float) -> None:
        of_bin = self._bins.get(number)
        if of_bin is None:
            of_bin = self._bins[number] = [0, 0.0]
        of_bin[0] += count
        of_bin[1] += total


def _bin_of(value: float) -> int:
    return math.floor(math.log2(value) * _PER_DOUBLING) if value > 0 else _ZERO
