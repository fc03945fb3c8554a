"""The output of a batch: a file of JSON lines that is only appended to, and that may end anywhere."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from granite4_neuron.errors import UserError
from granite4_neuron.serving.batch.forms import is_result

_SECONDS = 1.0  # between two times that what was written is forced to the disk


class Results:
    """Appends results to a file, which keeps those of an earlier run. A line that an earlier run left incomplete is cut
    off. A file without results is removed at the end.

    path: of the file.
    number: of results in it.
    last: of them, as an object; None if there is none.

    Raises:
        UserError: the file is another program's, or another process is writing it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            self.number, end, self.last = self._found()
            os.ftruncate(self._file, end)
            os.lseek(self._file, end, os.SEEK_SET)
            _sync_folder(path)
        except BaseException:
            os.close(self._file)
            raise
        self._synced = time.monotonic()

    def append(self, line: bytes) -> None:
        """Write one result, with the end of its line."""
        written = 0
        while written < len(line):
            written += os.write(self._file, line[written:])
        self.number += 1
        if time.monotonic() - self._synced > _SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            os.fsync(self._file)
            if not self.number:  # nothing has been done
                os.unlink(self.path)
        finally:
            os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {self.path}.") from None

    def _found(self) -> tuple[int, int, dict[str, Any] | None]:
        """Return the number of whole results, their length in bytes, and the last one.

        A process that is killed leaves a part of a line at the end. A machine that loses power may leave zeros too,
        behind what was forced to the disk.

        Raises:
            UserError: the file begins with something else than a result.
        """
        number = end = 0
        first = last = b""
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n") or b"\0" in line:
                    first = first or line
                    break
                first, last = first or line, line
                number, end = number + 1, end + len(line)
        if first and not _may_be_result(first, is_whole=number > 0):
            raise UserError(f"{self.path} is there already and has something else than results of a batch.")
        value = _object(last)
        if number and value is None:
            raise UserError(f"{self.path} ends with a line that is not a result of a batch.")
        return number, end, value


def _may_be_result(line: bytes, is_whole: bool) -> bool:
    value = _object(line)
    return is_result(value) if value is not None else not is_whole and line[:1] in (b"{", b"\0")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = from_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _sync_folder(path: Path) -> None:
    """Force the file's name to the disk."""
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
