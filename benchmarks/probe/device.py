"""A PyTorch device of any kind: its versions, compiling for it, comparing with the CPU, time and memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.probe.process import EQUAL, FACT, WRONG, Finding, Place
from granite4_neuron.config.choices import FLOAT32_TOLERANCE
from granite4_neuron.devices.torch.devices import find_device
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.ops.launch_parameters import processor_name

ROOT = Path(__file__).parents[2]
_PACKAGES = re.compile("neuron|nki|nrt|torch|xla|triton|cuda|vllm|transformers|numpy|^granite", re.IGNORECASE)
_VARIABLES = re.compile("NEURON|TORCH|NKI|XLA|PJRT|CUDA|OMP")
_ROUNDS, _CALLS = 3, 10  # of a measurement


def versions(place: Place) -> Iterator[Finding]:
    """Yield the versions on which results depend, then whether the device is there."""
    names = {each.name for each in importlib.metadata.distributions() if _PACKAGES.search(each.name)}
    # If several versions are on the path, the first is imported, and `version` reports that one.
    packages = {name: importlib.metadata.version(name) for name in sorted(names)}
    facts = {
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "packages": dict(sorted(packages.items())),
        "drivers": {name: _driver(name) for name in ("neuron", "nvidia")},
        "neuron-ls": _output("neuron-ls"),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.search(name)},
    }
    names = [name for name in ("torch", "torch-neuronx", "nki") if name in packages]
    yield Finding("versions", FACT, message=", ".join(f"{name} {packages[name]}" for name in names), numbers=facts)
    device = find_device(place.device)
    kind = getattr(torch, device.type)
    name = kind.get_device_name() if hasattr(kind, "get_device_name") else facts["processor"]
    value = torch.ones(3, device=device).sum().item()
    yield Finding("device", EQUAL if value == 3 else WRONG, message=name)


def _driver(name: str) -> str | None:
    file = Path("/sys/module") / name / "version"
    return file.read_text().strip() if file.is_file() else None


def _output(*command: str) -> str | None:
    """Return a program's output, or None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def compiled(place: Place, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as a graph with fixed shapes."""
    backend = place.compiler or DEVICES[find_device(place.device).type].compiler
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def to_device(place: Place, values: Any) -> Any:
    """Return copies of tensors on the device, in any nesting."""
    device = find_device(place.device)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), values)


@torch.no_grad()
def compare(
    place: Place, what: str, function: Callable[..., Any], definition: Callable[..., Any], *arguments: Any
) -> Finding:
    """Compare what a function returns, compiled on the device, with its definition in plain torch on the CPU.

    Args:
        arguments: arguments of both. Each gets its own copy.
    """
    expected = definition(*tree_map_only(torch.Tensor, torch.clone, arguments))
    return judge(what, compiled(place, function)(*to_device(place, arguments)), expected)


def judge(what: str, found: Any, expected: Any, tolerance: float = FLOAT32_TOLERANCE) -> Finding:
    """Compare tensors, in any nesting. Each tensor's error is relative to its largest expected value."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    error = max((_error(one, other) for one, other in pairs), key=lambda error: (error != error, error))
    if error <= tolerance:
        return Finding(what, EQUAL, error)
    is_finite = error < float("inf")
    return Finding(what, WRONG, error if is_finite else None, f"above {tolerance:g}" if is_finite else "not finite")


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.cpu().double(), expected.double()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def milliseconds(place: Place, function: Callable[[], Any]) -> float:
    """Return the time of a call that has run before, the median of a few rounds of calls."""
    synchronize = getattr(torch, find_device(place.device).type).synchronize
    seconds = []
    for _ in range(_ROUNDS):
        synchronize()
        started = time.perf_counter()
        for _ in range(_CALLS):
            function()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds) / _CALLS


def memory_bytes(place: Place) -> int | None:
    """Return the memory in use: the process's on a CPU, the tensors' on another device; None if unknown."""
    kind = find_device(place.device).type
    if kind == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    module = getattr(torch, kind)
    return module.memory_allocated() if hasattr(module, "memory_allocated") else None
