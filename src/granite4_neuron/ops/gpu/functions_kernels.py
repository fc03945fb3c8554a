"""Triton kernels of a token of each sequence, where a compiler makes several loops, or reads or copies too much.

Each function has the arguments and results of the operator of its name in `ops.gpu.functions`, on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from granite4_neuron.ops.gpu.token_programs import WARPS_OF_SMALL_PARTS, launch_options, let_next_begin, wait

# Of the cache of keys and values: entries that a program reads together. Where there would be more programs or parts
# than these, a program reads several such blocks, one after another.
_BLOCK_OF_CACHE = 16
_MOST_PROGRAMS = 2048
_MOST_PARTS = 128
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_NAN_BITS = tl.constexpr(0x7FC00000)
_NO_KEY = tl.constexpr(torch.iinfo(torch.int64).min)


def convolve_token(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor
) -> torch.Tensor:
    batch, _, channels = x.shape
    y = x.new_empty(x.shape, dtype=torch.float32)
    width, block = weight.shape[1], 128
    grid = batch, triton.cdiv(channels, block)
    taps = triton.next_power_of_2(width)
    _convolve_token[grid](x, x.stride(0), conv_state, weight, bias, lengths, y, channels, width, block, taps)
    return y


@triton.jit
def _convolve_token(
    x,
    x_stride,
    conv_state,
    weight,
    bias,
    lengths,
    y,
    channels,
    width: tl.constexpr,
    block: tl.constexpr,
    taps: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    is_channel = channel < channels
    conv_state += row * channels * (width - 1)
    window, shifted, weights, offset = load_convolution(conv_state, weight, bias, channel, is_channel, width, taps)
    is_real = tl.load(lengths + row) > 0
    new = tl.load(x + row * x_stride + channel, is_channel)
    tl.store(y + row * channels + channel, convolve_channels(new, window, weights, offset, width, taps), is_channel)
    shift_window(conv_state, new, shifted, channel, is_channel & is_real, width, taps)


@triton.jit
def load_convolution(conv_state, weight, bias, channel, is_channel, width: tl.constexpr, taps: tl.constexpr):
    """Return some channels' windows, these shifted, weights, each [block, taps], and biases, [block] in float32."""
    tap = tl.arange(0, taps)[None]
    window = conv_state + channel[:, None] * (width - 1) + tap
    before = tl.load(window, is_channel[:, None] & (tap < width - 1))
    shifted = tl.load(window + 1, is_channel[:, None] & (tap < width - 2))
    weights = tl.load(weight + channel[:, None] * width + tap, is_channel[:, None] & (tap < width), 0.0)
    offset = tl.zeros_like(channel).to(tl.float32)
    if bias is not None:
        offset = tl.load(bias + channel, is_channel, 0.0).to(tl.float32)
    return before, shifted, weights, offset


@triton.jit
def convolve_channels(new, window, weights, offset, width: tl.constexpr, taps: tl.constexpr):
    """Return the convolution's outputs, [block] in float32, of new inputs [block] after windows."""
    tap = tl.arange(0, taps)[None]
    window = tl.where(tap < width - 1, window, new[:, None]).to(tl.float32)
    total = tl.sum(tl.where(tap < width, window * weights.to(tl.float32), 0.0), 1) + offset
    return total * tl.sigmoid(total)


@triton.jit
def shift_window(conv_state, new, shifted, channel, is_here, width: tl.constexpr, taps: tl.constexpr):
    """Write shifted windows with new inputs at their ends."""
    tap = tl.arange(0, taps)[None]
    # One thread's input is another one's place.
    tl.debug_barrier()
    values = tl.where(tap < width - 2, shifted, new[:, None])
    tl.store(conv_state + channel[:, None] * (width - 1) + tap, values, is_here[:, None] & (tap < width - 1))


def advance_token(
    x: torch.Tensor,
    dt: torch.Tensor,
    log_decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
) -> torch.Tensor:
    batch, num_heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block = min(16, triton.next_power_of_2(head_dim))
    columns = triton.next_power_of_2(B.shape[2])
    grid = batch, num_heads, triton.cdiv(head_dim, block)
    strides = x.stride(0), B.stride(0), C.stride(0)
    sizes = num_heads, num_heads // B.shape[1], head_dim, B.shape[2]
    _advance_token[grid](x, dt, log_decay, B, C, D, ssm_state, y, *strides, *sizes, block, columns)
    return y


