"""A command at a pseudo-terminal: bytes go in as if typed, and every byte that it writes is kept."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

COMMAND = (sys.executable, "-m", "granite4_neuron")
PATIENCE = 120  # in seconds, on a machine that is busy with other work
ROWS, COLUMNS = 40, 100
_WHERE_IS_THE_CURSOR, _THERE = b"\x1b[6n", b"\x1b[1;1R"

# Escape sequences that rich writes: colours, and for a progress bar a hidden cursor and a line written again.
_RICH = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def _begin() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests run under nohup


class PseudoTerminal:
    """Runs a program with a pseudo-terminal as its standard streams and its controlling terminal.

    Args:
        stdout: a file for standard output instead.
        cwd: the folder to run in.
    """

    def __init__(self, *command: object, stdout: Any = None, cwd: Any = None, **environment: str):
        self._own, theirs = pty.openpty()
        self.resize(ROWS, COLUMNS)
        self._written = bytearray()
        self._is_closed = False
        self.process = subprocess.Popen(
            [os.fsencode(each) if isinstance(each, (str, os.PathLike)) else str(each) for each in command],
            stdin=theirs,
            stdout=stdout or theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environment},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_begin,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._is_closed:
            if not select.select([self._own], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._own, 65536)
            except OSError:  # the other side is closed
                return
            if not data:
                return
            self._written += data
            for _ in range(data.count(_WHERE_IS_THE_CURSOR)):
                self.type(_THERE)

    @property
    def written(self) -> str:
        """Everything that the program has written, with the line ends that it wrote."""
        return bytes(self._written).decode("utf-8", "replace").replace("\r\n", "\n")

    def type(self, keys: bytes) -> None:
        while keys:
            keys = keys[os.write(self._own, keys[:512]) :]

    def resize(self, rows: int, columns: int) -> None:
        set_size(self._own, rows, columns)

    def wait_for(self, is_there: str | Callable[[str], object], after: int = 0, patience: float = PATIENCE) -> str:
        """Wait until the output from index `after` on contains a text or fulfils a condition; return that output."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            written, has_ended = self.written[after:], self.process.poll() is not None and not self._reader.is_alive()
            if is_there(written) if callable(is_there) else is_there in written:
                return written
            if has_ended:
                break
            time.sleep(0.02)
        raise AssertionError(f"not there: {is_there}\nstatus {self.process.poll()}\n{written[-4000:]!r}")

    def ended(self) -> int:
        """Wait for the end; return the exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def hang_up(self) -> None:
        """Close this side, as a terminal does when its window is closed."""
        if not self._is_closed:
            self._is_closed = True
            self._reader.join()
            os.close(self._own)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.hang_up()

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def set_size(descriptor: int, rows: int = ROWS, columns: int = COLUMNS) -> None:
    """Set a pseudo-terminal's size. The processes in its foreground get SIGWINCH."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def visible(text: str) -> str:
    """Return a text without control characters."""
    return _CONTROL.sub("", text)


def foreign_controls(written: str) -> list[str]:
    """Return the control characters that rich did not write, each with its surrounding text."""
    own = _RICH.sub("", written)
    return [own[max(0, found.start() - 40) : found.end() + 20] for found in _CONTROL.finditer(own)]
