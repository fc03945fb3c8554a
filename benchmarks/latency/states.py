"""Two implementations compared within one state of the machine; see `benchmarks.latency.round_trip`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.latency.measurement import Result, Sample

_APART = 2.0  # round trips of one state differ by less than this factor


@dataclass(frozen=True)
class Comparison:
    """The ratios of medians in one state.

    prefill, decode: the speed of the first relative to the second; decode is 0 without steps.
    """

    round_trip_ns: float
    runs: tuple[int, int]
    prefill: float
    decode: float


def compare_in_states(ours: Result, theirs: Result) -> list[Comparison]:
    """Compare in each state that has samples of both. A run in which the state changed counts in none."""
    both = (ours.samples, theirs.samples)
    limit = _boundary([trip for samples in both for sample in samples for trip in sample.round_trips_ns if trip])
    comparisons = []
    for is_far in (False, True) if limit else ():
        first, second = ([s for s in samples if _is_far(s, limit) is is_far] for samples in both)
        if first and second:
            comparisons.append(_compare(first, second))
    return comparisons


def _compare(ours: list[Sample], theirs: list[Sample]) -> Comparison:
    def ratio(name: str) -> float:
        one, other = (statistics.median(getattr(sample, name) for sample in samples) for samples in (ours, theirs))
        return other / one if one else 0.0

    trips = itertools.chain.from_iterable(sample.round_trips_ns for sample in (*ours, *theirs))
    return Comparison(statistics.median(trips), (len(ours), len(theirs)), ratio("first_token_ms"), ratio("token_ms"))


def _is_far(sample: Sample, limit: float) -> bool | None:
    """Return whether both round trips are long, or None if only one is or one is unknown."""
    if None in sample.round_trips_ns:
        return None
    before, after = (trip >= limit for trip in sample.round_trips_ns)
    return before if before == after else None


def _boundary(round_trips: Sequence[float]) -> float:
    """Return a boundary between the round trips of two states.

    It is below all of them if there is only one state, and 0 if there are none.
    """
    if not round_trips:
        return 0.0
    least, most = min(round_trips), max(round_trips)
    return least if most < _APART * least else math.sqrt(least * most)