@triton.jit
def _advance_token(
    x,
    dt,
    log_decay,
    B,
    C,
    D,
    ssm_state,
    y,
    x_stride,
    B_stride,
    C_stride,
    num_heads,
    heads_per_group,
    head_dim: tl.constexpr,
    d_state: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(2) * block + tl.arange(0, block)
    n = tl.arange(0, columns)
    is_channel, is_state = channel < head_dim, n < d_state
    of_group = (head // heads_per_group) * d_state + n
    b = tl.load(B + row * B_stride + of_group, is_state, other=0.0).to(tl.float32)
    c = tl.load(C + row * C_stride + of_group, is_state, other=0.0).to(tl.float32)
    inputs = tl.load(x + row * x_stride + head * head_dim + channel, is_channel, other=0.0).to(tl.float32)
    of_head = row * num_heads + head
    decay = tl.exp(tl.load(log_decay + of_head))
    added = tl.load(dt + of_head) * inputs

    at = (of_head * head_dim + channel)[:, None] * d_state + n[None]
    is_here = is_channel[:, None] & is_state[None]
    state = tl.load(ssm_state + at, is_here, other=0.0) * decay + added[:, None] * b[None]
    tl.store(ssm_state + at, state, is_here)
    outputs = tl.sum(state * c[None], 1) + inputs * tl.load(D + head).to(tl.float32)
    tl.store(y + of_head * head_dim + channel, outputs, is_channel)


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, is_gated: bool) -> torch.Tensor:
    choices = len(x) if ids is None else len(ids)
    columns = weight.shape[-1]
    rows = weight.shape[-2] // (1 + is_gated)
    y = x.new_empty(choices, rows)
    block, width, warps = _shape_of_program(columns)
    # Neighbouring programs read the same rows of weights, so that choices of one expert find them in the cache.
    grid = choices, triton.cdiv(rows, block)
    sizes = choices // len(x), rows, columns, is_gated, block, width
    _multiply_rows[grid](x, weight, ids, y, *sizes, num_warps=warps)
    return y


def _shape_of_program(columns: int) -> tuple[int, int, int]:
    """Return a program's rows, the columns that it reads at a time, and its warps; these were fastest on an H200."""
    if columns <= 512:
        return 4, min(256, triton.next_power_of_2(columns)), 1
    return (1, 1024, 1) if columns < 2048 else (2, 1024, 4)


@triton.jit
def _multiply_rows(
    x,
    weight,
    ids,
    y,
    choices_per_token,
    rows: tl.constexpr,
    columns: tl.constexpr,
    is_gated: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    choice = tl.program_id(0)
    row = tl.program_id(1) * block + tl.arange(0, block)
    x += (choice // choices_per_token) * columns
    if ids is not None:
        weight += tl.load(ids + choice).to(tl.int64) * ((2 if is_gated else 1) * rows * columns)
    sums = tl.zeros([block, width], tl.float32)
    if is_gated:
        ups = tl.zeros([block, width], tl.float32)
    for start in tl.static_range(0, columns, width):
        column = start + tl.arange(0, width)
        values = tl.load(x + column, column < columns, other=0.0).to(tl.float32)[None]
        at = weight + row[:, None] * columns + column[None]
        is_here = (row < rows)[:, None] & (column < columns)[None]
        sums += tl.load(at, is_here, other=0.0).to(tl.float32) * values
        if is_gated:
            ups += tl.load(at + rows * columns, is_here, other=0.0).to(tl.float32) * values
    total = tl.sum(sums, 1)
    if is_gated:
        total = total * tl.sigmoid(total) * tl.sum(ups, 1)
    tl.store(y + choice * rows + row, total.to(y.dtype.element_ty), row < rows)


def choose_experts(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = router_logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=router_logits.device)
    ids = torch.empty(weights.shape, dtype=torch.int32, device=weights.device)
    sizes = experts, top_k, triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
    _choose_experts[tokens,](router_logits, weights, ids, *sizes, num_warps=1)
    return weights, ids


@triton.jit
def _choose_experts(
    router_logits,
    weights,
    ids,
    experts,
    top_k: tl.constexpr,
    width: tl.constexpr,
    choices: tl.constexpr,
):
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, choices)
    keys = load_choice_keys(router_logits + token * experts, experts, width, "")
    chosen, shares = largest_keys(keys, top_k, choices)
    tl.store(weights + token * top_k + choice, shares, choice < top_k)
    tl.store(ids + token * top_k + choice, chosen, choice < top_k)


@triton.jit
def load_choice_keys(router_logits, experts, width: tl.constexpr, cache_modifier: tl.constexpr):
    """Load a token's router logits as whole numbers in their order, [width] in int64, that hold the experts too.

    So one maximum gives both. Of equal logits the first expert's number is the largest; NaN is above all.
    """
    expert = tl.arange(0, width)
    logits = tl.load(router_logits + expert, expert < experts, -float("inf"), cache_modifier=cache_modifier)
    return choice_keys(logits, expert, width)


@triton.jit
def choice_keys(logits, expert, width: tl.constexpr):
    """Return logits of experts, of up to `width`, as `load_choice_keys` has them."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # 0.0 and -0.0 are equal
    bits = tl.where(logits != logits, _NAN_BITS, bits)  # whatever its sign
    return (_in_order(bits).to(tl.int64) << 32) | (width - 1 - expert)


@triton.jit
def _in_order(bits):
    """Map the bits of floats to whole numbers in their order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def without_largest(keys, largest):
    return tl.where(keys == largest, _NO_KEY, keys)


@triton.jit
def expert_of(key, width: tl.constexpr):
    return width - 1 - (key & (width - 1)).to(tl.int32)


@triton.jit
def largest_keys(keys, top_k: tl.constexpr, choices: tl.constexpr):
    """Return the experts of the top_k largest keys, [choices], and the softmax of their logits."""
    choice = tl.arange(0, choices)
    ids, logits = tl.zeros([choices], tl.int32), tl.full([choices], -float("inf"), tl.float32)
    for number in tl.static_range(top_k):
        largest = tl.max(keys, 0)
        keys = without_largest(keys, largest)
        logit = _in_order((largest >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        ids = tl.where(choice == number, expert_of(largest, keys.shape[0]), ids)
        logits = tl.where(choice == number, logit, logits)
    shares = tl.exp(logits - tl.max(logits, 0))
    return ids, shares / tl.sum(shares, 0)


def attend_token(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    kv_length: int,
) -> torch.Tensor:
    query = query.contiguous()
    batch, _, num_heads, head_dim = query.shape
    kv_heads, max_length = key_cache.shape[1:3]
    heads = num_heads // kv_heads
    most_parts = max(1, min(_MOST_PARTS, _MOST_PROGRAMS // (batch * kv_heads)))
    part = max(_BLOCK_OF_CACHE, triton.next_power_of_2(triton.cdiv(kv_length, most_parts)))
    parts, width = triton.cdiv(kv_length, part), triton.next_power_of_2(head_dim)
    # For each part the weighted sum of values, the sum of weights, and the score that they are relative to.
    partial = query.new_empty(batch, num_heads, parts, head_dim + 2, dtype=torch.float32)
    output = torch.empty_like(query)
    sizes = max_length, heads, triton.next_power_of_2(heads), head_dim, width, part, _BLOCK_OF_CACHE
    _attend_to_part[kv_heads, batch, parts](
        query, key_cache, value_cache, positions, lengths, partial, scale, *sizes, **launch_options(query, 1)
    )
    options = launch_options(query, WARPS_OF_SMALL_PARTS)
    _join_parts[num_heads, batch](partial, output, parts, head_dim, triton.next_power_of_2(parts), width, **options)
    return output


@triton.jit
def _attend_to_part(
    query,
    key_cache,
    value_cache,
    positions,
    lengths,
    partial,
    scale,
    max_length,
    heads: tl.constexpr,
    padded_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    part: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Attend with the heads that have one key and value."""
    let_next_begin(overlaps)
    wait(overlaps)
    row = tl.program_id(1).to(tl.int64)
    kv_head = row * tl.num_programs(0) + tl.program_id(0)
    head, d = tl.arange(0, padded_heads), tl.arange(0, width)
    is_head, is_d = head < heads, d < head_dim
    at_head = kv_head * heads + head
    is_here = is_head[:, None] & is_d[None]
    queries = tl.load(query + at_head[:, None] * head_dim + d[None], is_here, other=0.0).to(tl.float32) * scale
    visible = tl.where(tl.load(lengths + row) > 0, tl.load(positions + row) + 1, 0)
    start = tl.program_id(2) * part
    entries = tl.minimum(part, visible - start)
    # In 64 bits; from here on 32 suffice. The first sequence's part is behind an unused one.
    cache = ((tl.num_programs(0) + kv_head) * max_length + start) * head_dim

    top, total = tl.full([padded_heads], _LOWEST, tl.float32), tl.zeros([padded_heads], tl.float32)
    weighted = tl.zeros([padded_heads, width], tl.float32)
    for first in range(0, entries, block):
        entry = first + tl.arange(0, block)[None]
        is_visible = entry < entries
        at = cache + entry[:, :, None] * head_dim + d[None, None]
        is_entry = is_visible[:, :, None] & is_d[None, None]
        keys = tl.load(key_cache + at, is_entry, other=0.0)
        values = tl.load(value_cache + at, is_entry, other=0.0)  # while the keys are on their way
        scores = tl.where(is_visible, tl.sum(keys.to(tl.float32) * queries[:, None], 2), _LOWEST)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        rescale = tl.exp(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        weighted = weighted * rescale[:, None] + tl.sum(weights[:, :, None] * values.to(tl.float32), 1)
        top = new_top
    partial += (at_head * tl.num_programs(2) + tl.program_id(2)) * (head_dim + 2)
    tl.store(partial[:, None] + d[None], weighted, is_here)
    tl.store(partial + head_dim, total, is_head)
    tl.store(partial + head_dim + 1, top, is_head)


@triton.jit
def _join_parts(
    partial,
    output,
    parts,
    head_dim: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    wait(overlaps)
    at_head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    part, d = tl.arange(0, block), tl.arange(0, width)
    is_part, is_d = part < parts, d < head_dim
    at = partial + (at_head * parts + part) * (head_dim + 2)
    tops = tl.load(at + head_dim + 1, is_part, other=_LOWEST)
    weights = tl.exp(tops - tl.max(tops, 0))
    total = tl.sum(tl.load(at + head_dim, is_part, other=0.0) * weights, 0)
    sums = tl.load(at[:, None] + d[None], is_part[:, None] & is_d[None], other=0.0) * weights[:, None]
    # The weight of the largest score is 1, so that the total is less where nothing is visible only.
    joined = tl.sum(sums, 0) / tl.where(total < 1.0, 1.0, total)
    tl.store(output + at_head * head_dim + d, joined.to(output.dtype.element_ty), is_d)
