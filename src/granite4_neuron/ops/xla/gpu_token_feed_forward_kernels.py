"""Triton kernels of a feed-forward part's one token: products with what precedes and follows them.

Each function has the arguments and results of the operator of its name in `ops.xla.gpu_token_feed_forward`, on a GPU.
`ops.xla.gpu_token_programs` says when a kernel may read and write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from granite4_neuron.ops.xla.gpu_token_programs import (
    WARPS_OF_SMALL_PARTS,
    launch_options,
    load_row,
    load_rows,
    multiply,
    normed,
    shape_of_program,
    wait,
)


def activate(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, columns = len(weight) // 2, x.shape[1]
    y = weight.new_empty(1, rows)
    width = triton.next_power_of_2(columns)
    block, tiles, warps = shape_of_program(rows, width, 2)
    sizes = rows, columns, block, tiles, width
    _activate[triton.cdiv(rows, block * tiles),](x, norm_weight, weight, y, eps, *sizes, **launch_options(x, warps))
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
    gates = load_rows(weight, row, rows, column, columns)
    ups = load_rows(weight + rows * columns, row, rows, column, columns)
    norm_weights = load_row(norm_weight, column, columns)
    wait(overlaps)
    values = normed(load_row(x, column, columns), norm_weights, eps, columns)
    _activate_tiles(gates, ups, values, weight, y, row, rows, column, columns, block, tiles)


@triton.jit
def _activate_tiles(
    gates, ups, values, weight, y, row, rows, column, columns, block: tl.constexpr, tiles: tl.constexpr
):
    """Activate a program's rows, tile by tile; of the first one, `gates` and `ups` have been loaded."""
    for number in tl.static_range(tiles):
        next_gates, next_ups, following = gates, ups, row + block
        if number + 1 < tiles:  # while this one is multiplied
            next_gates = load_rows(weight, following, rows, column, columns)
            next_ups = load_rows(weight + rows * columns, following, rows, column, columns)
        activated = _silu_and_mul(multiply(gates, values), multiply(ups, values), y.dtype.element_ty)
        tl.store(y + row, activated, row < rows)
        gates, ups, row = next_gates, next_ups, following


@triton.jit
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    """Compute `ops.silu_and_mul`, rounded to a dtype wherever that is."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)


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
        **launch_options(x, WARPS_OF_SMALL_PARTS),
    )
    return logits


@triton.jit
def _route(x, norm_weight, weight, logits, eps, columns: tl.constexpr, width: tl.constexpr, overlaps: tl.constexpr):
    column = tl.arange(0, width)
    expert = tl.program_id(0)
    row = load_row(weight + expert * columns, column, columns)
    norm_weights = load_row(norm_weight, column, columns)
    wait(overlaps)
    values = normed(load_row(x, column, columns), norm_weights, eps, columns)
    tl.store(logits + expert + tl.arange(0, 1), multiply(row, values))


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
    block, tiles, warps = shape_of_program(rows + top_k * expert_rows, width, 2)
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
        **launch_options(x, warps),
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
    norm_weights = load_row(norm_weight, column, columns)
    if program < shared_programs:
        row = program * size + tl.arange(0, block)
        gates = load_rows(weight, row, rows, column, columns)
        ups = load_rows(weight + rows * columns, row, rows, column, columns)
        wait(overlaps)
        values = normed(load_row(x, column, columns), norm_weights, eps, columns)
        _activate_tiles(gates, ups, values, weight, activated, row, rows, column, columns, block, tiles)
    else:
        choice = (program - shared_programs) // programs_of_expert
        row = (program - shared_programs) % programs_of_expert * size + tl.arange(0, block)
        wait(overlaps)
        expert = _expert_of_rank(router_logits, choice, experts, padded_experts)
        w1 += expert.to(tl.int64) * (2 * expert_rows * columns)
        gates = load_rows(w1, row, expert_rows, column, columns)
        ups = load_rows(w1 + expert_rows * columns, row, expert_rows, column, columns)
        values = normed(load_row(x, column, columns), norm_weights, eps, columns)
        y = expert_activated + choice * expert_rows
        _activate_tiles(gates, ups, values, w1, y, row, expert_rows, column, columns, block, tiles)


@triton.jit
def _expert_of_rank(router_logits, rank, experts: tl.constexpr, width: tl.constexpr):
    """Return the expert that as many others are above; of equal ones the first is. Any where they are NaN."""
    this, other = tl.arange(0, width)[:, None], tl.arange(0, width)[None]
    these = tl.load(router_logits + this, this < experts, -float("inf"))
    others = tl.load(router_logits + other, other < experts, -float("inf"))
    ranks = tl.sum(tl.where(this > other, others >= these, others > these).to(tl.int32), 1)
    return tl.minimum(tl.sum(tl.where(ranks == rank, tl.arange(0, width), 0), 0), experts - 1)


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
    block, tiles, warps = shape_of_program(rows, max(width, choices * expert_width))
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
        **launch_options(residual, warps),
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
    tile = load_rows(weight, row, rows, column, columns)
    # Of the last kernel but one. Not from the cache of a multiprocessor: only `wait` makes sure that nothing older is
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
    wait(overlaps)

    values = load_row(activated, column, columns).to(tl.float32)
    expert_values = tl.load(expert_activated + choice[:, None, None] * expert_columns + expert_column, is_here, 0.0)
    dtype: tl.constexpr = weight.dtype.element_ty
    for number in tl.static_range(tiles):
        before = tl.load(residual + row, row < rows, 0.0)
        next_tile, next_chosen, following = tile, chosen, row + block
        if number + 1 < tiles:  # while this one is multiplied
            next_tile = load_rows(weight, following, rows, column, columns)
            next_chosen = _load_chosen_rows(w2, following, rows, expert_columns, is_here)
        shared = multiply(tile, values).to(dtype).to(tl.float32)
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
