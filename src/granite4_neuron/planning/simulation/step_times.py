"""The times of steps by their rows, for a simulation."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

from granite4_neuron.runtime.interface import Row


class StepTimes(Protocol):
    """Seconds of a runtime's calls."""

    def step(self, rows: Sequence[Row]) -> float:
        """Return the seconds of a step of these rows: prompts, single tokens or both."""

    def decode(self, starts: Sequence[int], steps: int) -> list[float]:
        """Return the seconds of each of `steps` consecutive steps of single tokens.

        Args:
            starts: the length of each sequence before the first step.
        """

    def snapshot(self, tokens: int) -> float:
        """Return the seconds to take a snapshot of a sequence with the keys and values of this many tokens."""

    def restore(self, tokens: int) -> float:
        """Return the seconds to restore a sequence of this many tokens."""

    def copy(self, tokens: int) -> float:
        """Return the seconds to copy a sequence of this many tokens to another slot."""


class Curve:
    """A piecewise linear function through points. It extrapolates linearly at both ends, but not below 0.

    Args:
        points: y by x; at least one. A single point gives a constant.
    """

    def __init__(self, points: Mapping[int, float]):
        self.ends = sorted(points)
        pairs = list(itertools.pairwise(self.ends))
        slopes = [(points[after] - points[before]) / (after - before) for before, after in pairs] or [0.0]
        self._pieces = [(x, points[x], slope) for x, slope in zip(self.ends, slopes, strict=False)]
        self._inner = self.ends[1:-1]  # boundaries between pieces

    def __call__(self, x: float) -> float:
        """Return the value at `x`."""
        first, value, slope = self._pieces[bisect.bisect_left(self._inner, x)]
        return max(0.0, value + slope * (x - first))

    def from_on(self, x: float, steps: int) -> list[float]:
        """Return `steps` values, at x, x + 1 and so on."""
        at = bisect.bisect_left(self._inner, x)
        if at < len(self._inner) and x + steps - 1 > self._inner[at]:
            return [self(x + step) for step in range(steps)]
        first, value, slope = self._pieces[at]
        value += slope * (x - first)
        values = [value + slope * step for step in range(steps)]
        return values if values[0] >= 0 and values[-1] >= 0 else [max(0.0, value) for value in values]


class CurvesByRows:
    """Curves for some numbers of rows, with interpolation and extrapolation for others."""

    def __init__(self, points: Mapping[int, Mapping[int, float]]):
        self._rows = sorted(points)
        self._curves = {rows: Curve(points[rows]) for rows in self._rows}

    def __getitem__(self, rows: int) -> Curve:
        """Return the curve for this many rows."""
        if rows not in self._curves:
            self._curves[rows] = self._between(rows)
        return self._curves[rows]

    def _between(self, rows: int) -> Curve:
        if len(self._rows) == 1:
            return self._curves[self._rows[0]]
        at = min(max(bisect.bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        low, high = self._rows[at - 1 : at + 1]
        share = (rows - low) / (high - low)
        below, above = self._curves[low], self._curves[high]
        ends = {*below.ends, *above.ends}
        return Curve({x: (1 - share) * below(x) + share * above(x) for x in ends})
