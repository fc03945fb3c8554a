"""Triton kernels of a feed-forward part's token of several sequences; those of mixers are in `batch_mixer_kernels`.

Each function has the arguments and results of the operator of its name in `ops.gpu.token_feed_forward`, on a GPU.
The weights of an expert are read once for all sequences that chose it, and not at all if none did. Idle sequences, of
length 0, choose none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from granite4_neuron.ops.gpu.batch_programs import (
    multiply_gated,
    multiply_vectors,
    normed_rows,
    padded,
    shape_of_product,
)
from granite4_neuron.ops.gpu.functions_kernels import choice_keys, largest_keys, load_choice_keys
from granite4_neuron.ops.gpu.token_programs import (
    WARPS_OF_SMALL_PARTS,
    launch_options,
    let_next_begin,
    load_row,
    load_rows,
    multiply,
    normed,
    silu_and_mul,
    wait,
)

# Numbers of the router's matrix that a program reads, and columns of a program that adds outputs.
_NUMBERS_OF_ROUTER = 8192
_COLUMNS_OF_SUM = 512


def activate(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    (batch, columns), rows = x.shape, len(weight) // 2
    y = weight.new_empty(batch, rows)
    values = normed_rows(x, norm_weight, eps)
    block, width, options = shape_of_product(values, rows, 2)
    sizes = batch, padded(batch), rows, columns, block, width
    _activate[triton.cdiv(rows, block),](values, weight, y, *sizes, **options)
    return y


@triton.jit
def _activate(
    x,
    weight,
    y,
    batch: tl.constexpr,
    padded_batch: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    row, token = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, padded_batch)
    wait(overlaps)
    _store_activated(x, weight, y, row, rows, token, token, token < batch, columns, width)


@triton.jit
def _store_activated(x, weight, y, row, rows, token, place, is_here, columns: tl.constexpr, width: tl.constexpr):
    """Activate some rows of the tokens that are here, and store them at the tokens' places in y."""
    gates, ups = multiply_gated(weight, row, rows, x, token, is_here, columns, width)
    at = y + place[None] * rows + row[:, None]
    tl.store(at, silu_and_mul(gates, ups, y.dtype.element_ty), (row < rows)[:, None] & is_here[None])


