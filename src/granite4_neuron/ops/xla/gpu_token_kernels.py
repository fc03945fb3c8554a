"""Triton kernels of one token of one sequence: products with what precedes and follows them.

Each function has the arguments and results of the operator of its name in `ops.xla.gpu_token`, on a GPU.

A program has some rows of a matrix, whole; of a large matrix one tile of rows after another, so that it reads the
vector once for all of them. Where a GPU can, a kernel begins while the one before it still runs, as soon as all of its
programs are past `_wait`. Before its own `_wait` a program reads weights, and state that no other kernel of the step
writes; it writes nothing. What the last kernel but one wrote is there too.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from granite4_neuron.ops.xla.gpu_kernels import convolve_channels, load_convolution, shift_window

# A tile has 4 rows of up to so many numbers, of one matrix or of each of two, or 2 longer ones. These numbers, and
# those of warps and tiles, were fastest on an H200.
_WIDEST_OF_FOUR = {1: 4096, 2: 1024}
_MOST_TILES = 8
_MOST_WARPS = 8
_WARPS_AT_ONCE = 2048
# A program's rows of a head's state.
_CHANNELS = 16
# Warps of programs that have one row of the router or a part of a head's state.
_WARPS_OF_SMALL_PARTS = 4


def _shape_of_program(rows: int, width: int, matrices: int = 1) -> tuple[int, int, int]:
    """Return how many rows of each matrix a tile has, how many tiles a program, and its warps.

    Args:
        rows: of all programs.
        width: of a row, a power of two.
        matrices: that a program reads rows of.
    """
    block = 4 if width <= _WIDEST_OF_FOUR[matrices] else 2
    warps = min(_MOST_WARPS, max(2, width // 1024))
    # A power of two, so that there are not many kernels, and about as many programs as run at once.
    tiles = 2 ** round(math.log2(max(1.0, rows * warps / (block * _WARPS_AT_ONCE))))
    return block, min(tiles, _MOST_TILES // matrices), warps


def _launch_options(x: torch.Tensor, warps: int) -> dict[str, bool | int]:
    """Return how a kernel is launched; `overlaps`: whether it begins before the one before it has ended."""
    overlaps = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"overlaps": overlaps, "launch_pdl": overlaps, "num_warps": warps}


@triton.jit
def _wait(overlaps: tl.constexpr):
    """Wait for the kernels before this one to end; the one after it may begin when all programs have come here."""
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _load_rows(weight, row, rows, column, columns):
    """Load some rows of a matrix, whole, [block, width]."""
    is_here = (row < rows)[:, None] & (column < columns)[None]
    return tl.load(weight + row[:, None] * columns + column[None], is_here, 0.0)


@triton.jit
def _load_row(x, column, columns):
    """Load a vector, [1, width]."""
    return tl.load(x + column[None], (column < columns)[None], 0.0)


@triton.jit
def _normed(x, weights, eps, columns):
    """Compute `ops.rms_norm` of x with weights, both [1, width], rounded to the weights' dtype, in float32."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)
    return (x * scale[:, None] * weights.to(tl.float32)).to(weights.dtype).to(tl.float32)


@triton.jit
def _multiply(tile, values):
    """Multiply rows [block, width] with values [1, width] in float32: [block] in float32."""
    return tl.sum(tile.to(tl.float32) * values, 1)


