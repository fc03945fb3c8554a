"""Errors of a benchmark, or of a part of it, that cannot run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

from granite4_neuron.commands.cli import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from granite4_neuron.errors import UserError

Main = Callable[[Sequence[str] | None], int]


class Failed(Exception):
    """An engine cannot do a part of a benchmark; the message says why."""


def reports_errors(main: Main) -> Main:
    """Make `main` report bad input in one sentence on standard error and end silently on Ctrl-C."""

    @functools.wraps(main)
    def reporting(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return reporting
