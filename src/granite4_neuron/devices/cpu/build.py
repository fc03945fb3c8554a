"""Compile the kernels for this machine's processor, once, and load them."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path

import torch

from granite4_neuron.errors import UserError
from granite4_neuron.system.processor import instruction_sets
from granite4_neuron.system.terminal import unguarded

_TORCH = Path(torch.__file__).parent
_SOURCES = Path(str(resources.files("granite4_neuron.devices.cpu") / "kernels"))
# A product and a sum are fused only where the code says so: the compiler would fuse them in some copies of a loop and
# not in others.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-DNDEBUG")
_QUIET = ("-Wno-psabi", "-Wno-ignored-attributes")
_ONE_OPERATOR = "linear"
_KERNELS = "kernels"  # the library with all but the products of quantisations
_ONCE_A_FORMAT = "products"
_COMMON_HEADER = "all_units.h"
_BUILDING = "building-"
_STALE_SECONDS = 3600  # a build takes a minute or two
_LOGGER = logging.getLogger(__name__)


@functools.cache
def load_kernels() -> str | None:
    """Register `torch.ops.granite4_neuron`, compiling it at first use into the user's cache folder.

    Returns:
        None, or the reason why that is not possible here, which is also written to standard error.
    """
    reason = _load(_KERNELS)
    if reason is None and not hasattr(torch.ops.granite4_neuron, _ONE_OPERATOR):
        reason = "the library that was loaded does not have them"
    if reason is not None:
        _say(f"the CPU runs plain torch instead of fused kernels: {reason}.")
    return reason


@functools.cache
def load_format(name: str) -> None:
    """Load a quantisation's products into the kernels, compiling them at first use.

    Raises:
        UserError: that is not possible here.
    """
    if (reason := _load(name)) is not None:
        raise UserError(f"there are no kernels for {name} here: {reason}; choose plain torch (--cpu-kernels torch).")


def _load(part: str) -> str | None:
    """Load a library; return None, or the reason why that is not possible."""
    try:
        torch.ops.load_library(str(_library(part)))
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), "no reason given")
        return f"they do not compile here ({reason.strip()})"
    except (_Unavailable, OSError) as error:
        return f"they cannot be built or loaded ({error})"
    return None


@functools.cache
def formats(sources: Path = _SOURCES) -> tuple[str, ...]:
    """Return the quantisations that the kernels have: the names of the headers in kernels/formats."""
    return tuple(sorted(header.stem for header in (sources / "formats").glob("*.h")))


@functools.cache
def kernel(name: str) -> torch._ops.OpOverload:
    """Return the operator of torch that `load_kernels` registered under this name."""
    return getattr(torch.ops.granite4_neuron, name).default


class _Unavailable(Exception):
    """Raised if there are no kernels to load; the message says why."""


def _library(part: str = _KERNELS) -> Path:
    """Return the compiled kernels, or a format's products. Before a cached file may run, its owner and its integrity
    are checked.

    Raises:
        _Unavailable: there is no place for it, or nothing to compile it with.
        CalledProcessError: it does not compile.
    """
    folder, key = _private_folder(_cache_folder()), library_key()
    if (library := _cached(folder, f"{part}-{key}")) is not None:
        return library
    compiler, kernels = _compiler(), () if part == _KERNELS else (_library(),)
    with _alone(folder):
        if (library := _cached(folder, f"{part}-{key}")) is not None:  # another process made it meanwhile
            return library
        what = "" if part == _KERNELS else f" for {part}"
        _say(f"compiling the CPU kernels{what} for this machine, once: half a minute or more ...")
        with _elapsed_time():
            return _build(compiler, _SOURCES, folder, part, key, kernels)


def _cached(folder: Path, name: str) -> Path | None:
    for library in folder.glob(f"{name}-*.so"):
        if _is_ours(library) and library.stem == f"{name}-{_digest(library)}":
            return library
        _say(f"{library} is damaged or may be written to by others; it is compiled again.")
        library.unlink(missing_ok=True)
    return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for another process that compiles. On a file system without locks both compile, which is safe too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say("another process is compiling the CPU kernels for this machine; waiting for it ...")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _elapsed_time() -> Iterator[None]:
    """While the block runs, show the elapsed time on standard error if that is a terminal."""
    # Not at the top: only the first use needs it.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=unguarded(sys.stderr))
    columns = (SpinnerColumn(), TextColumn("compiling"), TimeElapsedColumn())
    progress = Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )
    with progress:
        progress.add_task("", total=None)
        yield


def _build(
    compiler: Sequence[str], sources: Path, folder: Path, part: str, key: str, others: Sequence[Path] = ()
) -> Path:
    """Build in a temporary folder first: another process, or one after a crash, sees all of the library or nothing.

    Args:
        others: libraries that this one calls.
    """
    _remove_leftovers(folder)
    name = f"{part}-{key}"
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=folder) as building:
        built = Path(building) / name
        flags = [*_FLAGS, *_QUIET, *_processor_flags(), f"-isystem{_TORCH / 'include'}"]
        common = [*compiler, *flags, *_including_formats(sources, Path(building))]
        _precompile(common, Path(building))
        units = {built.with_suffix(f".{unit}.o"): own for unit, own in _units(sources, part).items()}
        _run_all([[*common, *own, "-o", str(unit)] for unit, own in units.items()], _cores())
        # A format's library finds the loaded kernels by this name, wherever the folder is by then.
        named = f"-Wl,-soname,{name}.so"
        libraries = (*map(str, others), f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10")
        _run_all([[*compiler, "-shared", named, *map(str, units), "-o", str(built), *libraries]], 1)
        built.chmod(0o700)
        with built.open("rb") as file:
            os.fsync(file.fileno())
        return built.replace(folder / f"{name}-{_digest(built)}.so")


def _precompile(common: Sequence[str], folder: Path) -> None:
    """Read the header that all units include once, with torch's in it, which take a third of a unit's time."""
    header = folder / _COMMON_HEADER
    with suppress(subprocess.CalledProcessError):  # a compiler that cannot do this reads it in every unit
        _run_all([[*common, "-x", "c++-header", str(header), "-o", f"{header}.gch"]], 1)


def _units(sources: Path, part: str) -> dict[str, list[str]]:
    """Return what the commands that compile a library's translation units do not have in common."""
    units = {}
    for source in sorted(sources.glob("*.cpp")):
        own = ["-c", str(source)]
        if source.stem == _ONCE_A_FORMAT:
            units[source.stem] = [*own, f"-DGRANITE4_FORMAT={'plain' if part == _KERNELS else part}"]
        elif part == _KERNELS:
            units[source.stem] = own
    return units


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_all(commands: Sequence[Sequence[str]], at_a_time: int) -> None:
    """Run up to `at_a_time` commands at once. If one fails, or on an interrupt, end the others and their children.

    Raises:
        CalledProcessError: the first command that failed, with what it wrote to stderr.
    """
    running: list[subprocess.Popen[str]] = []
    ending = threading.Event()

    # On separate threads, so that no interrupt comes between the start of a process and its entry in the list.
    def run(command: Sequence[str]) -> None:
        if ending.is_set():
            return
        process = subprocess.Popen(
            command,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # a compiler may quote a file's bytes, which need not be text
        )
        with process:
            running.append(process)
            if ending.is_set():
                _end(process)
            _, messages = process.communicate()
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, stderr=messages)

    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            pending = {pool.submit(run, command) for command in commands}
            while pending:
                # With a limit: an interrupt that comes just before a wait is noticed only after it.
                done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
        finally:
            ending.set()
            for process in running:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that leads a session, and all processes in it: a compiler is several processes."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of builds that were killed. Another process may be building, or removing the same ones."""
    for building in folder.glob(f"{_BUILDING}*"):
        with suppress(FileNotFoundError):
            if time.time() - building.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(building, ignore_errors=True)


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    try:
        command = shlex.split(chosen or shutil.which("c++") or shutil.which("g++") or "")
    except ValueError as error:
        raise _Unavailable(f"the environment variable CXX is {chosen!r}, which is not a command: {error}") from None
    if not command:
        raise _Unavailable("there is no C++ compiler (c++)")
    return command


