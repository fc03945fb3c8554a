"""Matches modules with the patterns of an adapter's config in a separate process, with limits on its time and memory.

The patterns are regular expressions from a download, and a single one can take years.

This module imports little, and no torch, so its process starts in a tenth of a second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from granite4_neuron.system.sandbox.limited_process import LimitedProcess, ProcessEnded

_SECONDS = 3
_MEMORY_BYTES = 2**30


class PatternsFailed(Exception):
    """The patterns cannot be matched; the message says why."""


def first_matches(patterns: Sequence[str], modules: Sequence[str]) -> list[str | None]:
    """Return the first pattern that matches each module, as in PEFT's `get_pattern_key`: its whole name, or the end of
    its name from a dot on. None for a module that no pattern matches.

    Raises:
        PatternsFailed: one is not a regular expression, or they take more than 3 seconds or 1 GiB.
    """
    if not patterns:
        return [None] * len(modules)
    with closing(LimitedProcess("adapter_patterns", _SECONDS, _MEMORY_BYTES)) as process:
        try:
            answer = process.ask({"patterns": list(patterns), "modules": list(modules)})
        except ProcessEnded as error:
            raise PatternsFailed(str(error)) from None
    if "error" in answer:
        raise PatternsFailed(answer["error"])
    return answer["matches"]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer `first_matches`, in its process."""
    compiled = []
    for pattern in question["patterns"]:
        try:
            compiled.append((pattern, re.compile(rf"(.*\.)?({pattern})$")))
        except (re.error, RecursionError, OverflowError) as error:
            return {"error": f"{pattern!r} is not a regular expression: {error}"}
    return {
        "matches": [
            next((pattern for pattern, expression in compiled if expression.match(module)), None)
            for module in question["modules"]
        ]
    }