def route(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (experts, columns), batch = weight.shape, len(x)
    values, logits = norm_weight.new_empty(x.shape), x.new_empty(batch, experts)
    width = triton.next_power_of_2(columns)
    block = max(1, min(_NUMBERS_OF_ROUTER // width, triton.next_power_of_2(experts)))
    sizes, options = (experts, columns, block, width), launch_options(x, WARPS_OF_SMALL_PARTS)
    _route[triton.cdiv(experts, block), batch](x, norm_weight, weight, values, logits, eps, *sizes, **options)
    return values, logits


@triton.jit
def _route(
    x,
    norm_weight,
    weight,
    values,
    logits,
    eps,
    experts: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    token, column = tl.program_id(1), tl.arange(0, width)
    expert = tl.program_id(0) * block + tl.arange(0, block)
    tile = load_rows(weight, expert, experts, column, columns)
    norm_weights = load_row(norm_weight, column, columns)
    wait(overlaps)
    x_normed = normed(load_row(x + token * columns, column, columns), norm_weights, eps, columns)
    tl.store(logits + token * experts + expert, multiply(tile, x_normed), expert < experts)
    if tl.program_id(0) == 0:
        at = values + token * columns + column[None]
        tl.store(at, x_normed.to(values.dtype.element_ty), (column < columns)[None])


def activate_experts(
    normed: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    (experts, expert_rows, columns), rows, batch = w1.shape, len(weight) // 2, len(normed)
    expert_rows //= 2
    activated, expert_activated = weight.new_empty(batch, rows), weight.new_empty(batch * top_k, expert_rows)
    block, width, options = shape_of_product(normed, rows + min(experts, batch * top_k) * expert_rows, 2)
    programs = triton.cdiv(rows, block) + experts * triton.cdiv(expert_rows, block)
    sizes = batch, padded(batch), rows, expert_rows, columns, experts, triton.next_power_of_2(experts), top_k
    _activate_experts[programs,](
        normed, weight, w1, router_logits, lengths, activated, expert_activated, *sizes, block, width, **options
    )
    return activated, expert_activated


@triton.jit
def _activate_experts(
    x,
    weight,
    w1,
    router_logits,
    lengths,
    activated,
    expert_activated,
    batch: tl.constexpr,
    padded_batch: tl.constexpr,
    rows: tl.constexpr,
    expert_rows: tl.constexpr,
    columns: tl.constexpr,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    shared_programs: tl.constexpr = (rows + block - 1) // block
    programs_of_expert: tl.constexpr = (expert_rows + block - 1) // block
    program, token = tl.program_id(0), tl.arange(0, padded_batch)
    is_token = token < batch
    is_real = tl.load(lengths + token, is_token, 0) > 0
    wait(overlaps)
    if program < shared_programs:
        row = program * block + tl.arange(0, block)
        _store_activated(x, weight, activated, row, rows, token, token, is_token, columns, width)
    else:
        expert = (program - shared_programs) // programs_of_expert
        row = (program - shared_programs) % programs_of_expert * block + tl.arange(0, block)
        place, is_chosen = _choices_of(router_logits, expert, token, is_real, experts, padded_experts, top_k)
        if _any(is_chosen):
            w1 += expert.to(tl.int64) * (2 * expert_rows * columns)
            _store_activated(x, w1, expert_activated, row, expert_rows, token, place, is_chosen, columns, width)


@triton.jit
def _choices_of(router_logits, expert, token, is_real, experts: tl.constexpr, width: tl.constexpr, top_k: tl.constexpr):
    """Return the place of an expert among all tokens' choices, and whether a real token chose it: two of [tokens]."""
    number = tl.arange(0, width)[None]
    at = router_logits + token[:, None] * experts + number
    keys = choice_keys(tl.load(at, is_real[:, None] & (number < experts), -float("inf")), number, width)
    own = tl.sum(tl.where(number == expert, keys, 0), 1)
    above = tl.sum((keys > own[:, None]).to(tl.int32), 1)
    return token * top_k + above, is_real & (above < top_k)


@triton.jit
def _any(is_here):
    return tl.sum(is_here.to(tl.int32), 0) > 0


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
    (batch, columns), (choices, expert_columns) = activated.shape, expert_activated.shape
    (experts, rows, _), top_k = w2.shape, choices // batch
    shared, chosen, y = weight.new_empty(batch, rows), weight.new_empty(choices, rows), torch.empty_like(residual)
    block, width, options = shape_of_product(activated, rows * (1 + min(experts, choices)))
    programs = triton.cdiv(rows, block) * (1 + experts)
    padded_experts = triton.next_power_of_2(experts)
    sizes = batch, padded(batch), rows, columns, expert_columns, experts, padded_experts, top_k, block, width
    _multiply_outputs[programs,](
        activated, weight, expert_activated, w2, router_logits, lengths, shared, chosen, *sizes, **options
    )
    columns_of_sum = min(_COLUMNS_OF_SUM, triton.next_power_of_2(rows))
    sizes = rows, experts, padded_experts, top_k, triton.next_power_of_2(top_k), columns_of_sum
    options = launch_options(residual, WARPS_OF_SMALL_PARTS)
    _add_outputs[batch, triton.cdiv(rows, columns_of_sum)](
        residual, shared, chosen, router_logits, lengths, y, alpha, *sizes, **options
    )
    return y


@triton.jit
def _multiply_outputs(
    activated,
    weight,
    expert_activated,
    w2,
    router_logits,
    lengths,
    shared,
    chosen,
    batch: tl.constexpr,
    padded_batch: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    expert_columns: tl.constexpr,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    programs_of_matrix: tl.constexpr = (rows + block - 1) // block
    matrix = tl.program_id(0) // programs_of_matrix
    row = tl.program_id(0) % programs_of_matrix * block + tl.arange(0, block)
    token = tl.arange(0, padded_batch)
    is_token = token < batch
    is_real = tl.load(lengths + token, is_token, 0) > 0
    wait(overlaps)
    let_next_begin(overlaps)  # the kernel after it reads the router's logits before its own wait
    if matrix == 0:
        _store_product(weight, activated, shared, row, rows, token, is_token, columns, width)
    else:
        place, is_chosen = _choices_of(router_logits, matrix - 1, token, is_real, experts, padded_experts, top_k)
        if _any(is_chosen):
            w2 += (matrix - 1).to(tl.int64) * (rows * expert_columns)
            _store_product(w2, expert_activated, chosen, row, rows, place, is_chosen, expert_columns, width)


@triton.jit
def _store_product(weight, x, y, row, rows, vector, is_here, columns: tl.constexpr, width: tl.constexpr):
    """Multiply some rows with the vectors that are here, and store them at the vectors' places in y."""
    total = multiply_vectors(weight, row, rows, x, vector, is_here, columns, width)
    at = y + vector[None] * rows + row[:, None]
    tl.store(at, total.to(y.dtype.element_ty), (row < rows)[:, None] & is_here[None])


@triton.jit
def _add_outputs(
    residual,
    shared,
    chosen,
    router_logits,
    lengths,
    y,
    alpha,
    rows: tl.constexpr,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Add the residual, the shared MLP's output and the weighted sum of the chosen experts' ones."""
    let_next_begin(overlaps)
    token, choice = tl.program_id(0), tl.arange(0, choices)
    row = tl.program_id(1) * block + tl.arange(0, block)
    is_row, is_real = row < rows, tl.load(lengths + token) > 0
    # `route` has ended: `_multiply_outputs` lets this kernel begin only after its own `wait`. Not from the cache of a
    # multiprocessor, which may hold something older until this kernel's `wait`.
    keys = load_choice_keys(router_logits + token * experts, experts, padded_experts, ".cg")
    _, weights = largest_keys(keys, top_k, choices)
    wait(overlaps)

    of_choice = (is_real & (choice < top_k))[:, None] & is_row[None]
    products = tl.load(chosen + (token * top_k + choice[:, None]) * rows + row[None], of_choice, 0.0).to(tl.float32)
    dtype: tl.constexpr = chosen.dtype.element_ty
    total = tl.sum(weights[:, None] * products, 0).to(dtype).to(tl.float32)
    at = token * rows + row
    outputs = tl.load(residual + at, is_row, 0.0) + alpha * tl.load(shared + at, is_row, 0.0).to(tl.float32)
    tl.store(y + at, outputs + alpha * total, is_row)
