"""The available memory, and errors when it is not enough."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from granite4_neuron.errors import UserError

# Parts of torch's messages, in a plain RuntimeError, when its allocator or mapping a file runs out of memory.
_TORCH_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_OWN_GROUPS = Path("/proc/self/cgroup")
# By the controllers that a line of that file names: where groups are, their limit, what they use, and what of it are
# cached files. Without controllers it is version 2.
_VERSIONS = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file "),
    "memory": (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file ",
    ),
}


def available_bytes(processes: int = 1) -> int | None:
    """Return the memory that this process, or several together, can still take, given the machine, its container and
    the limit of each process; None if unknown.
    """
    limit = _of_limit()
    sizes = _of_machine(), _of_groups(), None if limit is None else processes * limit
    known = [size for size in sizes if size is not None]
    return max(0, min(known)) if known else None


def check_available(needed: int, what: str, advice: str, processes: int = 1) -> None:
    """Check that there is enough memory before it is taken.

    Args:
        needed: bytes, for all processes together.
        what: the things that need the memory; the subject of a sentence, in the plural.
        advice: what to do instead.

    Raises:
        UserError: there is not enough; the message has both numbers.
    """
    available = available_bytes(processes)
    if available is not None and needed > available:
        raise UserError(
            f"{what} need {needed / 1e9:.2f} GB of memory, and {available / 1e9:.2f} GB are available; {advice}."
        )


def is_exhausted(error: Exception) -> bool:
    """Return whether an exception says that there is no more memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError):  # of a library
        return "failed to map segment" in str(error) or os.strerror(errno.ENOMEM) in str(error)
    if isinstance(error, RuntimeError):
        return any(message in str(error) for message in _TORCH_MESSAGES)
    return isinstance(error, (MemoryError, OverflowError))  # OverflowError: more than a size can be


@contextmanager
def enough_for(what: str) -> Iterator[None]:
    """Raise an error that names what the memory was for, if memory runs out within the block.

    Raises:
        UserError: there was no memory for it.
    """
    try:
        yield
    except (MemoryError, OSError, OverflowError, RuntimeError) as error:
        if not is_exhausted(error):
            raise
        available = available_bytes()
        left = "" if available is None else f"; {available / 1e9:.2f} GB are available"
        raise UserError(f"there is not enough memory for {what}{left}.") from None


def _of_machine() -> int | None:
    return _field_of(Path("/proc/meminfo"), "MemAvailable:", 1024)


def _of_groups() -> int | None:
    """Return the available memory of the control groups that this process is in; each limits those within it. A group
    counts cached files as used, but they can be dropped.
    """
    left = []
    for line in _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.is_file() else ():
        _, controllers, place = line.split(":", 2)
        if (version := _VERSIONS.get(controllers)) is None:
            continue
        root, most, used, dropped = version
        own = root / place.lstrip("/")
        # A container may see its host's path of a group, which it does not have, and has its own group as the root.
        for folder in (own, *own.parents):
            limit, current = _number(folder / most), _number(folder / used)
            if limit is not None and current is not None:
                left.append(limit - current + (_field_of(folder / "memory.stat", dropped, 1) or 0))
            if folder == root:
                break
    return min(left, default=None)


def _of_limit() -> int | None:
    """Return the rest of the address space, which prlimit --as and ulimit -v limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _field_of(Path("/proc/self/status"), "VmSize:", 1024)
    return None if limit == resource.RLIM_INFINITY or taken is None else limit - taken


def _field_of(file: Path, name: str, unit: int) -> int | None:
    if not file.is_file():
        return None
    for line in file.read_text().splitlines():
        if line.startswith(name):
            return int(line.removeprefix(name).split()[0]) * unit
    return None


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None
