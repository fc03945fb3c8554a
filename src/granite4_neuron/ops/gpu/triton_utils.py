"""Triton, where it is installed: it comes with builds of torch for GPUs.

Where it is not installed, kernels stay plain Python functions that nothing launches: operators compute their
definitions on a CPU.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

triton: Any = SimpleNamespace(jit=lambda kernel: kernel)
tl: Any = SimpleNamespace(constexpr=lambda value: value)
if find_spec("triton"):
    triton, tl = import_module("triton"), import_module("triton.language")
