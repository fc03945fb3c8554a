"""Output of commands. Importing this module does not import torch."""

from __future__ import annotations

import io
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from granite4_neuron.system.terminal import guard_streams, unguarded, without_controls

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_WIDER_THAN_TABLES = 10_000  # columns
_GAP = 2  # between columns without lines; one of them is the line's


class OutputError(Exception):
    """Standard output cannot be written to; `__cause__` is why."""


def write(text: str, end: str = "\n") -> None:
    """Print on standard output and flush it.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        OutputError: it is closed, or cannot be written.
    """
    _write(sys.stdout, text + end)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        raise OutputError("it is closed")
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror) from error


def print_table(table: Table) -> None:
    """Print a table as `write` does, because rich would turn a closed pipe into an exit status of its own.

    A terminal's table is `fitted` to the terminal; in a file or a pipe it is whole, as wide as its longest lines.
    """
    from rich.console import Console

    shown, text = Console(), io.StringIO()
    width = shown.width if shown.file.isatty() else _WIDER_THAN_TABLES
    console = Console(file=text, width=width, force_terminal=shown.is_terminal)
    table = fitted(table, console)
    console.print(_WithoutControls(table) if shown.is_terminal else table)
    _write(unguarded(sys.stdout), text.getvalue())


def fitted(table: Table, console: Console) -> Table:
    """Return a table as wide as a console at most, in which no number or word breaks.

    One that is too wide loses the lines between its columns, and folds between words: headers first, then the widest
    columns. Where that is not enough, each row becomes a block with a line for each column. Only a word that is longer
    than such a line breaks.
    """
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement

    wide = console.options.update(width=_WIDER_THAN_TABLES)
    ranges = [
        [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)] for column in table.columns
    ]
    most = [max(each.maximum for each in column) for column in ranges]
    with_folded_headers = [max([header.minimum, *(each.maximum for each in cells)]) for header, *cells in ranges]
    least = [max(each.minimum for each in column) for column in ranges]
    for column in table.columns:
        column.overflow = "fold"
    if Measurement.get(console, wide, table).maximum <= console.width:
        return table
    if (room := console.width - _GAP * (len(most) - 1)) >= sum(least):
        widths = _narrowed(_narrowed(most, with_folded_headers, room), least, room)
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
        table.box, table.show_edge, table.pad_edge, table.padding = SIMPLE_HEAD, False, False, (0, _GAP - 1, 0, 0)
        return table
    return table if len(table.columns) <= 2 else fitted(_blocks(table), console)


def _narrowed(widths: list[int], least: list[int], room: int) -> list[int]:
    """Return widths of columns that together take `room` or less, as far as `least` allows: the widest get narrower."""
    narrowed = list(widths)
    while sum(narrowed) > room and narrowed != least:
        widest = max(range(len(narrowed)), key=lambda each: (narrowed[each] > least[each], narrowed[each]))
        narrowed[widest] -= 1
    return narrowed


def _blocks(table: Table) -> Table:
    """Return a table of two columns that has a block for each row: the names of its cells beside them."""
    from rich.table import Table

    blocks = Table(show_header=False, box=table.box, title=table.title, caption=table.caption)
    for row, *cells in zip(table.rows, *(column.cells for column in table.columns), strict=True):
        for column, cell in zip(table.columns, cells, strict=True):
            if cell:
                blocks.add_row(column.header, cell, style=row.style)
        blocks.add_section()
    return blocks


class _WithoutControls:
    """A table without the control characters of its texts; rich's own stay."""

    def __init__(self, table: Table):
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._table, options):
            yield segment._replace(text=without_controls(segment.text))


def size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def peak_memory_bytes(of: int = resource.RUSAGE_SELF) -> int:
    """Return the peak memory of this process; with RUSAGE_CHILDREN, that of the largest child it has waited for."""
    status = Path("/proc/self/status")
    if of == resource.RUSAGE_SELF and status.is_file():
        # On Linux, ru_maxrss also counts the memory from before exec, which is the parent's.
        high = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if high is not None:
            return int(high[1]) * 1024
    peak = resource.getrusage(of).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class ProgressBar:
    """A progress bar on standard error, if that is a terminal, for work of more than one step.

    Call it with the amount done and the total, and perhaps with a few words to show; it disappears at the end. What is
    printed on standard error meanwhile appears above it.
    """

    def __init__(self, what: str, unit: str):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        amounts = (DownloadColumn(),) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
        console = Console(file=unguarded(sys.stderr))
        columns = (TextColumn(what), BarColumn(), *amounts, TimeRemainingColumn(), TextColumn("{task.description}"))
        self._progress = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __call__(self, done: int, total: int, words: str = "") -> None:
        if not self._progress.tasks and done < total:
            self._progress.add_task("", total=total)
            self._progress.start()
            guard_streams()  # rich obeys escape sequences itself in what is printed meanwhile
        if self._progress.tasks:
            self._progress.update(self._progress.tasks[0].id, completed=done, description=words)
        if done == total:
            self.__exit__()

    def __exit__(self, *exception: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
