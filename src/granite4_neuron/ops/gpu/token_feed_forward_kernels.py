"""Triton kernels of a feed-forward part's one token: products with what precedes and follows them.

Each function has the arguments and results of the operator of its name in `ops.gpu.token_feed_forward`, on a GPU.
Those of several sequences are in `ops.gpu.batch_feed_forward_kernels`. `ops.gpu.token_programs` says when a
kernel may read and write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from granite4_neuron.ops.gpu import batch_feed_forward_kernels as batch
from granite4_neuron.ops.gpu.functions_kernels import expert_of, largest_keys, load_choice_keys, without_largest
from granite4_neuron.ops.gpu.token_programs import (
    WARPS_OF_SMALL_PARTS,
    launch_options,
    let_next_begin,
    load_row,
    load_rows,
    multiply,
    normed,
    shape_of_program,
    silu_and_mul,
    wait,
)

# Of programs that have one row of the second products.
_WARPS_OF_ROW = 2


def activate(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if len(x) > 1:
        return batch.activate(x, norm_weight, weight, eps)
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
    let_next_begin(overlaps)
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
        activated = silu_and_mul(multiply(gates, values), multiply(ups, values), y.dtype.element_ty)
        tl.store(y + row, activated, row < rows)
        gates, ups, row = next_gates, next_ups, following


def route(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(x) > 1:
        return batch.route(x, norm_weight, weight, eps)
    rows, columns = weight.shape
    values, logits = norm_weight.new_empty(x.shape), x.new_empty(1, rows)
    # Few rows: what counts is how long one takes.
    sizes = columns, triton.next_power_of_2(columns)
    options = launch_options(x, WARPS_OF_SMALL_PARTS)
    _route[rows,](x, norm_weight, weight, values, logits, eps, *sizes, **options)
    return values, logits


@triton.jit
def _route(
    x, norm_weight, weight, values, logits, eps, columns: tl.constexpr, width: tl.constexpr, overlaps: tl.constexpr
):
    let_next_begin(overlaps)
    column = tl.arange(0, width)
    expert = tl.program_id(0)
    row = load_row(weight + expert * columns, column, columns)
    norm_weights = load_row(norm_weight, column, columns)
    wait(overlaps)
    x_normed = normed(load_row(x, column, columns), norm_weights, eps, columns)
    tl.store(logits + expert + tl.arange(0, 1), multiply(row, x_normed))
    if expert == 0:
        tl.store(values + column[None], x_normed.to(values.dtype.element_ty), (column < columns)[None])


def activate_experts(
    normed: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(normed) > 1:
        return batch.activate_experts(normed, weight, w1, router_logits, lengths, top_k)
    (experts, expert_rows, columns), rows = w1.shape, len(weight) // 2
    expert_rows //= 2
    activated, expert_activated = weight.new_empty(1, rows), weight.new_empty(top_k, expert_rows)
    width = triton.next_power_of_2(columns)
    block, tiles, warps = shape_of_program(rows + top_k * expert_rows, width, 2)
    programs = triton.cdiv(rows, block * tiles) + top_k * triton.cdiv(expert_rows, block * tiles)
    sizes = rows, expert_rows, columns, experts, triton.next_power_of_2(experts), top_k, block, tiles, width
    options = launch_options(normed, warps)
    _activate_experts[programs,](normed, weight, w1, router_logits, activated, expert_activated, *sizes, **options)
    return activated, expert_activated


@triton.jit
def _activate_experts(
    normed,
    weight,
    w1,
    router_logits,
    activated,
    expert_activated,
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
    if program < shared_programs:
        row = program * size + tl.arange(0, block)
        gates = load_rows(weight, row, rows, column, columns)
        ups = load_rows(weight + rows * columns, row, rows, column, columns)
        wait(overlaps)
        let_next_begin(overlaps)  # the kernel after it reads the router's logits before its own wait
        values = load_row(normed, column, columns).to(tl.float32)
        _activate_tiles(gates, ups, values, weight, activated, row, rows, column, columns, block, tiles)
    else:
        choice = (program - shared_programs) // programs_of_expert
        row = (program - shared_programs) % programs_of_expert * size + tl.arange(0, block)
        wait(overlaps)
        let_next_begin(overlaps)
        expert = _expert_of_rank(router_logits, choice, experts, padded_experts)
        w1 += expert.to(tl.int64) * (2 * expert_rows * columns)
        gates = load_rows(w1, row, expert_rows, column, columns)
        ups = load_rows(w1 + expert_rows * columns, row, expert_rows, column, columns)
        values = load_row(normed, column, columns).to(tl.float32)
        y = expert_activated + choice * expert_rows
        _activate_tiles(gates, ups, values, w1, y, row, expert_rows, column, columns, block, tiles)


@triton.jit
def _expert_of_rank(router_logits, rank, experts: tl.constexpr, width: tl.constexpr):
    """Return the expert that `rank` others are above."""
    keys = load_choice_keys(router_logits, experts, width, "")
    for _ in range(rank):
        keys = without_largest(keys, tl.max(keys, 0))
    return expert_of(tl.max(keys, 0), width)


def add_feed_forward(
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: torch.Tensor,
    expert_activated: torch.Tensor,
    w2: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    if len(residual) > 1:
        return batch.add_feed_forward(residual, activated, weight, expert_activated, w2, router_logits, lengths, alpha)
    (rows, columns), (top_k, expert_columns) = weight.shape, expert_activated.shape
    y = torch.empty_like(residual)
    experts, choices = len(w2), triton.next_power_of_2(top_k)
    width, expert_width = triton.next_power_of_2(columns), triton.next_power_of_2(expert_columns)
    sizes = rows, columns, expert_columns, experts, triton.next_power_of_2(experts), top_k, choices, width, expert_width
    _add_feed_forward[rows,](
        residual,
        activated,
        weight,
        expert_activated,
        w2,
        router_logits,
        y,
        alpha,
        *sizes,
        **launch_options(residual, _WARPS_OF_ROW),
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
    width: tl.constexpr,
    expert_width: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    row, column = tl.program_id(0), tl.arange(0, width)
    shared_row = load_row(weight + row * columns, column, columns)
    # `route` has ended: `activate_experts` lets this kernel begin only after its own `wait`. Not from the cache of a
    # multiprocessor, which may hold something older until this kernel's `wait`.
    keys = load_choice_keys(router_logits, experts, padded_experts, ".cg")
    ids, topk_weights = largest_keys(keys, top_k, choices)
    choice = tl.arange(0, choices)
    expert_column = tl.arange(0, expert_width)[None]
    is_here = (choice < top_k)[:, None] & (expert_column < expert_columns)
    # A row of each chosen expert, in one load, so that all are on their way together.
    first_rows = ids.to(tl.int64)[:, None] * (rows * expert_columns)
    chosen = tl.load(w2 + first_rows + row * expert_columns + expert_column, is_here, 0.0)
    wait(overlaps)

    dtype: tl.constexpr = weight.dtype.element_ty
    shared = multiply(shared_row, load_row(activated, column, columns).to(tl.float32)).to(dtype).to(tl.float32)
    values = tl.load(expert_activated + choice[:, None] * expert_columns + expert_column, is_here, 0.0)
    products = multiply(chosen, values.to(tl.float32)).to(dtype).to(tl.float32)
    total = tl.sum(topk_weights * products, 0).to(dtype).to(tl.float32)
    at = row + tl.arange(0, 1)
    tl.store(y + at, tl.load(residual + at) + alpha * shared + alpha * total)