def _private_folder(folder: Path) -> Path:
    """Make `folder` private to this user: a user who can write to it can have this process run anything."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise _Unavailable(f"{folder} belongs to another user; set XDG_CACHE_HOME to a folder of your own")
    folder.chmod(0o700)
    return folder


def _is_ours(file: Path) -> bool:
    """Return whether the file is this user's, and no other user may write to it."""
    about = file.lstat()
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _processor_flags() -> list[str]:
    """Return the flags that make ATen's vectors as wide as in torch's own kernels on this processor."""
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    amx = ("-DGRANITE4_AMX",) if capability == "AVX512" and _may_use_amx() else ()
    return ["-march=native", f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}", *amx]


@functools.cache
def _may_use_amx() -> bool:
    """Ask Linux for permission to use AMX's registers, which a process needs."""
    if not {"amx_tile", "amx_bf16"} <= set(instruction_sets().split()) or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def _including_formats(sources: Path, folder: Path) -> list[str]:
    """Write the header that all units include, with the formats' headers, into `folder`.

    Returns:
        The flags that include it, and that define GRANITE4_FORMATS, which formats.h describes.
    """
    names, header = formats(sources), folder / _COMMON_HEADER
    header.write_text("".join(f'#include "formats/{name}.h"\n' for name in names))
    formats_macro = f"-DGRANITE4_FORMATS(DO, ...)={' '.join(f'DO({name}, __VA_ARGS__)' for name in names)}"
    return [formats_macro, "-iquote", str(sources), "-include", str(header)]


def library_key(sources: Path = _SOURCES) -> str:
    """Return a hash of everything that decides the library, and with it the last bits of its results."""
    digest = hashlib.sha256()
    for file in sorted((*sources.rglob("*.h"), *sources.glob("*.cpp"))):
        digest.update(str(file.relative_to(sources)).encode() + file.read_bytes())
    for fact in (torch.__version__, sysconfig.get_platform(), instruction_sets(), *_FLAGS, *_processor_flags()):
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and the user has no entry in the system's list, as in a container
        return Path(tempfile.gettempdir()) / f"granite4-neuron-{os.getuid()}"
    return cache / "granite4-neuron"


def _say(message: str) -> None:
    _LOGGER.warning("granite4-neuron: %s", message)
