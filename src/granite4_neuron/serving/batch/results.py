"""The output of a batch: a file of JSON lines that is only appended to, and that may end anywhere.

Beside it is a record of what was written. A run that goes on compares every result and every answered line with it.
So it never overwrites what another program wrote or changed, and leaves out no line.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import reprlib
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from granite4_neuron.errors import UserError
from granite4_neuron.serving.batch.batch import Result
from granite4_neuron.serving.batch.lines import Lines
from granite4_neuron.system.regular_files import check_regular

_SECONDS = 1.0  # between two times that results are written
_FORMAT = {"format": "granite4-neuron batch", "version": 1}
_BEGINNING = json.dumps(_FORMAT).encode()[:-1]
_MOST_BYTES = 2**20  # of the record's first line
_ENTRY = re.compile(rb"([0-9a-f]{16}) ([0-9a-f]{16}) ([1-9][0-9]{0,15})\n")


class _Entry(NamedTuple):
    """A line of the record: digests of an answered line and of its result, and the result's length in bytes."""

    source: str
    result: str
    length: int

    def line(self) -> bytes:
        return f"{self.source} {self.result} {self.length}\n".encode()


class Results:
    """Appends results to a file, which keeps those of an earlier run. What a killed run was writing is cut off. A file
    without results is removed at the end.

    The record, OUTPUT.record, has the options in its first line, and then a line for each result. It is on the disk
    before the results are written, so they are never ahead of it, also if the machine loses power.

    path: of the file.
    number: of results in it.
    start: the place of the first line without a result.

    Args:
        lines: the input.
        options: what results depend on besides it, by the names of the command line.

    Raises:
        UserError: a file is not regular, or another program's, or another process is writing it; or the results are not
            those of these lines and options. The files are as before.
    """

    def __init__(self, path: Path, lines: Lines, options: Mapping[str, Any]):
        self.path, self._record_path = path, path.parent / f"{path.name}.record"
        self._options = json.loads(json.dumps(options, default=str))
        self._waiting: list[Result] = []
        self._written_at = 0.0
        with ExitStack() as on_failure:
            self._file = _open(path, on_failure)
            self._lock()
            self._record = _open(self._record_path, on_failure)
            with open(self._record_path, "rb") as record, open(path, "rb") as results:
                begin = self._check_header(record, has_results=bool(os.fstat(self._file).st_size))
                self.number, record_end, end = self._compare_results(record, results)
                record.seek(begin)
                self.start = self._compare_lines(record, lines)
            # The output first, so that it is never ahead of the record.
            with _naming(path):
                os.ftruncate(self._file, end)
                os.lseek(self._file, end, os.SEEK_SET)
                os.fsync(self._file)
                _sync_folder(path)
            with _naming(self._record_path):
                os.ftruncate(self._record, record_end if self.number else 0)
                os.lseek(self._record, 0, os.SEEK_END)
                if not self.number:
                    _write(self._record, json.dumps({**_FORMAT, "options": self._options}).encode() + b"\n")
            on_failure.pop_all()

    def append(self, result: Result) -> None:
        """Write a result, at the latest with one that follows a second later, or at the end."""
        self._waiting.append(result)
        self.number += 1
        if time.monotonic() - self._written_at > _SECONDS:
            self._write_waiting()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None or not issubclass(kind, OSError):  # the disk may be full
                self._write_waiting()
            if not self.number:  # nothing has been done
                os.unlink(self.path)
                os.unlink(self._record_path)
        finally:
            os.close(self._file)
            os.close(self._record)

    def _write_waiting(self) -> None:
        entries = (_Entry(each.source, _digest(each.line), len(each.line)) for each in self._waiting)
        with _naming(self._record_path):
            _write(self._record, b"".join(entry.line() for entry in entries))
            os.fsync(self._record)
        with _naming(self.path):
            _write(self._file, b"".join(each.line for each in self._waiting))
            os.fsync(self._file)
        self._waiting, self._written_at = [], time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {self.path}.") from None

    def _check_header(self, record: BinaryIO, has_results: bool) -> int:
        """Check the record's first line; return the place behind it.

        Raises:
            UserError: it is not a record's, or has other options, and there are results.
        """
        header = record.readline(_MOST_BYTES)
        if not (header.startswith(_BEGINNING) or _BEGINNING.startswith(header)):
            raise UserError(f"{self._record_path} is there already and is not the record of a batch.")
        if has_results:
            if not header.endswith(b"\n"):
                raise UserError(
                    f"{self.path} is there already, and there is no {self._record_path.name} that says that batch "
                    "wrote it; give another output."
                )
            self._check_options(_options_in(header, self._record_path))
        return record.tell()

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name in sorted(options.keys() & self._options.keys()):
            before, now = options[name], self._options[name]
            if before != now:
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{self.path} was written with {option} {reprlib.repr(before)}, which is {reprlib.repr(now)} now; "
                    "start the command as before, or give another output."
                )

    def _compare_results(self, record: BinaryIO, results: BinaryIO) -> tuple[int, int, int]:
        """Return how many results there are, and where they end in the record and in the output.

        A process that is killed leaves a part of a result at the end. A machine that loses power may leave zeros in
        what it was writing.

        Raises:
            UserError: something else is in the output, or the record is damaged.
        """
        number, record_end, end = 0, record.tell(), 0
        for entry in _entries(record, self._record_path):
            content = results.read(entry.length)
            if len(content) < entry.length or _digest(content) != entry.result:
                is_torn = len(content) < entry.length and b"\n" not in content
                is_ours = content.strip(b"\0")[:1] in (b"", b"{")
                if not (is_ours and (is_torn or b"\0" in content)):
                    raise UserError(
                        f"result {number + 1:,} of {self.path} is not the one that was written; give another output."
                    )
                return number, record_end, end
            number, record_end, end = number + 1, record_end + len(entry.line()), end + entry.length
        if results.read(1):
            raise UserError(f"{self.path} has more than the {number:,} results that were written; give another output.")
        return number, record_end, end

    def _compare_lines(self, record: BinaryIO, lines: Lines) -> int:
        """Return the place of the first line without a result.

        Raises:
            UserError: a line is not the one that was answered.
        """
        number, entries = 0, _entries(record, self._record_path)
        for line in lines.read(0):
            if number == self.number:
                return line.place
            if line.digest() != next(entries).source:
                raise UserError(
                    f"line {number + 1:,} of {lines.path} is not the one whose result {self.path} has; give the input "
                    "that it belongs to, or another output."
                )
            number += 1
        if number < self.number:
            raise UserError(f"{lines.path} has {number:,} lines, and there are results of {self.number:,} already.")
        return lines.size


