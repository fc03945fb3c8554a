"""Causal attention of prompts for compute capability 9.0: tensor cores run beside the softmax.

For 16-bit numbers and heads of 64 or 128. A program computes one head of 64 tokens for each of its warpgroups. One more
warp copies tiles of keys and values into a ring of shared memory. A warpgroup starts the product of scores of one tile
and the product with values of the tile before it, and computes the first one's softmax while the second one runs.

Round n = 0, 1, ... of a program handles the n-th tile from the end: its scores, and the values of tile n - 1. One stage
of the ring holds what a round needs: keys of tile n and values of tile n - 1. So a round waits for one barrier
(`ready`) and frees one (`free`); round 0 has keys only, the last round values only.

Bits of a token's result depend only on its own query, and on the entries that it sees: tiles begin at multiples of
BLOCK_KV, and every token visits them from the last one to the first with the same operations. A tile that a token does
not see changes none of its sums: it comes before all that it sees, its weights are zeros, and the sums that it leaves
are zeros. Weights are rounded to the caches' dtype.

Sources: FlashAttention-3 (Shah et al. 2024, algorithms 1 and 2: a producer warp, pipelining within a warpgroup, but
no turns of warpgroups); FlashAttention (Dao et al. 2022, algorithm 1); PTX ISA 8.x: wgmma, mbarrier,
cp.async.bulk.tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from granite4_neuron.devices.cuda.launch import MULTIPROCESSORS
from granite4_neuron.devices.cuda.products import has_descriptors
from granite4_neuron.devices.cuda.triton_utils import LOG2_E, GluonTensorDescriptor, gl, gluon, hopper, triton

# Gluon is an experiment of Triton's: 3.5 and 3.9 start warps by functions with other arguments, and 3.8 compiles the
# kernel to fewer waits.
TRITON_VERSIONS = ("3.6.", "3.7.")
_BLOCK_KV = 128  # entries of a tile; bits depend on it
_ROWS = gl.constexpr(64)  # tokens of a warpgroup, the rows of one wgmma
_barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)  # of Triton 3.6, 3.7


class _Sizes(NamedTuple):
    groups: int  # warpgroups that compute
    stages: int  # of the ring
    registers: int  # of a thread that computes


_SIZES = {128: _Sizes(2, 3, 240), 64: _Sizes(3, 4, 160)}  # by head_dim
# For heads of 64 if all programs run at once, one on a multiprocessor: each has less to do.
_SIZES_OF_FEW = _Sizes(2, 4, 240)


def suits(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float) -> bool:
    """Return whether these kernels compute attention of a query over caches: they are for one kind of GPU.

    Shapes are those of `ops.cached_attention`. Meta tensors count as tensors of such a GPU.
    """
    caches = key_cache, value_cache
    return (
        query.device.type in ("cuda", "meta")
        and (not query.is_cuda or torch.cuda.get_device_capability(query.device) == (9, 0))
        and triton.__version__.startswith(TRITON_VERSIONS)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] in _SIZES
        and scale > 0
        and all(each.is_contiguous() for each in caches)
        and has_descriptors(*caches)
    )


def launch_attend_prompt(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Compute `ops.cached_attention` of several tokens of each sequence, of inputs that `suits` takes."""
    query = query.contiguous()
    batch, tokens, num_heads, head_dim = query.shape
    kv_heads, max_length = key_cache.shape[1:3]
    output = torch.empty_like(query)
    groups, stages, registers = _sizes(head_dim, batch * num_heads, tokens)
    tile = [_BLOCK_KV, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)  # the same for both 16-bit types
    entries = [cache.view(-1, head_dim) for cache in (key_cache, value_cache)]
    tiles = [GluonTensorDescriptor.from_tensor(each, tile, layout) for each in entries]
    _attend_prompt_kernel[num_heads, batch, triton.cdiv(tokens, groups * _ROWS.value)](
        query,
        *tiles,
        positions,
        lengths,
        slots,
        output,
        scale * LOG2_E.value,
        tokens,
        positions.stride(0),
        max_length,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        GROUPS=groups,
        BLOCK_KV=_BLOCK_KV,
        STAGES=stages,
        REGISTERS=registers,
        num_warps=4,
    )
    return output


def _sizes(head_dim: int, num_heads: int, tokens: int) -> _Sizes:
    """Return the sizes for so many heads, all sequences' together."""
    programs = num_heads * triton.cdiv(tokens, _SIZES_OF_FEW.groups * _ROWS.value)
    return _SIZES_OF_FEW if head_dim == 64 and programs <= MULTIPROCESSORS else _SIZES[head_dim]


