"""Stochastic rounding of SSM states, with the bits of its definition, `ops.stochastic_rounding`."""

from __future__ import annotations

from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops.stochastic_rounding import COUNTERS, RUN, SHARED_ROWS, Rounding

FEWEST_COLUMNS = RUN  # of a block
_SHARED_ROWS, _RUN, _COUNTERS = tl.constexpr(SHARED_ROWS), tl.constexpr(RUN), tl.constexpr(COUNTERS)
_SEED, _ROUNDS = tl.constexpr(Rounding().seed), tl.constexpr(Rounding().rounds)


@triton.jit
def round_state(
    state, head, block, position, stream, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, dtype: tl.constexpr
):
    """Round a block of a head's state to a dtype, float16 or bfloat16.

    Args:
        state: [GROUPS, SHARED_ROWS, BLOCK_DSTATE] in float32, powers of two, of which the last is at least
            FEWEST_COLUMNS: groups of rows that have common random numbers.
        head: its number in the sequence's state. block: the number of its first row, divided by that of its rows.
        position: of the state's last token.
        stream: see `Rounding`.

    Returns:
        like state, in dtype.
    """
    bits = _random_bits(head, block, position, stream, HEAD_DIM, D_STATE, state.shape[0], state.shape[2])
    words = state.to(tl.int32, bitcast=True)
    if dtype == tl.bfloat16:
        # The sum of a NaN whose bits are all ones, which a GPU makes, wraps to a negative number.
        rounded = tl.maximum(words + bits, words) >> 16
        return rounded.to(tl.int16).to(dtype, bitcast=True)
    bits = bits >> 3
    size = tl.abs(state)
    normal = ((words + bits) & 0x7FFFE000).to(tl.float32, bitcast=True)
    # Below the smallest normal number the spacing is 2**-24. Adding 2**23 rounds to a whole number.
    parts = (size * 2.0**37 + 2.0**23) - 2.0**23
    small = ((parts.to(tl.int32) + bits) >> 13).to(tl.float32) * 2.0**-24
    rounded = tl.minimum(tl.where(size < 2.0**-14, small, normal), 65504.0)
    rounded = tl.where(state < 0, -rounded, rounded)
    return tl.where((words & 0x7F800000) != 0x7F800000, rounded, state).to(dtype)


@triton.jit
def _random_bits(
    head,
    block,
    position,
    stream,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    """Return 16 random bits for each value of a block, [GROUPS, SHARED_ROWS, BLOCK_DSTATE] in int32."""
    BLOCK_RUNS: tl.constexpr = BLOCK_DSTATE // _RUN
    RUNS: tl.constexpr = (D_STATE + _RUN - 1) // _RUN
    HEAD_GROUPS: tl.constexpr = (HEAD_DIM + _SHARED_ROWS - 1) // _SHARED_ROWS
    group = head * HEAD_GROUPS + block * GROUPS + tl.arange(0, GROUPS)[:, None, None]
    counters = (group * RUNS + tl.arange(0, BLOCK_RUNS)[None, :, None]) * _COUNTERS + tl.arange(0, _COUNTERS)
    none = tl.zeros_like(counters).to(tl.uint32)
    places = none + position.to(tl.uint32), none + stream.to(tl.uint32)
    a, b, c, d = tl.philox_impl(counters.to(tl.uint32), *places, none, none + _SEED, none, _ROUNDS)
    # The first 32 columns of a run have words a and b of its counters in turns, the others c and d. Of every 32 columns
    # the first 16 have the words' low halves. Threads exchange words, which are fewer than values.
    words = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), [0, 1, 3, 2, 4])
    words = tl.reshape(words, [GROUPS, 2 * BLOCK_RUNS, 1, 2 * _COUNTERS])
    halves = (words >> (16 * tl.arange(0, 2).to(tl.uint32))[None, None, :, None]) & 0xFFFF
    bits = tl.reshape(halves, [GROUPS, 1, BLOCK_DSTATE])
    # From one row of a group to the next a quarter of the range is added; for two of them it is the highest bit.
    row = tl.arange(0, _SHARED_ROWS).to(tl.uint32)[None, :, None]
    bits = tl.where((row & 1) == 0, bits, (bits + 0x4000) & 0xFFFF) ^ ((row & 2) << 14)
    return bits.to(tl.int32)
