"""JSON that anybody may have written: files of a checkpoint, files in this package's own formats, options."""

from __future__ import annotations

import json
import math
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from granite4_neuron.errors import UserError
from granite4_neuron.system.regular_files import read_bytes

# Not in JSON, but Python writes and reads them.
CONSTANTS = ("NaN", "Infinity", "-Infinity")
_CONTROL = re.compile(r"[\x00-\x1f]")
_STRING_OR_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|' + "|".join(CONSTANTS), re.DOTALL)


@dataclass(frozen=True)
class FileFormat:
    """A format of files that this package writes. Each has a JSON object with the format's name and version.

    fields: for each further member, whether a value of it is right.
    what: a file of this format in words. remedy: what to do about a file that cannot be read.
    """

    name: str
    version: int
    fields: Mapping[str, Callable[[Any], bool]]
    what: str
    remedy: str

    @property
    def header(self) -> dict[str, Any]:
        """The members that tell the format."""
        return {"format": self.name, "version": self.version}

    def check(self, file: Path, values: Any) -> None:
        """Check the object in a file.

        Raises:
            UserError: the file is of another format or version, or a member is missing or wrong.
        """
        if not isinstance(values, dict) or values.get("format") != self.name:
            raise UserError(f"{file} is not {self.what}.")
        if values.get("version") != self.version:
            raise UserError(
                f"{file} has version {reprlib.repr(values.get('version'))} of the format and this package reads "
                f"{self.version}; {self.remedy}."
            )
        for name, is_right in self.fields.items():
            if not is_right(values.get(name)):
                wrong = f"{name} is {reprlib.repr(values[name])}" if name in values else f"it has no {name}"
                raise UserError(f"{file} is damaged or incomplete ({wrong}); {self.remedy}.")


def write_json(file: Path, text: str) -> None:
    """Write a file of JSON; raise UserError if it cannot be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}).") from None


def parse_json(text: str | bytes, name: str) -> Any:
    """Parse JSON.

    Args:
        name: what to call the text in an error.

    Raises:
        UserError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON ({error}).") from None


def strict_json(text: str) -> Any:
    """Parse JSON that a model or a client wrote, and that other readers are to read again: `CONSTANTS` become null, as
    in JavaScript, numbers are in the range of double precision, see `finite`, and strings may have control characters.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(
        text,
        strict=False,
        parse_int=_whole,
        parse_float=lambda number: finite(float(number)),
        parse_constant=lambda _: None,
    )


def in_strict_json(text: str) -> str:
    """Return what `strict_json` takes as other readers take it."""
    return _STRING_OR_CONSTANT.sub(lambda match: escaped(match[0]) if match[0][0] == '"' else "null", text)


def escaped(text: str) -> str:
    """Escape the control characters of a string in JSON."""
    return _CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text)


def finite(value: Any) -> Any:
    """Return a JSON value with the nearest numbers of double precision in place of those that are infinite, and None in
    place of NaN.
    """
    match value:
        case dict():
            return {name: finite(each) for name, each in value.items()}
        case list():
            return list(map(finite, value))
        case float() if math.isnan(value):
            return None
        case float():
            return min(max(value, -sys.float_info.max), sys.float_info.max)
    return value


def _whole(number: str) -> int | float:
    rounded = float(number)
    return finite(rounded) if math.isinf(rounded) else int(number)


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        UserError: there is no such file, it is not a regular file of a reasonable size, or it does not hold a JSON
            object.
    """
    try:
        values = json.loads(read_bytes(path).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a checkpoint folder holds a {path.name}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except RecursionError:
        raise UserError(f"{path} is not valid JSON (objects or lists are nested too deeply).") from None
    except UserError:
        raise
    except ValueError as error:  # wrong JSON, wrong encoding, or an integer of thousands of digits
        raise UserError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a JSON {type(values).__name__}; it must hold an object.")
    return values


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its pairs; an object_pairs_hook of `json.loads`.

    Raises:
        ValueError: a name occurs twice; readers would differ in which value they take.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{reprlib.repr(twice)} is in it twice")
    return values