@gluon.jit(
    do_not_specialize=["tokens", "stride_positions", "max_length"],
    do_not_specialize_on_alignment=["positions", "lengths", "slots"],
)
def _attend_prompt_kernel(
    query,
    key_tiles,
    value_tiles,
    positions,
    lengths,
    slots,
    output,
    scale,
    tokens,
    stride_positions,
    max_length,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Attend with one head of 64 * GROUPS tokens of a sequence.

    Grid: (HEADS, batch, cdiv(tokens, 64 * GROUPS)). The last tokens, which see the most, come first.

    Args:
        query, output: [batch, tokens, HEADS, HEAD_DIM].
        key_tiles, value_tiles: tensor descriptors of the caches, [slots * KV_HEADS * max_length, HEAD_DIM].
        positions: [batch, tokens], integer, with its stride; consecutive.
        lengths, slots: [batch], integer; slots may be None.
        scale: multiplies scores, above zero; the softmax takes powers of two of them.
    """
    head, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    m_0 = (gl.num_programs(2) - 1 - gl.program_id(2)) * (GROUPS * _ROWS)
    slot = row + 1
    if slots is not None:
        slot = gl.load(slots + row).to(gl.int64)
    start = gl.load(positions + row * stride_positions).to(gl.int32)
    length = gl.load(lengths + row).to(gl.int32)
    # Entries of the cache that the sequence has written, and that this program sees.
    entries = start + length
    visible = gl.where(m_0 < length, gl.minimum(entries, start + m_0 + GROUPS * _ROWS), 0)
    first = ((slot * KV_HEADS + head // (HEADS // KV_HEADS)) * max_length).to(gl.int32)
    query += (row * tokens * HEADS + head) * HEAD_DIM
    output += (row * tokens * HEADS + head) * HEAD_DIM

    TILE: gl.constexpr = key_tiles.layout
    q = gl.allocate_shared_memory(query.dtype.element_ty, [GROUPS, _ROWS, HEAD_DIM], TILE)
    k = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES, BLOCK_KV, HEAD_DIM], TILE)
    v = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES, BLOCK_KV, HEAD_DIM], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(stage), 1)
        hopper.mbarrier.init(free.index(stage), GROUPS)
    hopper.fence_async_shared()
    ring = k, v, ready, free
    given = query, output, tokens, scale, start, visible, entries
    copies = ring, key_tiles, value_tiles, first, visible
    STRIDE: gl.constexpr = HEADS * HEAD_DIM
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (q.index(0), m_0, ring, given, STRIDE)),
                (_attend, (q.index(1), m_0 + _ROWS, ring, given, STRIDE)),
                (_copy_tiles, copies),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (q.index(0), m_0, ring, given, STRIDE)),
                (_attend, (q.index(1), m_0 + _ROWS, ring, given, STRIDE)),
                (_attend, (q.index(2), m_0 + 2 * _ROWS, ring, given, STRIDE)),
                (_copy_tiles, copies),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


@gluon.jit
def _copy_tiles(ring, key_tiles, value_tiles, first, visible):
    """Copy the tiles of the rounds into the ring, as its stages become free.

    Args:
        ring: keys and values, [stages, BLOCK_KV, HEAD_DIM] in shared memory, and two barriers of each stage,
            [stages, 1]: its tiles are there; all warpgroups have read them.
        key_tiles, value_tiles: tensor descriptors.
        first: the first entry of the sequence's head.
        visible: how many entries the program sees.
    """
    k, v, ready, free = ring
    STAGES: gl.constexpr = k.shape[0]
    BLOCK_KV: gl.constexpr = k.shape[1]
    BYTES: gl.constexpr = key_tiles.block_type.nbytes
    num_tiles = gl.cdiv(visible, BLOCK_KV)
    row = first + (num_tiles - 1) * BLOCK_KV
    if num_tiles > 0:
        hopper.mbarrier.expect(ready.index(0), BYTES)
        hopper.tma.async_copy_global_to_shared(key_tiles, [row, 0], ready.index(0), k.index(0))
        for n in range(1, num_tiles):
            stage = n % STAGES
            hopper.mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
            hopper.mbarrier.expect(ready.index(stage), 2 * BYTES)
            hopper.tma.async_copy_global_to_shared(key_tiles, [row - BLOCK_KV, 0], ready.index(stage), k.index(stage))
            hopper.tma.async_copy_global_to_shared(value_tiles, [row, 0], ready.index(stage), v.index(stage))
            row -= BLOCK_KV
        stage = num_tiles % STAGES
        hopper.mbarrier.wait(free.index(stage), ((num_tiles // STAGES) & 1) ^ 1)
        hopper.mbarrier.expect(ready.index(stage), BYTES)
        hopper.tma.async_copy_global_to_shared(value_tiles, [row, 0], ready.index(stage), v.index(stage))


@gluon.jit
def _attend(q, m_0, ring, given, STRIDE: gl.constexpr):
    """Attend with the 64 tokens of a warpgroup, from m_0 on.

    Args:
        q: [64, HEAD_DIM] in shared memory, for the queries and then for the results.
        ring: as above.
        given: query and output at the first token's head, with STRIDE between tokens; the number of tokens; the scale;
            the first token's position; how many entries the program sees, and how many the sequence has written. Later
            ones may hold anything, also NaN.
    """
    k, v, ready, _free = ring
    query, output, tokens, scale, start, visible, entries = given
    STAGES: gl.constexpr = k.shape[0]
    BLOCK_KV: gl.constexpr = k.shape[1]
    HEAD_DIM: gl.constexpr = k.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, COPY))
    offs = rows[:, None] * STRIDE + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, COPY))[None]
    mask = (rows < tokens - m_0)[:, None]
    query += m_0.to(gl.int64) * STRIDE
    output += m_0.to(gl.int64) * STRIDE
    q.store(gl.load(query + offs, mask, 0.0))
    hopper.fence_async_shared()

    num_tiles = gl.cdiv(visible, BLOCK_KV)
    ends = gl.minimum(start + 1 + m_0 + gl.arange(0, _ROWS, gl.SliceLayout(1, S_LAYOUT)), visible)
    num_masked = num_tiles - gl.minimum(start + 1 + m_0, visible) // BLOCK_KV  # tiles that not all tokens see whole
    m_i = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l_i = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([_ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
    if num_tiles > 0:
        hopper.mbarrier.wait(ready.index(0), 0)
        no_scores = gl.zeros([_ROWS, BLOCK_KV], gl.float32, S_LAYOUT)
        scores = hopper.warpgroup_mma(q, k.index(0).permute([1, 0]), no_scores, use_acc=False, is_async=True)
        scores = hopper.warpgroup_mma_wait(0, [scores])
        weights, _rescale, m_i, l_i = _weigh(_mask(scores, num_tiles - 1, ends), m_i, l_i, scale)
        pairs = _round_pairs(weights, v.dtype)
        hopper.mbarrier.wait(ready.index(1), 0)
        if num_tiles * BLOCK_KV > entries:
            _clear(v.index(1), entries - (num_tiles - 1) * BLOCK_KV, COPY)
        for n in range(1, num_masked):
            sums = acc, pairs, m_i, l_i
            acc, pairs, m_i, l_i = _do_round(n, q, ring, sums, scale, num_tiles - 1 - n, ends, S_LAYOUT, True)
        for n in range(gl.maximum(num_masked, 1), num_tiles):
            sums = acc, pairs, m_i, l_i
            acc, pairs, m_i, l_i = _do_round(n, q, ring, sums, scale, num_tiles - 1 - n, ends, S_LAYOUT, False)
        p = _unpack(pairs, v.dtype, O_LAYOUT)
        acc = hopper.warpgroup_mma(p, v.index(num_tiles % STAGES), acc, is_async=True)
        acc, p = hopper.warpgroup_mma_wait(0, [acc, p])
    # The total is above 1/2, except where nothing is visible.
    share = 1.0 / gl.where(l_i > 0.0, l_i, 1.0)
    q.store((acc * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]).to(q.dtype))
    gl.store(output + offs, q.load(COPY), mask)


@gluon.jit
def _do_round(
    n,
    q,
    ring,
    sums,
    scale,
    tile,
    ends,
    S_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Add the values of tile n - 1, and compute the weights of tile n. The round's stage is ready.

    Args:
        sums: acc, the sums of values; pairs, weights of tile n - 1, which acc does not include yet; m_i, the largest
            score, which all are relative to; l_i, sums of weights.
        tile: tile n's place in the cache.
        ends: how many entries each token sees; used if MASKED.
    """
    k, v, ready, free = ring
    acc, pairs, m_i, l_i = sums
    STAGES: gl.constexpr = k.shape[0]
    BLOCK_KV: gl.constexpr = k.shape[1]
    O_LAYOUT: gl.constexpr = acc.type.layout
    stage = n % STAGES
    p = _unpack(pairs, v.dtype, O_LAYOUT)
    no_scores = gl.zeros([_ROWS, BLOCK_KV], gl.float32, S_LAYOUT)
    scores = hopper.warpgroup_mma(q, k.index(stage).permute([1, 0]), no_scores, use_acc=False, is_async=True)
    acc = hopper.warpgroup_mma(p, v.index(stage), acc, is_async=True)
    # Only now: an arrival makes the warps wait for each other, which would delay the products.
    hopper.mbarrier.arrive(free.index((n - 1) % STAGES))
    scores = hopper.warpgroup_mma_wait(1, [scores])
    if MASKED:
        scores = _mask(scores, tile, ends)
    weights, rescale, m_i, l_i = _weigh(scores, m_i, l_i, scale)
    # For the next round. Here, because the assembler moves no instruction past the branch that this is: it would move
    # the softmax past the wait for the product with values.
    hopper.mbarrier.wait(ready.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1)
    # p too: its registers must not be written before the product has read them.
    acc, p = hopper.warpgroup_mma_wait(0, [acc, p])
    acc *= gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, _round_pairs(weights, v.dtype), m_i, l_i


@gluon.jit
def _weigh(scores, m_i, l_i, scale):
    """Return weights of scores, [64, BLOCK_KV], what earlier sums have to be multiplied by, and new m_i and l_i."""
    S_LAYOUT: gl.constexpr = scores.type.layout
    # Of a row's numbers in a thread the compiler makes one long chain; of halves it makes short ones.
    quarter = _larger_halves(_larger_halves(scores))
    largest = gl.convert_layout(gl.max(quarter, 1), gl.SliceLayout(1, S_LAYOUT))
    m_new = gl.maximum(m_i, largest * scale)
    origin = gl.where(m_new == float("-inf"), 0.0, m_new)  # a token may see nothing of the first tiles
    weights = _exp2(gl.fma(scores, scale, -origin[:, None]))
    rescale = _exp2(m_i - origin)
    return weights, rescale, m_new, gl.fma(l_i, rescale, gl.sum(weights, 1))


@gluon.jit
def _larger_halves(x):
    """Return the larger ones of the numbers in the halves of rows: [rows, columns] to [rows, columns // 2]."""
    left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    return gl.maximum(left, right)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _mask(scores, tile, ends):
    """Return scores with -inf for entries that a token does not see."""
    BLOCK_KV: gl.constexpr = scores.shape[1]
    columns = gl.arange(0, BLOCK_KV, gl.SliceLayout(0, scores.type.layout))
    # A thread's columns differ in all bits but these two, so that it compares one number with constants.
    limits = (ends - tile * BLOCK_KV)[:, None] - (columns & 6)[None]
    return gl.where((columns & ~6)[None] < limits, scores, float("-inf"))


@gluon.jit
def _round_pairs(weights, DTYPE: gl.constexpr):
    """Round weights, [64, BLOCK_KV], to pairs of 16 bits, [64, BLOCK_KV // 2] in int32. They stay where they are in the
    code: their registers are those of the weights before them, which a product has read by then.
    """
    low, high = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    if gl.float16 == DTYPE:
        pairs = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, False, 1)
    else:
        pairs = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, False, 1)
    return pairs


@gluon.jit
def _unpack(pairs, DTYPE: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Return pairs as the left operand of a product, [64, BLOCK_KV]. This takes no instruction: pairs go from round to
    round as they are only because the compiler would take apart a loop's 16-bit numbers.
    """
    low = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    weights = gl.reshape(gl.join(low, high), [pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, O_LAYOUT, 2))


@gluon.jit
def _clear(tile, written, COPY: gl.constexpr):
    """Set a tile's rows from `written` on, in shared memory, to zero. Warpgroups may do so at the same time."""
    ROWS: gl.constexpr = 32
    for i in gl.static_range(tile.shape[0] // ROWS):
        part = tile.slice(i * ROWS, ROWS)
        rows = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
        part.store(gl.where((rows < written)[:, None], part.load(COPY), 0.0))
    hopper.fence_async_shared()
    _barrier()
