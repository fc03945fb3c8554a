"""The numbers of `ops.sampling`, bit by bit, in Triton. No product may be fused with a sum."""

from __future__ import annotations

from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops import sampling

_SHIFT = tl.constexpr(sampling.WEIGHT_BITS - 30)
_FOLDED_LOG2, _LOG2, _EXP2 = map(tl.constexpr, (sampling.FOLDED_LOG2, sampling.LOG2, sampling.EXP2))


@triton.jit
def word(halves):
    """Load a word of 32 bits from its halves."""
    return tl.load(halves).to(tl.uint32) | (tl.load(halves + 1).to(tl.uint32) << 16)


@triton.jit
def exponentials(words):
    """Compute `ops.sampling.exponentials` of random words."""
    is_high = words >= 0x80000000
    folded = tl.where(is_high, words ^ 0xFFFFFFFF, words).to(tl.float32) + 0.5
    exponents, mantissas = _parts(folded)
    y = tl.where(is_high, folded * 2.0**-31, 2 - mantissas)
    return tl.where(is_high, 0, 31 - exponents).to(tl.float32) + y * _polynomial(y, _FOLDED_LOG2, 7)


@triton.jit
def log2(values):
    exponents, mantissas = _parts(values)
    fractions = mantissas - 1
    return exponents.to(tl.float32) + fractions * _polynomial(fractions, _LOG2, 8)


@triton.jit
def _parts(values):
    bits = values.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127, ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    result = tl.zeros_like(x) + COEFFICIENTS[COUNT - 1]
    for number in tl.static_range(2, COUNT + 1):
        result = result * x + COEFFICIENTS[COUNT - number]
    return result


@triton.jit
def weights_of(logs):
    exponents = tl.minimum(-logs, 63.0)
    whole = exponents.to(tl.int32)
    fractions = (_polynomial(exponents - whole.to(tl.float32), _EXP2, 6) * 2.0**30).to(tl.int32)
    return (fractions.to(tl.int64) << _SHIFT) >> whole.to(tl.int64)


@triton.jit
def keys_of(scores):
    """Return whole numbers from 0 to 2**32 in the order of scores, in int64; both zeros have the same."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2**31)


@triton.jit
def comes_before(scores, places, end_score, end):
    """Return which tokens have a higher score than the end, or the same one and a lower number."""
    return (scores > end_score) | ((scores == end_score) & (places < end))
