"""Files that somebody else may have placed: only regular ones are read and written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from granite4_neuron.errors import UserError

# The largest model's index has 60 kB, and the largest tokenizers have 30 MB.
_MOST_BYTES = 2**26


def check_regular(file: Path) -> os.stat_result:
    """Return the status of a regular file. Opening a named pipe that nobody writes to would wait forever, and a device
    may have no end.

    Raises:
        UserError: it is neither a regular file nor a link to one, or no file can have the name.
        OSError: there is no such file, or its status may not be read.
    """
    check_name(file)
    about = os.stat(file)
    if not stat.S_ISREG(about.st_mode):
        raise UserError(f"{file} is not a regular file.")
    return about


def check_name(file: Path) -> None:
    """Check a name that did not come from the command line; raise UserError if no file can have it."""
    if "\0" in str(file):
        raise UserError(f"{str(file)!r} cannot be the name of a file.")


def read_bytes(file: Path) -> bytes:
    """Read a file of settings.

    Raises:
        UserError: it is not a regular file of a reasonable size.
        OSError: it cannot be read.
    """
    size = check_regular(file).st_size
    if size > _MOST_BYTES:
        raise UserError(f"{file} has {size:,} bytes, too many for a file of settings.")
    return file.read_bytes()
