"""Triton, where it is installed: it comes with builds of torch for GPUs.

Where it is not installed, kernels stay plain Python functions that nothing launches: operators compute their
definitions on a CPU.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch


def _no_jit(kernel: Any = None, **options: Any) -> Any:
    return _no_jit if kernel is None else kernel


triton: Any = SimpleNamespace(jit=_no_jit)
tl: Any = SimpleNamespace(constexpr=lambda value: value)
TensorDescriptor: Any = None
# Gluon, in which a kernel itself says which warps do what: its language, and that of compute capability 9.0.
gluon: Any = SimpleNamespace(jit=_no_jit)
gl: Any = SimpleNamespace(constexpr=lambda value: value)
hopper: Any = None
GluonTensorDescriptor: Any = None
if find_spec("triton"):
    triton, tl = import_module("triton"), import_module("triton.language")
    TensorDescriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    gluon, gl = import_module("triton.experimental.gluon"), import_module("triton.experimental.gluon.language")
    hopper = import_module("triton.experimental.gluon.language.nvidia.hopper")
    GluonTensorDescriptor = import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor

LOG2_E = tl.constexpr(1.4426950408889634)


def dtype_of(tensor: torch.Tensor) -> Any:
    """Return Triton's dtype of a tensor's numbers."""
    return getattr(tl, str(tensor.dtype).removeprefix("torch."))


@triton.jit
def entries_of_slots(slots, rows, mask):
    """Return the entries of a state that some rows have, in int64: slot - 1 of each, or its number without slots."""
    entries = rows.to(tl.int64)
    if slots is not None:
        entries = tl.load(slots + rows, mask, 1).to(tl.int64) - 1
    return entries
