"""What commands print, and how."""

from __future__ import annotations

import resource
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def print_table(table: Table) -> None:
    """Through print: rich would turn a closed pipe into an exit status of its own."""
    console = Console()
    with console.capture() as text:
        console.print(table)
    print(text.get(), end="")


def size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class PromptBar:
    """Shows how far prefill is, on standard error, when it takes more than one step."""

    def __init__(self) -> None:
        columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> PromptBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        if not self._progress.tasks and done < total:
            self._progress.add_task("", total=total)
            self._progress.start()
        if self._progress.tasks:
            self._progress.update(self._progress.tasks[0].id, completed=done)
        if done == total:
            self.__exit__()

    def __exit__(self, *exception: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