@triton.jit
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    """Compute `ops.silu_and_mul`, rounded to a dtype wherever that is."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)


def mixer_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    lengths: torch.Tensor,
    *,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    (rows, columns), (channels, taps) = weight.shape, conv_weight.shape
    y = x.new_empty(1, rows)
    width = triton.next_power_of_2(columns)
    block, tiles, warps = _shape_of_program(rows, width)
    # An element for each thread, or each would do the work of all.
    padded_taps = max(triton.next_power_of_2(taps), 32 * warps // block)
    sizes = rows, columns, rows - channels - num_heads, channels, taps, padded_taps, block, tiles, width
    _mixer_inputs[triton.cdiv(rows, block * tiles),](
        x,
        norm_weight,
        weight,
        conv_weight,
        conv_bias,
        conv_state,
        lengths,
        y,
        eps,
        *sizes,
        **_launch_options(x, warps),
    )
    return y


@triton.jit
def _mixer_inputs(
    x,
    norm_weight,
    weight,
    conv_weight,
    conv_bias,
    conv_state,
    lengths,
    y,
    eps,
    rows: tl.constexpr,
    columns: tl.constexpr,
    first_channel: tl.constexpr,
    channels: tl.constexpr,
    taps: tl.constexpr,
    padded_taps: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0) * (block * tiles) + tl.arange(0, block)
    column = tl.arange(0, width)
    tile = _load_rows(weight, row, rows, column, columns)
    norm_weights = _load_row(norm_weight, column, columns)
    is_real = tl.load(lengths) > 0
    for number in tl.static_range(tiles):
        channel = row - first_channel
        is_channel = (channel >= 0) & (channel < channels)
        window, shifted, weights, offset = load_convolution(
            conv_state, conv_weight, conv_bias, channel, is_channel, taps, padded_taps
        )
        if number == 0:
            _wait(overlaps)
            values = _normed(_load_row(x, column, columns), norm_weights, eps, columns)
        following = tile
        if number + 1 < tiles:
            following = _load_rows(weight, row + block, rows, column, columns)  # while this one is multiplied
        projected = _multiply(tile, values).to(weight.dtype.element_ty)
        convolved = convolve_channels(projected, window, weights, offset, taps, padded_taps)
        tl.store(y + row, tl.where(is_channel, convolved, projected.to(tl.float32)), row < rows)
        shift_window(conv_state, projected, shifted, channel, is_channel & is_real, taps, padded_taps)
        tile, row = following, row + block


def advance_mixer(
    inputs: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
) -> torch.Tensor:
    num_heads, head_dim, d_state = ssm_state.shape[1:]
    d_inner = num_heads * head_dim
    y = inputs.new_empty(1, d_inner)
    groups = (inputs.shape[1] - 2 * d_inner - num_heads) // (2 * d_state)
    block = min(_CHANNELS, triton.next_power_of_2(head_dim))
    sizes = num_heads, num_heads // groups, head_dim, d_state, block, triton.next_power_of_2(d_state)
    _advance_mixer[num_heads, triton.cdiv(head_dim, block)](
        inputs,
        dt_bias,
        A_log,
        D,
        ssm_state,
        lengths,
        y,
        lowest_dt,
        highest_dt,
        *sizes,
        **_launch_options(inputs, _WARPS_OF_SMALL_PARTS),
    )
    return y


@triton.jit
def _advance_mixer(
    inputs,
    dt_bias,
    A_log,
    D,
    ssm_state,
    lengths,
    y,
    lowest_dt,
    highest_dt,
    num_heads: tl.constexpr,
    heads_per_group: tl.constexpr,
    head_dim: tl.constexpr,
    d_state: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    head = tl.program_id(0)
    d = tl.program_id(1) * block + tl.arange(0, block)
    n = tl.arange(0, columns)
    is_d, is_state = d < head_dim, n < d_state
    channel = head * head_dim + d
    at = channel[:, None] * d_state + n[None]
    is_here = is_d[:, None] & is_state[None]
    state = tl.load(ssm_state + at, is_here, 0.0)
    bias, A = tl.load(dt_bias + head).to(tl.float32), -tl.exp(tl.load(A_log + head).to(tl.float32))
    skip = tl.load(D + head).to(tl.float32)
    is_real = tl.load(lengths) > 0
    _wait(overlaps)

    d_inner: tl.constexpr = num_heads * head_dim
    group_width: tl.constexpr = num_heads // heads_per_group * d_state
    gate = tl.load(inputs + channel, is_d, 0.0)
    inputs += d_inner
    x = tl.load(inputs + channel, is_d, 0.0)
    inputs += d_inner
    of_group = (head // heads_per_group) * d_state + n
    b = tl.load(inputs + of_group, is_state, 0.0)
    c = tl.load(inputs + group_width + of_group, is_state, 0.0)
    dt = tl.load(inputs + 2 * group_width + head) + bias
    # log(1 + exp(dt)), with the digits of exp(dt) that a sum with 1 has not.
    e = tl.exp(tl.minimum(dt, 20.0))
    sum = 1.0 + e
    soft = tl.where(sum == 1.0, e, tl.log(sum) * e / tl.where(sum == 1.0, 1.0, sum - 1.0))
    dt = tl.where(dt <= 20.0, soft, dt)
    dt = tl.minimum(tl.maximum(dt, lowest_dt, tl.PropagateNan.ALL), highest_dt, tl.PropagateNan.ALL)
    dt = tl.where(is_real, dt, 0.0)

    state = state * tl.exp(dt * A) + (dt * x)[:, None] * b[None]
    tl.store(ssm_state + at, state, is_here)
    tl.store(y + channel, (tl.sum(state * c[None], 1) + x * skip) * gate * tl.sigmoid(gate), is_d)


def project_heads(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    query_rows, key_rows, columns = len(query), len(key), x.shape[1]
    y = query.new_empty(1, query_rows + 2 * key_rows)
    width = triton.next_power_of_2(columns)
    block, _, warps = _shape_of_program(query_rows, width)
    programs = triton.cdiv(query_rows, block) + 2 * triton.cdiv(key_rows, block)
    sizes = query_rows, key_rows, columns, block, width
    _project_heads[programs,](x, norm_weight, query, key, value, y, eps, *sizes, **_launch_options(x, warps))
    return y


@triton.jit
def _project_heads(
    x,
    norm_weight,
    query,
    key,
    value,
    y,
    eps,
    query_rows: tl.constexpr,
    key_rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    query_programs: tl.constexpr = (query_rows + block - 1) // block
    key_programs: tl.constexpr = (key_rows + block - 1) // block
    program, weight, rows = tl.program_id(0), query, query_rows
    if program >= query_programs + key_programs:
        program -= query_programs + key_programs
        weight, rows = value, key_rows
        y += query_rows + key_rows
    elif program >= query_programs:
        program -= query_programs
        weight, rows = key, key_rows
        y += query_rows
    row = program * block + tl.arange(0, block)
    column = tl.arange(0, width)
    tile = _load_rows(weight, row, rows, column, columns)
    norm_weights = _load_row(norm_weight, column, columns)
    _wait(overlaps)
    total = _multiply(tile, _normed(_load_row(x, column, columns), norm_weights, eps, columns))
    tl.store(y + row, total.to(y.dtype.element_ty), row < rows)


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    rows, columns = weight.shape
    y = torch.empty_like(residual)
    width = triton.next_power_of_2(columns)
    block, tiles, warps = _shape_of_program(rows, width)
    sizes = rows, columns, block, tiles, width
    _add_product[triton.cdiv(rows, block * tiles),](
        residual, x, norm_weight, weight, y, alpha, eps, *sizes, **_launch_options(x, warps)
    )
    return y


@triton.jit
def _add_product(
    residual,
    x,
    norm_weight,
    weight,
    y,
    alpha,
    eps,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0) * (block * tiles) + tl.arange(0, block)
    column = tl.arange(0, width)
    tile = _load_rows(weight, row, rows, column, columns)
    if norm_weight is None:
        _wait(overlaps)
        values = _load_row(x, column, columns).to(tl.float32)
    else:
        norm_weights = _load_row(norm_weight, column, columns)
        _wait(overlaps)
        values = _normed(_load_row(x, column, columns), norm_weights, eps, columns)
    for number in tl.static_range(tiles):
        before = tl.load(residual + row, row < rows, 0.0)
        following = tile
        if number + 1 < tiles:
            following = _load_rows(weight, row + block, rows, column, columns)  # while this one is multiplied
        total = _multiply(tile, values).to(weight.dtype.element_ty)
        tl.store(y + row, before + alpha * total.to(tl.float32), row < rows)
        tile, row = following, row + block


def activate(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, columns = len(weight) // 2, x.shape[1]
    y = weight.new_empty(1, rows)
    width = triton.next_power_of_2(columns)
    block, tiles, warps = _shape_of_program(rows, width, 2)
    sizes = rows, columns, block, tiles, width
    _activate[triton.cdiv(rows, block * tiles),](x, norm_weight, weight, y, eps, *sizes, **_launch_options(x, warps))
    return y


@triton.jit
def _activate(
    x,
    norm_weight,
    weight,
    y,
    eps,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0) * (block * tiles) + tl.arange(0, block)
    column = tl.arange(0, width)
    gates = _load_rows(weight, row, rows, column, columns)
    ups = _load_rows(weight + rows * columns, row, rows, column, columns)
    norm_weights = _load_row(norm_weight, column, columns)
    _wait(overlaps)
    values = _normed(_load_row(x, column, columns), norm_weights, eps, columns)
    _activate_tiles(gates, ups, values, weight, y, row, rows, column, columns, block, tiles)


@triton.jit
def _activate_tiles(
    gates, ups, values, weight, y, row, rows, column, columns, block: tl.constexpr, tiles: tl.constexpr
):
    """Activate a program's rows, tile by tile; of the first one, `gates` and `ups` have been loaded."""
    for number in tl.static_range(tiles):
        next_gates, next_ups, following = gates, ups, row + block
        if number + 1 < tiles:  # while this one is multiplied
            next_gates = _load_rows(weight, following, rows, column, columns)
            next_ups = _load_rows(weight + rows * columns, following, rows, column, columns)
        activated = _silu_and_mul(_multiply(gates, values), _multiply(ups, values), y.dtype.element_ty)
        tl.store(y + row, activated, row < rows)
        gates, ups, row = next_gates, next_ups, following


