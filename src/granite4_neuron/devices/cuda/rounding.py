"""Stochastic rounding of SSM states, with the bits of its definition, `ops.stochastic_rounding`."""

from __future__ import annotations

from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops.stochastic_rounding import COUNTERS, RUN, SHARED_ROWS, Rounding

FEWEST_ROWS, FEWEST_COLUMNS = SHARED_ROWS, RUN  # of a block
_SHARED_ROWS, _RUN, _COUNTERS = tl.constexpr(SHARED_ROWS), tl.constexpr(RUN), tl.constexpr(COUNTERS)
_SEED, _ROUNDS = tl.constexpr(Rounding().seed), tl.constexpr(Rounding().rounds)


@triton.jit
def round_state(
    state, head, block, position, stream, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, dtype: tl.constexpr
):
    """Round a block of a head's state to the numbers of a dtype, float16 or bfloat16.

    Args:
        state: [BLOCK_D, BLOCK_DSTATE] in float32, powers of two, at least FEWEST_ROWS and FEWEST_COLUMNS.
        head: its number in the sequence's state. block: the number of its first row, divided by BLOCK_D.
        position: of the state's last token.
        stream: see `Rounding`.

    Returns:
        like state, in float32.
    """
    bits = _random_bits(head, block, position, stream, HEAD_DIM, D_STATE, state.shape[0], state.shape[1])
    words = state.to(tl.uint32, bitcast=True)
    if dtype == tl.bfloat16:
        rounded = ((words + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        bits = bits >> 3
        size = tl.abs(state)
        normal = ((words + bits) & 0xFFFFE000).to(tl.float32, bitcast=True)
        # Below the smallest normal number the spacing is 2**-24. Adding 2**23 rounds to a whole number.
        parts = (size * 2.0**37 + 2.0**23) - 2.0**23
        small = ((parts.to(tl.uint32) + bits) >> 13).to(tl.float32) * 2.0**-24
        rounded = tl.minimum(tl.where(size < 2.0**-14, small, tl.abs(normal)), 65504.0)
        rounded = tl.where(state < 0, -rounded, rounded)
    return tl.where((words & 0x7F800000) != 0x7F800000, rounded, state)


@triton.jit
def _random_bits(
    head,
    block,
    position,
    stream,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    """Return 16 random bits for each value of a block, [BLOCK_D, BLOCK_DSTATE] in uint32."""
    GROUPS: tl.constexpr = BLOCK_D // _SHARED_ROWS
    BLOCK_RUNS: tl.constexpr = BLOCK_DSTATE // _RUN
    RUNS: tl.constexpr = (D_STATE + _RUN - 1) // _RUN
    HEAD_GROUPS: tl.constexpr = (HEAD_DIM + _SHARED_ROWS - 1) // _SHARED_ROWS
    group = head * HEAD_GROUPS + block * GROUPS + tl.arange(0, GROUPS)[:, None, None]
    counters = (group * RUNS + tl.arange(0, BLOCK_RUNS)[None, :, None]) * _COUNTERS + tl.arange(0, _COUNTERS)
    none = tl.zeros_like(counters).to(tl.uint32)
    places = none + position.to(tl.uint32), none + stream.to(tl.uint32)
    a, b, c, d = tl.philox_impl(counters.to(tl.uint32), *places, none, none + _SEED, none, _ROUNDS)
    # The first 32 columns of a run have words a and b of its counters in turns, the others c and d. Of every 32 columns
    # the first 16 have the words' low halves.
    first = tl.reshape(tl.join(a, b), [GROUPS, BLOCK_RUNS, 2 * _COUNTERS])
    second = tl.reshape(tl.join(c, d), [GROUPS, BLOCK_RUNS, 2 * _COUNTERS])
    words = tl.join(first, second)
    halves = tl.permute(tl.join(words & 0xFFFF, words >> 16), [0, 1, 3, 4, 2])
    bits = tl.reshape(halves, [GROUPS, 1, BLOCK_DSTATE])
    quarters = tl.arange(0, _SHARED_ROWS).to(tl.uint32)[None, :, None] * (65536 // _SHARED_ROWS)
    return tl.reshape((bits + quarters) & 0xFFFF, [BLOCK_D, BLOCK_DSTATE])
