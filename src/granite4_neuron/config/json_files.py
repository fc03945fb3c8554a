"""JSON files of a checkpoint, which anybody may have written."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

from granite4_neuron.errors import UserError
from granite4_neuron.system.regular_files import read_bytes


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
