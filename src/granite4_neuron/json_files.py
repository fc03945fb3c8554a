"""JSON files of a checkpoint, which anybody may have written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from granite4_neuron.errors import UserError

# The index of the largest model has 60 kB; a tokenizer's file is not read here.
_MOST_BYTES = 2**26


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        UserError: there is no such file, it is something else than a file of a reasonable size, or it does not hold a
            JSON object.
    """
    try:
        # Opening a named pipe that nobody writes to would wait forever.
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise UserError(f"{path} is not a regular file.")
        if about.st_size > _MOST_BYTES:
            raise UserError(f"{path} has {about.st_size:,} bytes, too many for a file of settings.")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a checkpoint folder holds a {path.name}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except RecursionError:
        raise UserError(f"{path} is not valid JSON (objects or lists are nested too deeply).") from None
    except UserError:
        raise
    except ValueError as error:  # of the JSON, of its encoding, or of an integer of thousands of digits
        raise UserError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a JSON {type(values).__name__}; it must hold an object.")
    return values
