"""Keeps control characters in a text from reaching a terminal.

A terminal obeys escape sequences in a text: they change the window's title or its clipboard, hide lines or overwrite
them. A model's text, the name of a file and the message of an exception may have such characters. `guard_streams` puts
a filter before each terminal that drops these characters one by one, so a sequence cannot pass in pieces either. Code
that draws on purpose, such as a progress bar, writes to `unguarded(stream)` and is responsible for its text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, overload

# Control characters of ASCII and ISO 6429 (C0, DEL, C1) except line feed and tab, and the characters that change the
# direction of text (Unicode's property Bidi_Control).
_CONTROL_CHARACTERS = dict.fromkeys(
    [*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)
_MOVES_OF_TQDM = re.compile("\r|\x1b\\[A")  # to the start of the line, and to the line above


def without_controls(text: str) -> str:
    """Return a text without the characters that a terminal would obey; line feeds and tabs stay."""
    return text.translate(_CONTROL_CHARACTERS)


def guard_streams() -> None:
    """From now on, filter standard output and standard error by `without_controls` if they are a terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty() and not isinstance(stream, _Guarded):
            setattr(sys, name, _Guarded(stream, without_controls))


@overload
def unguarded(stream: TextIO) -> TextIO: ...


@overload
def unguarded(stream: None) -> None: ...


def unguarded(stream: TextIO | None) -> TextIO | None:
    """Return the unfiltered stream."""
    return stream.stream if isinstance(stream, _Guarded) else stream


@contextmanager
def bars_of_tqdm() -> Iterator[None]:
    """Within the block, let standard error also show the control characters of a library's tqdm progress bars."""
    guarded = sys.stderr
    if isinstance(guarded, _Guarded):
        sys.stderr = _Guarded(guarded.stream, _without_other_controls)
    try:
        yield
    finally:
        sys.stderr = guarded


def _without_other_controls(text: str) -> str:
    shown, start = "", 0
    for move in _MOVES_OF_TQDM.finditer(text):
        shown += without_controls(text[start : move.start()]) + move[0]
        start = move.end()
    return shown + without_controls(text[start:])


class _Guarded:
    """A terminal's stream; only written text is changed."""

    def __init__(self, stream: TextIO, shown: Callable[[str], str]):
        self.stream = stream
        self._shown = shown

    def write(self, text: str) -> int:
        self.stream.write(self._shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
