"""The part of `nki.language` that the kernels use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from nki.emulation import DTYPES, Memory, NkiTensor, last_launch, require

float32, bfloat16, float16, int32 = "float32", "bfloat16", "float16", "int32"
sbuf, psum = Memory.SBUF, Memory.PSUM
private_hbm, shared_hbm = Memory.HBM, Memory.SHARED_HBM


ARITHMETIC = ("add", "subtract", "multiply", "maximum", "minimum")


@dataclass(frozen=True)
class Operator:
    """A function that engines apply: binary (VectorE and GpSimd) or an activation (ScalarE). float32 in and out."""

    name: str
    function: Callable[..., np.ndarray]
    arity: int


def ndarray(shape: tuple[int, ...], dtype: str, buffer: Memory = sbuf) -> NkiTensor:
    """Uninitialised memory."""
    require(dtype in DTYPES, f"{dtype} is not a dtype of this emulator")
    require(isinstance(buffer, Memory), f"buffer is {buffer!r}; it must be an object such as nl.sbuf")
    return last_launch().allocate(shape, dtype, buffer)


def ds(start: int, size: int) -> slice:
    """The slice of `size` elements from `start`."""
    return slice(start, start + size)


def program_id(axis: int) -> int:
    """Which of the launch's programs this one is."""
    return last_launch().program


def program_ndim() -> int:
    """0 for a kernel that is launched without a grid, else 1."""
    return int(last_launch().programs > 1)


def num_programs(axes: int) -> int:
    """How many programs the launch has."""
    return last_launch().programs


def _binary(name: str, function: Callable) -> Operator:
    """Arithmetic in float32; a comparison gives 1 or 0."""
    return Operator(name, function if name in ARITHMETIC else lambda a, b: np.asarray(function(a, b), np.float32), 2)


def _activation(name: str, function: Callable, low: float = 0.0, high: float = np.inf) -> Operator:
    """An activation, and the magnitudes of its input for which the hardware's table is valid."""

    def checked(x: np.ndarray) -> np.ndarray:
        magnitude = np.abs(x)
        outside = (magnitude < low) | (magnitude > high)
        require(not outside.any(), f"{name} of {x[outside][:1]}: valid magnitudes are {low:g} to {high:g}")
        return np.asarray(function(x), np.float32)

    return Operator(name, checked, 1)


add = _binary("add", np.add)
subtract = _binary("subtract", np.subtract)
multiply = _binary("multiply", np.multiply)
maximum = _binary("maximum", np.maximum)
minimum = _binary("minimum", np.minimum)
equal = _binary("equal", np.equal)
greater = _binary("greater", np.greater)
greater_equal = _binary("greater_equal", np.greater_equal)
less = _binary("less", np.less)
less_equal = _binary("less_equal", np.less_equal)

copy = _activation("copy", lambda x: x)
exp = _activation("exp", np.exp)
silu = _activation("silu", lambda x: x / (1 + np.exp(-x)))
softplus = _activation("softplus", lambda x: np.logaddexp(0, x))
log = _activation("log", np.log, 2.0**-64, 2.0**64)
sqrt = _activation("sqrt", np.sqrt, 2.0**-116, 2.0**118)
rsqrt = _activation("rsqrt", lambda x: 1 / np.sqrt(x), 2.0**-87, 2.0**97)
reciprocal = _activation("reciprocal", np.reciprocal, 2.0**-42, 2.0**42)
