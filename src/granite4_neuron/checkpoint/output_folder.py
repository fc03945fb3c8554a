"""Folders that are written as a whole, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from granite4_neuron.errors import UserError

_LOCK = ".lock"


def check_output(folder: Path) -> None:
    """Check, before any work is done, that `complete_or_absent` can write there.

    Raises:
        UserError: it is in use, or its parent folder does not exist or cannot be written to.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not an empty folder; choose another place to write to.")
        parent = folder.absolute().parent
        if not parent.is_dir():
            raise UserError(f"{folder} could not be written: there is no folder {parent}.")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"{folder} could not be written: {parent} may not be written to.")
    except OSError as error:
        raise UserError(f"{folder} could not be written ({error.strerror}).") from None


@contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """Provide a temporary folder to write to; it becomes `folder` on success, and is removed otherwise.

    Leftovers of killed processes are removed too.

    Raises:
        UserError: the folder is in use, or writing failed (no space, no permission).
    """
    check_output(folder)
    remove_leftovers(folder)
    partial, lock = None, None
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        lock = _locked(partial)
        yield partial
        # mkdtemp and safetensors make private files; a checkpoint should be as readable as other files of its owner.
        mask = os.umask(0)
        os.umask(mask)
        (partial / _LOCK).unlink()
        for path in (partial, *partial.iterdir()):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} could not be written ({error}); nothing was left behind.") from None
    finally:
        if lock is not None:
            os.close(lock)
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the unfinished folders that ended processes left beside `folder`, see `complete_or_absent`; return the
    removed paths.

    A process locks the folder that it writes to for as long as it lives.
    """
    removed = []
    for partial in folder.absolute().parent.glob(f".{folder.name}.*"):
        if (partial / _LOCK).is_file() and (lock := _locked(partial)) is not None:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)
            removed.append(partial)
    return removed


def _locked(partial: Path) -> int | None:
    """Lock a folder; return the descriptor that holds the lock, or None if another process has it."""
    lock = os.open(partial / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
