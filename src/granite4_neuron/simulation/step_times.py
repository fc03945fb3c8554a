"""How long a step takes, as a simulation asks for it: by its rows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from granite4_neuron.runtime.interface import Row


class StepTimes(Protocol):
    """Seconds of a runtime's calls."""

    def step(self, rows: Sequence[Row]) -> float:
        """Return the seconds of a step of these rows, prompts or single tokens or both."""

    def decode(self, starts: Sequence[int], steps: int) -> list[float]:
        """Return the seconds of so many steps, one after another, of single tokens.

        Args:
            starts: the length of each sequence before the first of them.
        """

    def snapshot(self, tokens: int) -> float:
        """Return the seconds to keep the state of a sequence, with the keys and values of so many tokens."""

    def restore(self, tokens: int) -> float:
        """Return the seconds to bring back the state of a sequence of so many tokens."""

    def copy(self, tokens: int) -> float:
        """Return the seconds to copy a sequence of so many tokens to another slot."""


class Curve:
    """A piecewise linear function through points, which goes on at both ends as its last pieces do, but not below 0.

    Args:
        points: y by x; at least one. A single one makes a constant.
    """

    def __init__(self, points: Mapping[int, float]):
        self._x = sorted(points)
        self._y = [points[x] for x in self._x]

    def __call__(self, x: float) -> float:
        """Return the value at `x`."""
        first, value, slope, _ = self._piece(x)
        return max(0.0, value + slope * (x - first))

    def from_on(self, x: float, steps: int) -> list[float]:
        """Return the values at x, x + 1 and so on."""
        first, value, slope, end = self._piece(x)
        if x + steps - 1 > end:
            return [self(x + step) for step in range(steps)]
        value += slope * (x - first)
        return [max(0.0, value + slope * step) for step in range(steps)]

    def _piece(self, x: float) -> tuple[float, float, float, float]:
        """Return a piece: its first point, its slope, and where it ends."""
        if len(self._x) == 1:
            return self._x[0], self._y[0], 0.0, math.inf
        at = min(max(bisect.bisect_left(self._x, x), 1), len(self._x) - 1)
        x0, x1, y0, y1 = self._x[at - 1], self._x[at], self._y[at - 1], self._y[at]
        return x0, y0, (y1 - y0) / (x1 - x0), x1 if at < len(self._x) - 1 else math.inf


class CurvesByRows:
    """A curve for each of some numbers of rows, and lines between them."""

    def __init__(self, points: Mapping[int, Mapping[int, float]]):
        self._rows = sorted(points)
        self._curves = [Curve(points[rows]) for rows in self._rows]

    def __call__(self, rows: int, x: float) -> float:
        """Return the value for so many rows at `x`."""
        return max(0.0, sum(weight * curve(x) for weight, curve in self._weighted(rows)))

    def from_on(self, rows: int, x: float, steps: int) -> list[float]:
        """Return the values at x, x + 1 and so on."""
        (weight, curve), *others = self._weighted(rows)
        values = [weight * value for value in curve.from_on(x, steps)]
        for weight, curve in others:
            values = [sum + weight * value for sum, value in zip(values, curve.from_on(x, steps), strict=True)]
        return [max(0.0, value) for value in values] if others else values

    def _weighted(self, rows: int) -> list[tuple[float, Curve]]:
        if len(self._rows) == 1:
            return [(1.0, self._curves[0])]
        at = min(max(bisect.bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        low, high = self._rows[at - 1], self._rows[at]
        share = (rows - low) / (high - low)
        both = (1 - share, self._curves[at - 1]), (share, self._curves[at])
        return [(weight, curve) for weight, curve in both if weight]
