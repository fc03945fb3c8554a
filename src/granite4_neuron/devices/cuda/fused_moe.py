"""The experts of many tokens: rows are sorted by expert, and multiplied expert by expert.

A choice is a token's expert; its number is token * top_k + place. A choice's result depends only on its token and its
expert, and a token's choices are added in their order.
"""

from __future__ import annotations

from typing import Any

import torch

from granite4_neuron.devices.cuda.launch import has_compute_capability
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.products import (
    has_descriptors,
    load_columns,
    multiply_tile,
    outputs_of,
    rows_of_weights,
    tile_options,
)
from granite4_neuron.devices.cuda.triton_utils import TensorDescriptor, tl, triton
from granite4_neuron.devices.cuda.weights import (
    BLOCK_OF_CODES,
    code_order,
    convert_codes,
    dense,
    finished,
    format_of,
    in_code_order,
    load_numbers,
    parts_of,
    rows_from,
    scale_outputs,
    scale_ptrs_of,
    stored,
    wait_for_tensor_cores,
    width_of,
    words_of,
)
from granite4_neuron.ops import Weight, moe

_BLOCK_OF_CHOICES = 4096
_BLOCK_OF_SUMS = 1024
# (BLOCK_M, rows of weights, num_warps, num_stages), as in `products`. The first two were the fastest on an H200 with
# 2,048 and 8,192 tokens of h-tiny, and with 512; the large one is for experts that have enough choices on average.
_LARGE_TILE, _TILE, _TILE_OF_FLOAT32 = (128, 256, 8, 4), (64, 256, 4, 4), (64, 64, 4, 2)
_TILE_OF_QUANTIZED = 64, 128, 4, 3
# Where codes are converted: in int8 and in the second product, and in the first one of formats that take more
# instructions. They were the fastest on an H200 with 512 and with 2,048 tokens of h-small.
_TILE_OF_INT8, _TILE_OF_CODES = (64, 256, 4, 4), (128, 128, 4, 4)


