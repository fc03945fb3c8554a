"""Which cases of a test with several parameters are run, and when."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Leave a few cases of each test, which together have each value of each parameter, as they are; of a test marked
    `slow_cases`, leave one. Mark `slow` those that together have each pair of values (each value, if the test takes
    long), and the rest `exhaustive`.
    """
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("exhaustive") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        plain = [case for case in cases if case.get_closest_marker("slow") is None]
        takes_long = not plain or plain[0].get_closest_marker("slow_cases") is not None
        first = plain[:1] if takes_long else _covering(plain, 1)
        slow = _covering([case for case in cases if case not in first], 1 if takes_long else 2, first)
        for case in cases:
            if case not in first:
                case.add_marker("slow" if case in slow else "exhaustive")


def _covering(cases: Iterable[pytest.Item], size: int, covered: Sequence[pytest.Item] = ()) -> list[pytest.Item]:
    """Return the cases that are needed to have all combinations of `size` values, besides those that are covered. Of
    cases that add as many, the one whose values have been used least comes first.
    """
    rest = {case: _combinations(case, size) for case in cases}
    used = Counter(value for case in covered for value in _combinations(case, 1))
    seen = set().union(*(_combinations(case, size) for case in covered))
    needed: list[pytest.Item] = []
    while rest := {case: new for case, combinations in rest.items() if (new := combinations - seen)}:
        most = max(map(len, rest.values()))
        best = min(
            (case for case, new in rest.items() if len(new) == most),
            key=lambda case: sum(used[value] for value in _combinations(case, 1)),
        )
        needed.append(best)
        seen |= rest.pop(best)
        used.update(_combinations(best, 1))
    return needed


def _combinations(case: pytest.Item, size: int) -> set[tuple[tuple[int, str], ...]]:
    """Return all combinations of the ids of so many parameters' values; of all parameters, if there are fewer."""
    values = list(enumerate(case.callspec._idlist))
    return set(itertools.combinations(values, min(size, len(values))))
