"""Which cases of a test with several parameters run by default."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of each test `slow`, except a few which together have each value of each parameter."""
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        seen: set[tuple[int, str]] = set()
        rest = cases
        # First the cases all of whose values are new, then those with fewer new ones.
        for least in range(len(_values(cases[0])), 0, -1):
            others = []
            for case in rest:
                if len(_values(case) - seen) >= least:
                    seen |= _values(case)
                else:
                    others.append(case)
            rest = others
        for case in rest:
            case.add_marker(pytest.mark.slow)


def _values(case: pytest.Item) -> set[tuple[int, str]]:
    """Return the id of each parameter's value, with the parameter's number."""
    return set(enumerate(case.callspec._idlist))