def fused_experts(
    hidden_states: torch.Tensor, w1: Weight, w2: Weight, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Compute `ops.fused_experts`."""
    (first, first_scales), (second, second_scales) = parts_of(w1), parts_of(w2)
    return multiply_by_experts(hidden_states, first, second, topk_weights, topk_ids, first_scales, second_scales)


@operator()
def multiply_by_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_scales: torch.Tensor | None = None,
    w2_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `ops.fused_experts`."""
    w1 = dense(w1, w1_scales, hidden_states.shape[1], hidden_states.dtype)
    w2 = dense(w2, w2_scales, width_of(w1, w2), hidden_states.dtype)
    return moe.fused_experts(hidden_states, w1, w2, topk_weights, topk_ids)


@multiply_by_experts.register_fake
def _(hidden_states, *others):
    return hidden_states.new_empty(hidden_states.shape)


def _launch_multiply_by_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_scales: torch.Tensor | None = None,
    w2_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    x, topk_ids, topk_weights = hidden_states.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    tokens, top_k = topk_ids.shape
    (num_experts, hidden, _), width = w2.shape, width_of(w1, w2)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    choices = torch.empty(num_experts, tokens, dtype=torch.int32, device=x.device)
    _sort_choices_kernel[num_experts,](
        topk_ids, counts, choices, topk_ids.numel(), tokens, BLOCK=_BLOCK_OF_CHOICES, num_warps=8
    )
    activated = x.new_empty(topk_ids.numel(), width)
    y = x.new_empty(topk_ids.numel(), hidden)
    is_gated = w1.shape[1] != width
    has_codes = w1_scales is not None and _converts_codes(x, w1, width, w2)
    launch = _launch_multiply_codes if has_codes else _launch_multiply_choices
    launch(in_code_order(x) if has_codes else x, w1, w1_scales, counts, choices, activated, True, is_gated)
    if not is_gated:
        activated.copy_(moe.relu2(activated))
    launch(activated, w2, w2_scales, counts, choices, y, False, False)
    output = torch.empty_like(x)
    block_h = min(_BLOCK_OF_SUMS, triton.next_power_of_2(hidden))
    _add_choices_kernel[tokens, triton.cdiv(hidden, block_h)](
        y, topk_weights, output, HIDDEN=hidden, TOP_K=top_k, BLOCK_H=block_h, num_warps=4
    )
    return output


register_launch(multiply_by_experts, _launch_multiply_by_experts)


def _launch_multiply_choices(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    counts: torch.Tensor,
    choices: torch.Tensor,
    outputs: torch.Tensor,
    is_first: bool,
    is_gated: bool,
) -> None:
    num_experts, tokens, num_weights = *choices.shape, 1 + is_gated
    options = tile_options(rows, *_tile(rows, len(outputs) / num_experts, scales is not None), num_weights)
    matrices = stored(weight.contiguous(), scales)[0].view(num_experts * num_weights, *outputs.shape[1:], -1)
    if by_descriptors := scales is None and has_descriptors(matrices):
        matrices = TensorDescriptor.from_tensor(matrices, [num_weights, options["BLOCK_N"], options["BLOCK_K"]])
    _multiply_choices_kernel[_grid(outputs, num_experts, options),](
        rows,
        matrices,
        scales,
        counts,
        choices,
        outputs,
        tokens,
        CHOICES_PER_ROW=len(outputs) // len(rows),
        EXPERTS=num_experts,
        N=outputs.shape[1],
        K=rows.shape[1],
        NUM_WEIGHTS=num_weights,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BY_DESCRIPTORS=by_descriptors,
        **options,
    )


def _grid(outputs: torch.Tensor, num_experts: int, options: dict[str, Any]) -> int:
    """Return the number of programs, for at least as many blocks of choices as the experts can need."""
    num_choices, n = outputs.shape
    return (num_choices // options["BLOCK_M"] + min(num_experts, num_choices)) * triton.cdiv(n, options["BLOCK_N"])


def _converts_codes(x: torch.Tensor, w1: torch.Tensor, width: int, w2: torch.Tensor) -> bool:
    """Return whether tensor cores take codes as `weights.convert_codes` converts them: in bfloat16, in whole blocks, by
    wgmma, which no GPU after compute capability 9.x has.
    """
    return (
        x.dtype == torch.bfloat16
        and not (x.is_cuda and has_compute_capability(x, 10))
        and all(columns % BLOCK_OF_CODES == 0 for columns in (x.shape[1], width))
        and has_descriptors(*(words_of(each) for each in (w1, w2)))
    )


def _launch_multiply_codes(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    counts: torch.Tensor,
    choices: torch.Tensor,
    outputs: torch.Tensor,
    is_first: bool,
    is_gated: bool,
) -> None:
    assert scales is not None
    num_experts, tokens, num_weights = *choices.shape, 1 + is_gated
    options = tile_options(rows, *_tile_of_codes(values, is_gated), num_weights)
    words = words_of(values.contiguous()).view(num_experts * num_weights, outputs.shape[1], -1)
    block = [num_weights, options["BLOCK_N"], BLOCK_OF_CODES // 4]
    _multiply_codes_kernel[_grid(outputs, num_experts, options),](
        rows,
        TensorDescriptor.from_tensor(words, block),
        scales.contiguous(),
        counts,
        choices,
        outputs,
        tokens,
        FORMAT=format_of(values),
        CHOICES_PER_ROW=len(outputs) // len(rows),
        EXPERTS=num_experts,
        N=outputs.shape[1],
        K=rows.shape[1],
        NUM_WEIGHTS=num_weights,
        IN_CODE_ORDER=is_first,
        BLOCK_E=triton.next_power_of_2(num_experts),
        **options,
    )


def _tile(x: torch.Tensor, choices_per_expert: float, is_quantized: bool) -> tuple[int, int, int, int]:
    if x.itemsize > 2:
        return _TILE_OF_FLOAT32
    if is_quantized:
        return _TILE_OF_QUANTIZED
    return _LARGE_TILE if choices_per_expert >= _LARGE_TILE[0] else _TILE


def _tile_of_codes(values: torch.Tensor, is_gated: bool) -> tuple[int, int, int, int]:
    return _TILE_OF_CODES if is_gated and values.dtype != torch.int8 else _TILE_OF_INT8


@triton.jit(do_not_specialize=["num_choices", "tokens"])
def _sort_choices_kernel(topk_ids, counts, choices, num_choices, tokens, BLOCK: tl.constexpr):
    """List one expert's choices in ascending order.

    Grid: (experts,).

    Args:
        topk_ids: [num_choices], integer.
        counts: [experts] int32. choices: [experts, tokens] int32; a token chooses an expert at most once.
    """
    expert = tl.program_id(0)
    choices += expert.to(tl.int64) * tokens
    count = 0
    for start in range(0, num_choices, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        is_chosen = tl.load(topk_ids + offs, offs < num_choices, -1).to(tl.int32) == expert
        places = tl.cumsum(is_chosen.to(tl.int32), 0)
        tl.store(choices + count + places - 1, offs, is_chosen)
        count += tl.sum(is_chosen.to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["tokens"])
def _multiply_choices_kernel(
    rows,
    weight,
    scales,
    counts,
    choices,
    y,
    tokens,
    CHOICES_PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_DESCRIPTORS: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M choices of one expert.

    Grid: (blocks * cdiv(N, BLOCK_N),), where `blocks` is at least the number that all experts' choices fill. Programs
    that read the same weights are neighbours.

    Args:
        rows: [choices / CHOICES_PER_ROW, K].
        weight: [EXPERTS * NUM_WEIGHTS, N, K]: gate and up of each expert, or one weight. With BY_DESCRIPTORS a tensor
            descriptor.
        scales: of a quantized weight, whose tiles are dequantized; else None.
        counts, choices: as `_sort_choices_kernel` writes them.
        y: [choices, N].
    """
    expert, pid_n, first, count = _find_block(counts, EXPERTS, N, BLOCK_E, BLOCK_M, BLOCK_N)
    if expert < EXPERTS:
        offs_m = first + tl.arange(0, BLOCK_M)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m = offs_m < count
        choice = tl.load(choices + expert.to(tl.int64) * tokens + offs_m, mask_m, 0).to(tl.int64)
        row_ptrs = rows + (choice // CHOICES_PER_ROW)[:, None] * K
        if BY_DESCRIPTORS:
            acc = tl.zeros([BLOCK_M, NUM_WEIGHTS * BLOCK_N], tl.float32)
            offs_k = tl.arange(0, BLOCK_K)
            for start in range(0, K, BLOCK_K):
                tile = load_columns(row_ptrs + offs_k[None], start, offs_k[None], K, BLOCK_K)
                weights = weight.load([expert * NUM_WEIGHTS, pid_n * BLOCK_N, start])
                weights = weights.reshape([NUM_WEIGHTS * BLOCK_N, BLOCK_K])
                acc = tl.dot(tile, tl.trans(weights), acc, input_precision=PRECISION)
        elif scales is not None:
            of_expert = rows_from((weight, scales), expert.to(tl.int64) * (NUM_WEIGHTS * N), K)
            first = pid_n * BLOCK_N
            acc = _multiply_quantized_tile(row_ptrs, of_expert, first, N, K, NUM_WEIGHTS, BLOCK_N, BLOCK_K, PRECISION)
        else:
            weight += expert.to(tl.int64) * (NUM_WEIGHTS * N * K)
            acc = multiply_tile(row_ptrs, weight, pid_n * BLOCK_N, N, K, NUM_WEIGHTS, BLOCK_N, BLOCK_K, PRECISION)
        output = outputs_of(acc, NUM_WEIGHTS, y.dtype.element_ty)
        mask = mask_m[:, None] & (offs_n < N)[None]
        tl.store(y + choice[:, None] * N + offs_n[None], output.to(y.dtype.element_ty), mask)


@triton.jit
def _find_block(
    counts, EXPERTS: tl.constexpr, N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return a program's expert, or EXPERTS at least, its block of outputs, its first choice, and the expert's number
    of choices.
    """
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid_m, pid_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N
    offs_e = tl.arange(0, BLOCK_E)
    of_experts = tl.load(counts + offs_e, offs_e < EXPERTS, 0)
    ends = tl.cumsum(tl.cdiv(of_experts, BLOCK_M), 0)
    expert = tl.sum((ends <= pid_m).to(tl.int32), 0)
    first = pid_m - tl.max(tl.where(ends <= pid_m, ends, 0), 0)
    return expert, pid_n, first * BLOCK_M, tl.sum(tl.where(offs_e == expert, of_experts, 0), 0)


@triton.jit(do_not_specialize=["tokens"])
def _multiply_codes_kernel(
    rows,
    words,
    scales,
    counts,
    choices,
    y,
    tokens,
    FORMAT: tl.constexpr,
    CHOICES_PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    IN_CODE_ORDER: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Do the same as `_multiply_choices_kernel` in bfloat16 with a quantized weight, which `weights.convert_codes`
    converts. If at most half a tile's choices are left, they take half a tile.

    Args:
        rows: in the order of `weights.in_code_order`.
        words: a tensor descriptor of `weights.words_of`, [EXPERTS * NUM_WEIGHTS, N, K / 4].
        IN_CODE_ORDER: write the outputs in this order too.
    """
    expert, pid_n, first, count = _find_block(counts, EXPERTS, N, BLOCK_E, BLOCK_M, BLOCK_N)
    if expert < EXPERTS:
        choices += expert.to(tl.int64) * tokens
        where = expert, pid_n, first, count
        if count - first > BLOCK_M // 2:
            _multiply_codes(
                rows, words, scales, choices, y, where, FORMAT, CHOICES_PER_ROW, N, K, NUM_WEIGHTS, IN_CODE_ORDER,
                BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
            )  # fmt: skip
        else:
            _multiply_codes(
                rows, words, scales, choices, y, where, FORMAT, CHOICES_PER_ROW, N, K, NUM_WEIGHTS, IN_CODE_ORDER,
                BLOCK_M // 2, BLOCK_N, BLOCK_K, PRECISION
            )  # fmt: skip


@triton.jit
def _multiply_codes(
    rows,
    words,
    scales,
    choices,
    y,
    where,
    FORMAT: tl.constexpr,
    CHOICES_PER_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    IN_CODE_ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M choices.

    Args:
        choices: of the expert.
        where: what `_find_block` returns.
    """
    expert, pid_n, first, count = where
    ROWS: tl.constexpr = NUM_WEIGHTS * BLOCK_N
    offs_m, offs_n = first + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < count
    choice = tl.load(choices + offs_m, mask_m, 0).to(tl.int64)
    x_ptrs = rows + (choice // CHOICES_PER_ROW)[:, None] * K + tl.arange(0, BLOCK_K)[None]
    row = expert.to(tl.int64) * (NUM_WEIGHTS * N) + rows_of_weights(pid_n * BLOCK_N, N, NUM_WEIGHTS, BLOCK_N)
    scale_ptrs = scale_ptrs_of(scales, row, K, FORMAT)
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        codes = words.load([expert * NUM_WEIGHTS, pid_n * BLOCK_N, start // 4])
        weights = convert_codes(tl.reshape(codes, [ROWS, BLOCK_K // 4]), scale_ptrs, start, FORMAT)
        acc = tl.dot(weights, tl.trans(tl.load(x_ptrs + start)), acc, input_precision=PRECISION)
        wait_for_tensor_cores(start)
    acc = tl.trans(scale_outputs(acc, scale_ptrs, FORMAT))
    output = outputs_of(acc, NUM_WEIGHTS, y.dtype.element_ty).to(y.dtype.element_ty)
    if IN_CODE_ORDER:
        output = code_order(output)
    choice = tl.load(choices + offs_m, mask_m, 0).to(tl.int64)  # once more, not kept in registers until here
    tl.store(y + choice[:, None] * N + offs_n[None], output, mask_m[:, None] & (offs_n < N)[None])


@triton.jit
def _multiply_quantized_tile(
    rows,
    weight,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Do the same as `products.multiply_tile` with a quantized weight, `weights.stored`; the bits are those of the
    dequantized weight.

    Weights are the left operand because tensor cores can take that from registers, where they are dequantized.
    """
    offs_k = tl.arange(0, BLOCK_K)
    row = rows_of_weights(first, N, NUM_WEIGHTS, BLOCK_N)
    acc = tl.zeros([NUM_WEIGHTS * BLOCK_N, rows.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        tile = load_columns(rows + offs_k[None], start, offs_k[None], K, BLOCK_K)
        weights = load_numbers(weight, row, None, start, K, BLOCK_K, tile.dtype)
        acc = tl.dot(weights, tl.trans(tile), acc, input_precision=PRECISION)
        if tile.dtype != tl.float32:
            acc = finished(acc)
    return tl.trans(acc)


@triton.jit
def _add_choices_kernel(y, topk_weights, output, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr):
    """Add a token's choices, in their order.

    Grid: (tokens, cdiv(HIDDEN, BLOCK_H)).

    Args:
        y: [tokens * TOP_K, HIDDEN].
        topk_weights: [tokens, TOP_K] in float32.
        output: [tokens, HIDDEN].
    """
    token, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs < HIDDEN
    total = tl.zeros([BLOCK_H], tl.float32)
    for place in tl.static_range(TOP_K):
        choice = token * TOP_K + place
        total += tl.load(topk_weights + choice) * tl.load(y + choice * HIDDEN + offs, mask, 0.0).to(tl.float32)
    tl.store(output + token * HIDDEN + offs, total.to(output.dtype.element_ty), mask)
