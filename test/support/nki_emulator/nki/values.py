"""Dtypes, memories and refusals of the emulated NeuronCore, a v3 (Trainium2) or v4 (Trainium3)."""

from __future__ import annotations

import enum
import os

import ml_dtypes
import numpy as np

PARTITIONS = 128
PSUM_BANK_BYTES = 2048
PSUM_BANKS = 8
# What the hardware has, by the platform: 28 MiB, and 32 by AWS's "Trainium3 Architecture Guide for NKI" (2025-12-01),
# which says that PSUM is the same. The runtime and the compiler keep some for themselves, on a v4 as much as on a v3.
_SBUF_PARTITION_BYTES = {"trn2": 224 * 1024, "trn3": 256 * 1024}
_SBUF_KEPT_BYTES = 16 * 1024 + 264
MAX_SBUF_ELEMENTS = 64 * 1024
MAX_RANK = 5
MAX_FREE_DIMENSIONS = 3  # limit of an operand; a few instructions differ

FLOATS = ("float16", "float32", "bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (*FLOATS, *INTEGERS)}
INTEGER_SENTINEL = 4
# The bits of a float32 beyond the mantissa of a shorter float.
_EXTRA_BITS = {"bfloat16": 16, "float16": 13, "float8_e4m3": 20, "float8_e4m3fn": 20, "float8_e5m2": 21}


def platform() -> str:
    """Return the platform whose limits hold: trn2, unless NEURON_PLATFORM_TARGET_OVERRIDE names another one."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def sbuf_partition_bytes() -> int:
    """Return how many bytes of each SBUF partition a kernel can use."""
    return _SBUF_PARTITION_BYTES[platform()] - _SBUF_KEPT_BYTES


class NkiError(Exception):
    """A program that the NKI compiler or the hardware would refuse, or whose result they leave undefined."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise NkiError(message)


class Memory(enum.Enum):
    """The memory that a tensor lives in."""

    SBUF = "SBUF"
    PSUM = "PSUM"
    HBM = "private HBM"
    SHARED_HBM = "shared HBM"

    @property
    def is_on_chip(self) -> bool:
        return self in (Memory.SBUF, Memory.PSUM)


def cast(values: np.ndarray, dtype: str, random: np.random.Generator | None = None) -> np.ndarray:
    """Cast as an engine does: integers as they are, floats through float32.

    Floats become integers by rounding half to even, and both saturate. They become shorter floats by rounding to
    nearest or, with a generator, stochastically: up with the probability of the fraction that is cut off.
    """
    if dtype in FLOATS:
        values = np.asarray(values, np.float32)
        if random is not None and dtype != "float32":
            values = _dithered(values, _EXTRA_BITS[dtype], random)
        return values.astype(DTYPES[dtype])
    limits = np.iinfo(DTYPES[dtype])
    if not np.issubdtype(values.dtype, np.integer):
        values = np.rint(values, dtype=np.float64)
    return np.clip(values, limits.min, limits.max).astype(DTYPES[dtype])


def _dithered(values: np.ndarray, extra_bits: int, random: np.random.Generator) -> np.ndarray:
    """Add a random number below the mantissa that stays, and cut off the bits below that mantissa."""
    bits = values.view(np.uint32)
    noise = random.integers(0, 1 << extra_bits, values.shape, np.uint32)
    cut = np.uint32(0xFFFFFFFF << extra_bits & 0xFFFFFFFF)
    return np.where(np.isfinite(values), ((bits + noise) & cut).view(np.float32), values)
