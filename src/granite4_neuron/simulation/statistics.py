"""Percentiles of very many numbers in little memory."""

from __future__ import annotations

import math

_PER_DOUBLING = 128  # bins: numbers of a bin differ by half a percent


class Histogram:
    """Counts positive numbers in bins of their logarithm; a bin's numbers count as their mean."""

    def __init__(self) -> None:
        self._bins: dict[int, list[float]] = {}  # how many, and their sum

    def add(self, value: float, count: int = 1) -> None:
        """Add a number so many times."""
        number = math.floor(math.log2(value) * _PER_DOUBLING) if value > 0 else -(2**31)
        of_bin = self._bins.get(number)
        if of_bin is None:
            self._bins[number] = [count, count * value]
        else:
            of_bin[0] += count
            of_bin[1] += count * value

    def merge(self, other: Histogram) -> None:
        """Add the numbers of another histogram."""
        for number, (count, total) in other._bins.items():
            mine = self._bins.setdefault(number, [0, 0.0])
            mine[0] += count
            mine[1] += total

    @property
    def count(self) -> int:
        """How many numbers there are."""
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
