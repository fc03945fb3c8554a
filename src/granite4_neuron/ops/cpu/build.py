"""Compile the kernels for this machine's processor, once, and load them."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import resources
from pathlib import Path

import torch

_TORCH = Path(torch.__file__).parent
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi", "-DNDEBUG")


@functools.cache
def load_kernels() -> str | None:
    """Register `torch.ops.granite4_neuron`, compiling it at first use into the user's cache folder.

    Returns:
        None, or why that is not possible here, which is said on standard error as well.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    sources = Path(str(resources.files("granite4_neuron.ops.cpu") / "kernels"))
    library = _cache_folder() / f"kernels-{_key(sources)}.so"
    try:
        if not library.is_file():
            if compiler is None:
                return _refuse("no C++ compiler (c++) was found")
            _say("compiling the CPU kernels for this machine, once; this takes about half a minute ...")
            _compile(compiler, sources / "kernels.cpp", library)
        torch.ops.load_library(str(library))
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), "no reason given")
        return _refuse(f"they do not compile here ({reason.strip()})")
    except OSError as error:
        return _refuse(f"they cannot be built or loaded ({error})")
    return None


def _refuse(reason: str) -> str:
    _say(f"the CPU runs plain torch instead of fused kernels: {reason}.")
    return reason


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Beside `library` first: another process sees all of it or nothing."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        paths = (f"-isystem{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}")
        libraries = ("-ltorch_cpu", "-lc10")
        command = (
            *shlex.split(compiler),
            *_FLAGS,
            *_processor_flags(),
            *paths,
            str(source),
            "-o",
            str(built),
            *libraries,
        )
        subprocess.run(command, check=True, capture_output=True, text=True)
        built.replace(library)


def _processor_flags() -> list[str]:
    """Those under which ATen's vectors are as wide as torch's own kernels use them on this processor."""
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    return ["-march=native", f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]


def _key(sources: Path) -> str:
    """Of everything that the library depends on."""
    digest = hashlib.sha256()
    for file in sorted((*sources.glob("*.h"), *sources.glob("*.cpp"))):
        digest.update(file.read_bytes())
    for fact in (torch.__version__, sysconfig.get_platform(), _processor(), *_FLAGS, *_processor_flags()):
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: the processor's instruction sets, where the system tells them."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return line
    return platform.processor()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "granite4-neuron"


def _say(message: str) -> None:
    print(f"granite4-neuron: {message}", file=sys.stderr, flush=True)
