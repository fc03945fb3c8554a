"""The part of `nki.language` that the kernels use."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from nki.running import last_launch
from nki.tensors import NkiTensor
from nki.values import DTYPES, FLOATS, PARTITIONS, PSUM_BANK_BYTES, Memory, require, sbuf_partition_bytes

float32, bfloat16, float16, int32 = "float32", "bfloat16", "float16", "int32"
int8, int16, uint8, uint16, uint32 = "int8", "int16", "uint8", "uint16", "uint32"
float8_e4m3, float8_e4m3fn, float8_e5m2 = "float8_e4m3", "float8_e4m3fn", "float8_e5m2"
FLOAT_DTYPES = FLOATS
sbuf, psum = Memory.SBUF, Memory.PSUM
private_hbm, shared_hbm, hbm = Memory.HBM, Memory.SHARED_HBM, Memory.HBM
tensor = NkiTensor

ARITHMETIC = ("add", "subtract", "multiply", "maximum", "minimum", "divide", "power")


class _TileSize:
    """Limits that kernels read."""

    pmax = PARTITIONS
    psum_fmax = PSUM_BANK_BYTES // 4
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512

    @property
    def total_available_sbuf_size(self) -> int:
        return sbuf_partition_bytes()


tile_size = _TileSize()


class NKIObject:
    """The base class of classes that kernels use. Its fields are given by name."""

    def __init__(self, *values: object, **fields: object):
        names = [name for base in reversed(type(self).__mro__) for name in inspect.get_annotations(base)]
        for name, value in (*zip(names, values, strict=False), *fields.items()):
            setattr(self, name, value)


@dataclass
class Register:
    """A number that is known only when the kernel runs."""

    value: int = 0


@dataclass(frozen=True)
class Operator:
    """A function that engines apply: binary (VectorE and GpSimd) or an activation (ScalarE). float32 in and out."""

    name: str
    function: Callable[..., np.ndarray]
    arity: int


def ndarray(
    shape: tuple[int, ...], dtype: str, buffer: Memory = sbuf, name: str = "", address: object = None
) -> NkiTensor:
    """Allocate uninitialised memory. Two tensors given one address are two tensors here."""
    require(dtype in DTYPES, f"{dtype} is not a dtype of this emulator")
    require(isinstance(buffer, Memory), f"buffer is {buffer!r}; it must be an object such as nl.sbuf")
    return last_launch().allocate(shape, dtype, buffer)


def ds(start: int, size: int) -> slice:
    """Return the slice of `size` elements from `start`."""
    return slice(start, start + size)


def shared_identity_matrix(size: int, dtype: str = "uint8") -> NkiTensor:
    """Return the identity in SBUF. The compiler keeps one for all that ask for it."""
    matrix = ndarray((size, size), dtype)
    matrix.array[...] = np.eye(size)
    last_launch().use(matrix.storage)
    return matrix


def shared_constant(array: np.ndarray | str, dtype: str | None = None) -> NkiTensor:
    """Return a constant in HBM, from an array or from a file of one."""
    values = np.load(array) if isinstance(array, str) else array
    return NkiTensor.from_array(np.ascontiguousarray(values, dtype and DTYPES[dtype]))


def affine_range(*arguments: int | Register | NkiTensor) -> range:
    """Loop over a range. The compiler unrolls the loop, or runs it on the device where a bound is not known."""
    return range(*(_number(argument) for argument in arguments))


sequential_range = static_range = dynamic_range = affine_range


def _number(value: int | Register | NkiTensor) -> int:
    return value.value if isinstance(value, Register) else int(getattr(value, "array", value))


def program_id(axis: int = 0) -> int:
    """Return the number of the running program within its launch."""
    return last_launch().program


def program_ndim() -> int:
    """Return 0 for a kernel that is launched without a grid, else 1."""
    return int(last_launch().programs > 1)


def num_programs(axes: int = 0) -> int:
    """Return the number of programs of the launch."""
    return last_launch().programs


def _binary(name: str, function: Callable) -> Operator:
    """Return an operator with arithmetic in float32; a comparison gives 1 or 0."""
    return Operator(name, function if name in ARITHMETIC else lambda a, b: np.asarray(function(a, b), np.float32), 2)


def _activation(name: str, function: Callable, low: float = 0.0, high: float = np.inf) -> Operator:
    """Return an activation that checks its input against the magnitudes for which the hardware's table is valid."""

    def checked(x: np.ndarray) -> np.ndarray:
        magnitude = np.abs(x)
        outside = (magnitude < low) | (magnitude > high)
        require(not outside.any(), f"{name} of {x[outside][:1]}: valid magnitudes are {low:g} to {high:g}")
        return np.asarray(function(x), np.float32)

    return Operator(name, checked, 1)


add = _binary("add", np.add)
subtract = _binary("subtract", np.subtract)
multiply = _binary("multiply", np.multiply)
divide = _binary("divide", np.divide)
power = _binary("power", np.power)
maximum = _binary("maximum", np.maximum)
minimum = _binary("minimum", np.minimum)
equal = _binary("equal", np.equal)
greater = _binary("greater", np.greater)
greater_equal = _binary("greater_equal", np.greater_equal)
less = _binary("less", np.less)
less_equal = _binary("less_equal", np.less_equal)
not_equal = _binary("not_equal", np.not_equal)
logical_and = _binary("logical_and", np.logical_and)
logical_or = _binary("logical_or", np.logical_or)

copy = _activation("copy", lambda x: x)
exp = _activation("exp", np.exp)
silu = _activation("silu", lambda x: x / (1 + np.exp(-x)))
softplus = _activation("softplus", lambda x: np.logaddexp(0, x))
log = _activation("log", np.log, 2.0**-64, 2.0**64)
sqrt = _activation("sqrt", np.sqrt, 2.0**-116, 2.0**118)
rsqrt = _activation("rsqrt", lambda x: 1 / np.sqrt(x), 2.0**-87, 2.0**97)
reciprocal = _activation("reciprocal", np.reciprocal, 2.0**-42, 2.0**42)
square = _activation("square", np.square)
abs = _activation("abs", np.abs)
relu = _activation("relu", lambda x: np.maximum(x, 0))
tanh = _activation("tanh", np.tanh)
sin = _activation("sin", np.sin, high=float(np.float32(np.pi)))
sigmoid = _activation("sigmoid", lambda x: 1 / (1 + np.exp(-x)))
gelu = _activation("gelu", lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2))))
gelu_apprx_tanh = _activation("gelu_apprx_tanh", lambda x: x / 2 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))))
gelu_apprx_sigmoid = _activation("gelu_apprx_sigmoid", lambda x: x / (1 + np.exp(-1.702 * x)))
