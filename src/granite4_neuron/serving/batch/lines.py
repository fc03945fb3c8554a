"""The input of a batch: JSON lines, or the rows of a Parquet file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash
from pydantic_core import from_json, to_json

from granite4_neuron.errors import UserError, described

MOST_BYTES = 2**26  # of a line
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PART = 64  # rows of a Parquet file in memory, of a reader's batch


@dataclass(frozen=True)
class Line:
    """One request.

    place: the byte or the row where it begins, which no other line of the input has.
    content: JSON, or a row by the names of its columns; None for a line that is too long to be read.
    """

    place: int
    content: bytes | Mapping[str, Any] | None

    def digest(self) -> str:
        """Return 16 hexadecimal digits that tell it from lines of other contents or at other places."""
        content = self.content if isinstance(self.content, bytes) else _json(self.content, "constants")
        return xxhash.xxh3_64_hexdigest(b"%d %b" % (self.place, content))

    def value(self) -> Mapping[str, Any]:
        """Return it as an object. Values that JSON does not have are replaced: bytes by base64, numbers that are not
        finite (also 1e400, which JSON can write) by null, others by their text.

        Raises:
            UserError: it is not an object in JSON.
        """
        if self.content is None:
            raise UserError(f"the line is longer than {MOST_BYTES:,} bytes.")
        try:
            value = from_json(self.content, allow_inf_nan=False) if isinstance(self.content, bytes) else self.content
        except ValueError as error:
            raise UserError(f"the line is not JSON ({error}).") from None
        if not isinstance(value, Mapping):
            raise UserError("the line is not an object in JSON.")
        return from_json(_json(value, "null"))


def _json(value: Any, inf_nan_mode: Literal["null", "constants"]) -> bytes:
    return to_json(value, bytes_mode="base64", inf_nan_mode=inf_nan_mode, fallback=str)


class Lines(ABC):
    """An input. Places are bytes or rows.

    path: of the file.
    size: the place behind the last line.
    unit: of places, in the plural.
    portion: how many places are a good piece of work.
    """

    path: Path
    size: int
    unit: str
    portion: int

    @abstractmethod
    def read(self, start: int, stop: int | None = None) -> Iterator[Line]:
        """Yield the lines that begin at places from `start` to `stop`, or to the end."""


class JSONLines(Lines):
    """A file of lines of JSON; empty lines do not count.

    Raises:
        UserError: there is no such file.
    """

    unit = "bytes"
    portion = 2**18

    def __init__(self, path: Path):
        self.path = path
        self.size = path.stat().st_size

    def read(self, start: int, stop: int | None = None) -> Iterator[Line]:
        with open(self.path, "rb") as file:
            if start:
                file.seek(start - 1)
                _next_line(file)  # the end of a line that begins before
            while True:
                place = file.tell()
                if stop is not None and place >= stop:
                    return
                line = _next_line(file)
                if line == b"":
                    return
                if line is not None and not place:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line is None or line.strip():
                    yield Line(place, line)


def _next_line(file: BinaryIO) -> bytes | None:
    """Return the next line; nothing at the end, and None for a line that is too long."""
    line = file.readline(MOST_BYTES)
    if len(line) < MOST_BYTES or line.endswith(b"\n"):
        return line
    while len(line) == MOST_BYTES and not line.endswith(b"\n"):
        line = file.readline(MOST_BYTES)
    return None


class ParquetRows(Lines):
    """A Parquet file.

    Raises:
        UserError: it cannot be read, or pyarrow is not installed.
    """

    unit = "rows"
    portion = 1024

    def __init__(self, path: Path):
        if find_spec("pyarrow") is None:
            raise UserError("Parquet files need pyarrow; install it with: pip install 'granite4-neuron[parquet]'.")
        self.path = path
        self.size = self._file().metadata.num_rows

    def read(self, start: int, stop: int | None = None) -> Iterator[Line]:
        file = self._file()
        first = 0  # row of the group
        for group in range(file.metadata.num_row_groups):
            behind = first + file.metadata.row_group(group).num_rows
            if start < behind and (stop is None or first < stop):
                with self._faults():
                    yield from self._read_group(group, first, start, stop)
            first = behind

    def _read_group(self, group: int, first: int, start: int, stop: int | None) -> Iterator[Line]:
        place = first
        for batch in self._file().iter_batches(batch_size=_PART, row_groups=[group]):
            if place + batch.num_rows > start:
                for row in batch.to_pylist():
                    if stop is not None and place >= stop:
                        return
                    if place >= start:
                        yield Line(place, row)
                    place += 1
            else:
                place += batch.num_rows

    def _file(self) -> Any:
        from pyarrow import parquet

        with self._faults():
            return parquet.ParquetFile(self.path)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Have errors of a damaged file name it."""
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.path} is not a Parquet file, or is damaged ({described(error)}).") from None


def open_lines(path: Path) -> Lines:
    """Return the lines of a file: of a Parquet file by its ending, of JSON otherwise.

    Raises:
        UserError: it is not a file, or it cannot be read.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; give one with a request or a prompt in each line.")
    return ParquetRows(path) if path.suffix == ".parquet" else JSONLines(path)