def route(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, columns = weight.shape
    logits = x.new_empty(1, rows)
    # Few rows: what counts is how long one takes.
    _route[rows,](
        x,
        norm_weight,
        weight,
        logits,
        eps,
        columns,
        triton.next_power_of_2(columns),
        **_launch_options(x, _WARPS_OF_SMALL_PARTS),
    )
    return logits


@triton.jit
def _route(x, norm_weight, weight, logits, eps, columns: tl.constexpr, width: tl.constexpr, overlaps: tl.constexpr):
    column = tl.arange(0, width)
    expert = tl.program_id(0)
    row = _load_row(weight + expert * columns, column, columns)
    norm_weights = _load_row(norm_weight, column, columns)
    _wait(overlaps)
    values = _normed(_load_row(x, column, columns), norm_weights, eps, columns)
    tl.store(logits + expert + tl.arange(0, 1), _multiply(row, values))


@triton.jit
def _expert_of_rank(router_logits, rank, experts: tl.constexpr, width: tl.constexpr):
    """Return the expert that as many others are above; of equal ones the first is. Any where they are NaN."""
    this, other = tl.arange(0, width)[:, None], tl.arange(0, width)[None]
    these = tl.load(router_logits + this, this < experts, -float("inf"))
    others = tl.load(router_logits + other, other < experts, -float("inf"))
    ranks = tl.sum(tl.where(this > other, others >= these, others > these).to(tl.int32), 1)
    return tl.minimum(tl.sum(tl.where(ranks == rank, tl.arange(0, width), 0), 0), experts - 1)


def activate_experts(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    top_k: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    (experts, expert_rows, columns), rows = w1.shape, len(weight) // 2
    expert_rows //= 2
    activated, expert_activated = weight.new_empty(1, rows), weight.new_empty(top_k, expert_rows)
    width = triton.next_power_of_2(columns)
    block, tiles, warps = _shape_of_program(rows + top_k * expert_rows, width, 2)
    programs = triton.cdiv(rows, block * tiles) + top_k * triton.cdiv(expert_rows, block * tiles)
    sizes = rows, expert_rows, columns, experts, triton.next_power_of_2(experts), top_k, block, tiles, width
    _activate_experts[programs,](
        x,
        norm_weight,
        weight,
        w1,
        router_logits,
        activated,
        expert_activated,
        eps,
        *sizes,
        **_launch_options(x, warps),
    )
    return activated, expert_activated


@triton.jit
def _activate_experts(
    x,
    norm_weight,
    weight,
    w1,
    router_logits,
    activated,
    expert_activated,
    eps,
    rows: tl.constexpr,
    expert_rows: tl.constexpr,
    columns: tl.constexpr,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    size: tl.constexpr = block * tiles
    shared_programs: tl.constexpr = (rows + size - 1) // size
    programs_of_expert: tl.constexpr = (expert_rows + size - 1) // size
    program = tl.program_id(0)
    column = tl.arange(0, width)
    norm_weights = _load_row(norm_weight, column, columns)
    if program < shared_programs:
        row = program * size + tl.arange(0, block)
        gates = _load_rows(weight, row, rows, column, columns)
        ups = _load_rows(weight + rows * columns, row, rows, column, columns)
        _wait(overlaps)
        values = _normed(_load_row(x, column, columns), norm_weights, eps, columns)
        _activate_tiles(gates, ups, values, weight, activated, row, rows, column, columns, block, tiles)
    else:
        choice = (program - shared_programs) // programs_of_expert
        row = (program - shared_programs) % programs_of_expert * size + tl.arange(0, block)
        _wait(overlaps)
        expert = _expert_of_rank(router_logits, choice, experts, padded_experts)
        w1 += expert.to(tl.int64) * (2 * expert_rows * columns)
        gates = _load_rows(w1, row, expert_rows, column, columns)
        ups = _load_rows(w1 + expert_rows * columns, row, expert_rows, column, columns)
        values = _normed(_load_row(x, column, columns), norm_weights, eps, columns)
        y = expert_activated + choice * expert_rows
        _activate_tiles(gates, ups, values, w1, y, row, expert_rows, column, columns, block, tiles)


def add_feed_forward(
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: torch.Tensor,
    expert_activated: torch.Tensor,
    w2: torch.Tensor,
    router_logits: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    (rows, columns), (top_k, expert_columns) = weight.shape, expert_activated.shape
    y = torch.empty_like(residual)
    experts, choices = len(w2), triton.next_power_of_2(top_k)
    width, expert_width = triton.next_power_of_2(columns), triton.next_power_of_2(expert_columns)
    block, tiles, warps = _shape_of_program(rows, max(width, choices * expert_width))
    sizes = rows, columns, expert_columns, experts, triton.next_power_of_2(experts), top_k, choices
    _add_feed_forward[triton.cdiv(rows, block * tiles),](
        residual,
        activated,
        weight,
        expert_activated,
        w2,
        router_logits,
        y,
        alpha,
        *sizes,
        block,
        tiles,
        width,
        expert_width,
        **_launch_options(residual, warps),
    )
    return y


@triton.jit
def _add_feed_forward(
    residual,
    activated,
    weight,
    expert_activated,
    w2,
    router_logits,
    y,
    alpha,
    rows: tl.constexpr,
    columns: tl.constexpr,
    expert_columns: tl.constexpr,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
    expert_width: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0) * (block * tiles) + tl.arange(0, block)
    column = tl.arange(0, width)
    tile = _load_rows(weight, row, rows, column, columns)
    # Of the last kernel but one. Not from the cache of a multiprocessor: only `_wait` makes sure that nothing older is
    # there.
    expert, choice = tl.arange(0, padded_experts), tl.arange(0, choices)
    is_choice = choice < top_k
    logits = tl.load(router_logits + expert, expert < experts, -float("inf"), cache_modifier=".cg")
    ids, top_logits = tl.zeros([choices], tl.int32), tl.full([choices], -float("inf"), tl.float32)
    for number in tl.static_range(top_k):
        top = tl.max(logits, 0)
        first = tl.min(tl.where(logits == top, expert, experts - 1), 0)
        logits = tl.where(expert == first, -float("inf"), logits)
        ids = tl.where(choice == number, first, ids)
        top_logits = tl.where(choice == number, top, top_logits)
    shares = tl.exp(top_logits - tl.max(top_logits, 0))
    topk_weights = shares / tl.sum(shares, 0)
    expert_column = tl.arange(0, expert_width)[None, None]
    is_here = is_choice[:, None, None] & (expert_column < expert_columns)
    w2 += ids.to(tl.int64)[:, None, None] * (rows * expert_columns) + expert_column
    chosen = _load_chosen_rows(w2, row, rows, expert_columns, is_here)
    _wait(overlaps)

    values = _load_row(activated, column, columns).to(tl.float32)
    expert_values = tl.load(expert_activated + choice[:, None, None] * expert_columns + expert_column, is_here, 0.0)
    dtype: tl.constexpr = weight.dtype.element_ty
    for number in tl.static_range(tiles):
        before = tl.load(residual + row, row < rows, 0.0)
        next_tile, next_chosen, following = tile, chosen, row + block
        if number + 1 < tiles:  # while this one is multiplied
            next_tile = _load_rows(weight, following, rows, column, columns)
            next_chosen = _load_chosen_rows(w2, following, rows, expert_columns, is_here)
        shared = _multiply(tile, values).to(dtype).to(tl.float32)
        products = tl.sum(chosen.to(tl.float32) * expert_values.to(tl.float32), 2).to(dtype).to(tl.float32)
        total = tl.sum(topk_weights[:, None] * products, 0).to(dtype).to(tl.float32)
        tl.store(y + row, before + alpha * shared + alpha * total, row < rows)
        tile, chosen, row = next_tile, next_chosen, following


@triton.jit
def _load_chosen_rows(w2, row, rows, columns, is_here):
    """Load some rows of each chosen expert, [choices, block, width]: all at once, so that they are read at once.

    Args:
        w2: where the experts' rows begin, at each column.
    """
    is_row = (row < rows)[None, :, None]
    return tl.load(w2 + row[None, :, None] * columns, is_here & is_row, 0.0)
