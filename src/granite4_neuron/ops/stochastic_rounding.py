"""Rounding to a 16-bit dtype up or down by chance, so that the mean of many roundings is the value itself.

Suppose a state is rounded after every token. Rounding to nearest loses every change below half the spacing of the
dtype's values, so a head that forgets slowly drifts away. Under stochastic rounding the changes add up.

Random numbers are a function of a seed and of the values' places. There is no generator, because its state would depend
on other sequences. They are Philox-4x32's, whose counter is made of the element's place in the state of its sequence,
of the position of the state's last token, and of a stream, which is a layer's number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

COUNTERS = 8  # counters per run of a row's values: each gives 128 bits, and a value takes 16
RUN = 64
SHARED_ROWS = 4  # rows with common random numbers, shifted by a quarter of the range from one to the next
_WORD = 0xFFFFFFFF
# Multipliers and key increments of Salmon et al. 2011.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)


class Rounding(NamedTuple):
    """The source of the random numbers of a state's rounding.

    seed: 64 bits, Philox's key.
    stream: 32 bits; states that must not be rounded alike have different streams. In graphs that layers share it is a
        tensor without axes.
    rounds: of Philox. 7 are the fewest that pass all tests of BigCrush (Salmon et al. 2011, table 2).
    """

    seed: int = 0
    stream: int | torch.Tensor = 0
    rounds: int = 7


def philox_4x32(counter: torch.Tensor, key: int, rounds: int) -> torch.Tensor:
    """Return random words of counters: [..., 4] to [..., 4], both int64 tensors of 32-bit words.

    Args:
        key: 64 bits.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.
    """
    a, b, c, d = counter.unbind(-1)
    low, high = key & _WORD, key >> 32 & _WORD
    for _ in range(rounds):
        # A product takes 64 bits and wraps to a negative number; its halves are right all the same.
        a_product, c_product = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (c_product >> 32 & _WORD) ^ b ^ low, c_product & _WORD
        c, d = (a_product >> 32 & _WORD) ^ d ^ high, a_product & _WORD
        low, high = low + INCREMENTS[0] & _WORD, high + INCREMENTS[1] & _WORD
    return torch.stack([a, b, c, d], -1)


def stochastic_round(
    values: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """Round `values` to one of the two closest numbers of `dtype`. The probability of the upper one is the value's
    distance from the lower one, divided by the distance between both.

    It is exact for the bits that float32 has beyond `dtype`: 13 for float16, 16 for bfloat16. Finite values beyond
    float16's largest become the largest; infinities and NaN stay.

    Args:
        values: [batch, ..., head_dim, d_state], float32; states of different sequences.
        dtype: float16 or bfloat16.
        positions: [batch], int64; the position of each state's last token.

    Returns:
        like values, in `dtype`.
    """
    dropped = 13 if dtype == torch.float16 else 16
    largest = torch.finfo(dtype).max if dtype == torch.float16 else math.inf
    binade = (values.view(torch.int32) & 0x7F800000).view(torch.float32)
    spacing = binade.clamp(torch.finfo(dtype).smallest_normal, 2.0**127) * 2.0 ** (dropped - 23)
    parts = torch.round(values.nan_to_num(0, 0, 0).abs() / spacing * 2**dropped).long()
    units = parts + (_random_bits(values.shape, positions, rounding) >> 16 - dropped) >> dropped
    rounded = (units.float() * spacing).clamp(max=largest).copysign(values)
    return rounded.where(values.isfinite(), values).to(dtype)


def _random_bits(shape: torch.Size, positions: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return 16 random bits for each value [batch, ..., head_dim, d_state], int64."""
    batch, (head_dim, columns) = shape[0], shape[-2:]
    heads, groups, runs = shape[1:-2].numel(), -(-head_dim // SHARED_ROWS), -(-columns // RUN)
    elements = torch.arange(heads * groups * runs * COUNTERS, device=positions.device).expand(batch, -1)
    stream = torch.zeros_like(elements) + rounding.stream
    counter = torch.stack([elements, positions[:, None].expand_as(elements), stream, torch.zeros_like(elements)], -1)
    words = philox_4x32(counter, rounding.seed, rounding.rounds)
    # A vector of 16 words has two words of each counter. First their low halves are used, then the high ones.
    words = words.view(batch, heads * groups, runs, COUNTERS, 2, 2).transpose(3, 4).flatten(-2)[..., None, :]
    bits = torch.cat([words & 0xFFFF, words >> 16], -2).reshape(batch, heads, groups, 1, runs * RUN)
    quarters = torch.arange(SHARED_ROWS, device=positions.device)[:, None] * (2**16 // SHARED_ROWS)
    bits = (bits + quarters & 0xFFFF).flatten(2, 3)
    return bits[:, :, :head_dim, :columns].reshape(shape)