def _options_in(header: bytes, path: Path) -> Mapping[str, Any]:
    try:
        options = json.loads(header)["options"]
    except (ValueError, KeyError):
        options = None
    if not isinstance(options, dict):
        raise UserError(f"{path} is damaged; give another output.")
    return options


def _entries(record: BinaryIO, path: Path) -> Iterator[_Entry]:
    """Yield the rest of a record's lines. One that is not complete, or that a loss of power left as zeros, is the end.

    Raises:
        UserError: a line is damaged.
    """
    while (line := record.readline(_MOST_BYTES)).endswith(b"\n") and b"\0" not in line:
        if (match := _ENTRY.fullmatch(line)) is None:
            raise UserError(f"{path} is damaged; give another output.")
        yield _Entry(match[1].decode(), match[2].decode(), int(match[3]))


def _digest(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def _open(path: Path, on_failure: ExitStack) -> int:
    """Open a file, which may be new, for reading and writing; on a failure it is closed, and removed if it was new.

    Raises:
        UserError: it is not a regular file.
    """
    try:
        check_regular(path)
    except FileNotFoundError:
        on_failure.callback(path.unlink, missing_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    on_failure.callback(os.close, file)
    return file


def _write(file: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.write(file, memoryview(content)[written:])


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have errors of the system name a file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _sync_folder(path: Path) -> None:
    """Force the file's name to the disk."""
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
