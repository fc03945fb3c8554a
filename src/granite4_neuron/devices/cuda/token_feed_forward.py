"""The outputs of experts and of the shared MLP beside them, added to the residual, for one token per sequence.

It reads the weights of experts as `token_experts` does.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.config.choices import INT4_GROUP
from granite4_neuron.devices.cuda.experts import any_of, choices_of_expert, load_expert_keys, topk_of_keys
from granite4_neuron.devices.cuda.gemm import gemm, gemm_config, gemm_grid, rows_of_program
from granite4_neuron.devices.cuda.gemv import load_vector
from granite4_neuron.devices.cuda.launch import NUM_WARPS_SMALL, gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.linear import multiply_rows
from granite4_neuron.devices.cuda.operator import operator, register_launches
from granite4_neuron.devices.cuda.triton_utils import dtype_of, tl, triton
from granite4_neuron.devices.cuda.weights import (
    dense,
    empty_vector,
    gemv,
    load_factor,
    load_prepared,
    load_tile,
    load_tile_of_experts,
    pieces_of,
    rows_from,
    store_block,
    store_vector,
    stored,
)
from granite4_neuron.devices.graphs.topk import topk_softmax
from granite4_neuron.ops import norm

# Warps of programs for one row of the second products.
_NUM_WARPS_OF_ROW = 2
# (BLOCK_N, num_warps) of the second products of one row with quantized weights, and with those of FP8.
_QUANTIZED_CONFIG, _FP8_CONFIG = (2, 1), (4, 4)
# Columns of a program that adds outputs.
_SUM_BLOCK_N = 512


@operator()
def add_feed_forward(
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: torch.Tensor,
    expert_activated: torch.Tensor,
    w2: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    alpha: float,
    scales: torch.Tensor | None = None,
    w2_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute residual + alpha * (the shared MLP's output) + alpha * (the experts' weighted sum).

    Args:
        residual: [batch, rows], float32.
        activated, expert_activated: from `activate_experts`.
        weight: [rows, width of the shared MLP].
        w2: [num_experts, rows, width of an expert].
        router_logits: from `route`.
        lengths: [batch], int32; where it is 0 the result is unspecified.
    """
    topk_weights, ids = topk_softmax(router_logits, len(expert_activated) // len(activated))
    weight = dense(weight, scales, activated.shape[1], activated.dtype)
    residual = norm.residual_add(residual, F.linear(activated, weight), alpha)
    y = multiply_rows(expert_activated, w2, ids.flatten(), False, w2_scales).view(*ids.shape, -1)
    return norm.residual_add(residual, (y * topk_weights[..., None]).sum(1).to(y.dtype), alpha)


@add_feed_forward.register_fake
def _(residual, *others):
    return torch.empty_like(residual)


def _launch_add_feed_forward(
    one_row: bool,
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: torch.Tensor,
    expert_activated: torch.Tensor,
    w2: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    alpha: float,
    scales: torch.Tensor | None = None,
    w2_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    (batch, columns), (choices, expert_columns) = activated.shape, expert_activated.shape
    (num_experts, rows, _), top_k = w2.shape, choices // batch
    matrix, of_experts_2 = stored(weight, scales), stored(w2, w2_scales)
    y = torch.empty_like(residual)
    of_experts = dict(NUM_EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), TOP_K=top_k)
    block_topk = triton.next_power_of_2(top_k)
    if one_row and scales is not None:
        arguments = residual, activated, matrix, expert_activated, of_experts_2, router_logits, y, alpha
        _launch_quantized_of_one(*arguments, **of_experts)
        return y
    if one_row:
        _add_feed_forward_of_one_kernel[rows,](
            residual,
            activated,
            weight,
            expert_activated,
            w2,
            router_logits,
            y,
            alpha,
            N=rows,
            K=columns,
            EXPERT_K=expert_columns,
            BLOCK_TOPK=block_topk,
            BLOCK_K=triton.next_power_of_2(columns),
            BLOCK_EXPERT_K=triton.next_power_of_2(expert_columns),
            **of_experts,
            **launch_options(residual, _NUM_WARPS_OF_ROW),
        )
        return y
    shared, chosen = activated.new_empty(batch, rows), activated.new_empty(choices, rows)
    options = gemm_config(activated, rows * (1 + min(num_experts, choices)))
    _multiply_outputs_kernel[gemm_grid(batch, triton.cdiv(rows, options["BLOCK_N"]) * (1 + num_experts))](
        activated,
        matrix,
        expert_activated,
        of_experts_2,
        router_logits,
        lengths,
        shared,
        chosen,
        N=rows,
        EXPERT_K=expert_columns,
        **of_experts,
        **options,
    )
    sum_block_n = min(_SUM_BLOCK_N, triton.next_power_of_2(rows))
    _add_outputs_kernel[batch, triton.cdiv(rows, sum_block_n)](
        residual,
        shared,
        chosen,
        router_logits,
        lengths,
        y,
        alpha,
        N=rows,
        BLOCK_TOPK=block_topk,
        BLOCK_N=sum_block_n,
        **of_experts,
        **launch_options(residual, NUM_WARPS_SMALL),
    )
    return y


add_feed_forward_of_one = register_launches(add_feed_forward, _launch_add_feed_forward)


@triton.jit
def _add_feed_forward_of_one_kernel(
    residual,
    activated,
    weight,
    expert_activated,
    w2,
    router_logits,
    y,
    alpha,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERT_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_EXPERT_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute one output of one sequence, of the shared MLP and all its experts.

    Grid: (N,).

    Args:
        residual, y: [N] in float32.
        activated: [K].
        weight: [N, K].
        expert_activated: [TOP_K, EXPERT_K].
        w2: [NUM_EXPERTS, N, EXPERT_K].
        router_logits: [NUM_EXPERTS] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    pid_n, offs_k = tl.program_id(0), tl.arange(0, BLOCK_K)
    shared_row = load_vector(weight + pid_n * K, offs_k, K)
    # `route` has ended: `activate_experts` lets this kernel begin only after its own `gdc_wait`. The load bypasses the
    # multiprocessor's cache, which may hold older values until this kernel's `gdc_wait`.
    keys = load_expert_keys(router_logits, NUM_EXPERTS, BLOCK_E, ".cg")
    topk_ids, topk_weights = topk_of_keys(keys, TOP_K, BLOCK_TOPK)
    offs_topk = tl.arange(0, BLOCK_TOPK)
    offs_ek = tl.arange(0, BLOCK_EXPERT_K)[None]
    mask = (offs_topk < TOP_K)[:, None] & (offs_ek < EXPERT_K)
    # A row of each chosen expert, in one load, so that all are loaded at the same time.
    offs_expert = topk_ids.to(tl.int64)[:, None] * (N * EXPERT_K)
    expert_rows = tl.load(w2 + offs_expert + pid_n * EXPERT_K + offs_ek, mask, 0.0)
    gdc_wait(USE_GDC)

    DTYPE: tl.constexpr = weight.dtype.element_ty
    factor = load_vector(activated, offs_k, K).to(tl.float32)
    shared = gemv((shared_row,), (factor,), USE_GDC).to(DTYPE).to(tl.float32)
    values = tl.load(expert_activated + offs_topk[:, None] * EXPERT_K + offs_ek, mask, 0.0)
    products = gemv((expert_rows,), (values.to(tl.float32),), USE_GDC).to(DTYPE).to(tl.float32)
    total = tl.sum(topk_weights * products, 0).to(DTYPE).to(tl.float32)
    offs_n = pid_n + tl.arange(0, 1)
    tl.store(y + offs_n, tl.load(residual + offs_n) + alpha * shared + alpha * total)


def _launch_quantized_of_one(
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: tuple[torch.Tensor, ...],
    expert_activated: torch.Tensor,
    w2: tuple[torch.Tensor, ...],
    router_logits: torch.Tensor,
    y: torch.Tensor,
    alpha: float,
    **of_experts: int,
) -> None:
    """Launch the kernels for one row with quantized weights; arguments as for `_add_quantized_of_one_kernel`."""
    columns, (top_k, expert_columns), rows = activated.shape[1], expert_activated.shape, y.shape[1]
    has_bytes = w2[1].dtype == torch.float32
    pieces, expert_pieces = pieces_of(columns, has_bytes), pieces_of(expert_columns, has_bytes)
    vector = empty_vector(activated, weight[0], has_bytes, pieces)
    chosen = empty_vector(activated, w2[0], has_bytes, top_k * expert_pieces)
    experts = torch.empty(top_k, dtype=torch.int32, device=y.device)
    block_k = max(INT4_GROUP, triton.next_power_of_2(expert_columns))
    _prepare_activated_kernel[top_k + triton.cdiv(columns, block_k),](
        activated,
        expert_activated,
        router_logits,
        vector,
        chosen,
        experts,
        K=columns,
        EXPERT_K=expert_columns,
        HAS_BYTES=has_bytes,
        PIECES=pieces,
        EXPERT_PIECES=expert_pieces,
        BLOCK_TOPK=triton.next_power_of_2(top_k),
        BLOCK_K=block_k,
        **of_experts,
        **launch_options(y, NUM_WARPS_SMALL),
    )
    block_n, num_warps = _FP8_CONFIG if len(chosen) == 1 else _QUANTIZED_CONFIG
    _add_quantized_of_one_kernel[triton.cdiv(rows, block_n),](
        residual,
        vector,
        weight,
        chosen,
        w2,
        experts,
        y,
        alpha,
        DTYPE=dtype_of(activated),
        N=rows,
        K=columns,
        EXPERT_K=expert_columns,
        TOP_K=top_k,
        BLOCK_N=block_n,
        BLOCK_K=max(INT4_GROUP, triton.next_power_of_2(columns)),
        PIECES=expert_pieces,
        BLOCK_PIECES=triton.next_power_of_2(top_k * expert_pieces),
        **launch_options(y, num_warps),
    )


@triton.jit
def _prepare_activated_kernel(
    activated,
    expert_activated,
    router_logits,
    vector,
    chosen,
    experts,
    K: tl.constexpr,
    EXPERT_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    EXPERT_PIECES: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Prepare the activations of one of the chosen experts, times its weight, and write its number; or prepare BLOCK_K
    activations of the shared MLP.

    Grid: (TOP_K + cdiv(K, BLOCK_K),).

    Args:
        activated: [K].
        expert_activated: [TOP_K, EXPERT_K].
        router_logits: [NUM_EXPERTS] in float32.
        vector: a prepared vector of PIECES pieces.
        chosen: a prepared vector of TOP_K * EXPERT_PIECES pieces.
        experts: [TOP_K] int32.
    """
    gdc_launch_dependents(USE_GDC)
    rank, offs_topk, offs_k = tl.program_id(0), tl.arange(0, BLOCK_TOPK), tl.arange(0, BLOCK_K)
    if rank < TOP_K:
        # `route` has ended, and the load bypasses a cache, as in `_add_feed_forward_of_one_kernel`.
        keys = load_expert_keys(router_logits, NUM_EXPERTS, BLOCK_E, ".cg")
        topk_ids, topk_weights = topk_of_keys(keys, TOP_K, BLOCK_TOPK)
        factor = tl.sum(tl.where(offs_topk == rank, topk_weights, 0.0), 0)
        gdc_wait(USE_GDC)
        tl.store(experts + offs_topk, topk_ids, offs_topk == rank)
        values = load_vector(expert_activated + rank * EXPERT_K, offs_k, EXPERT_K).to(tl.float32) * factor
        store_vector(chosen, values, rank * EXPERT_PIECES, EXPERT_PIECES, TOP_K * EXPERT_PIECES, HAS_BYTES)
    else:
        gdc_wait(USE_GDC)
        values = load_vector(activated, (rank - TOP_K) * BLOCK_K + offs_k, K).to(tl.float32)
        store_block(vector, values, rank - TOP_K, PIECES, HAS_BYTES)


@triton.jit
def _add_quantized_of_one_kernel(
    residual,
    activated,
    weight,
    chosen,
    w2,
    experts,
    y,
    alpha,
    DTYPE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERT_K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N outputs of one sequence, of the shared MLP and all its experts, with quantized weights.

    Grid: (cdiv(N, BLOCK_N),).

    Args:
        residual, y: [N] in float32.
        activated: [K], prepared.
        weight: [N, K], `weights.stored`.
        chosen: [TOP_K * EXPERT_K], prepared, times the weights of experts.
        w2: [NUM_EXPERTS, N, EXPERT_K], `weights.stored`.
        experts: [TOP_K] int32, the experts of `chosen`.
        DTYPE: of products.
        PIECES: of an expert's row.
    """
    gdc_launch_dependents(USE_GDC)
    offs_n, offs_k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    shared_tile = load_tile(weight, offs_n, N, offs_k, K)
    offs_piece = tl.arange(0, BLOCK_PIECES)
    is_chosen = offs_piece < TOP_K * PIECES
    gdc_wait(USE_GDC)
    ids = tl.load(experts + offs_piece // PIECES, is_chosen, 0).to(tl.int64)
    tile = load_tile_of_experts(w2, ids, offs_piece % PIECES, is_chosen, offs_n, N, EXPERT_K)
    before = tl.load(residual + offs_n, offs_n < N, 0.0)
    shared = gemv(shared_tile, load_factor(activated, weight, offs_k, K), USE_GDC).to(DTYPE).to(tl.float32)
    factor = load_prepared(chosen, w2, TOP_K * PIECES, BLOCK_PIECES)
    total = gemv(tile, factor, USE_GDC).to(DTYPE).to(tl.float32)
    tl.store(y + offs_n, before + alpha * shared + alpha * total, offs_n < N)


@triton.jit
def _multiply_outputs_kernel(
    activated,
    weight,
    expert_activated,
    w2,
    router_logits,
    lengths,
    shared,
    chosen,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERT_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N outputs of the shared MLP for BLOCK_M of M tokens, or of an expert for those that chose it.

    Grid: (cdiv(M, BLOCK_M), (1 + NUM_EXPERTS) * cdiv(N, BLOCK_N)).

    Args:
        activated: [M, K].
        weight: [N, K], `weights.stored`.
        expert_activated: [M * TOP_K, EXPERT_K].
        w2: [NUM_EXPERTS, N, EXPERT_K], `weights.stored`.
        router_logits: [M, NUM_EXPERTS] in float32.
        lengths: [M] int32.
        shared: [M, N].
        chosen: [M * TOP_K, N].
    """
    PROGRAMS_PER_WEIGHT: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid_weight = tl.program_id(1) // PROGRAMS_PER_WEIGHT  # the shared MLP's, then the experts'
    offs_n = tl.program_id(1) % PROGRAMS_PER_WEIGHT * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = rows_of_program(M, BLOCK_M)
    mask_m = offs_m < M
    is_real = tl.load(lengths + offs_m, mask_m, 0) > 0
    gdc_wait(USE_GDC)
    gdc_launch_dependents(USE_GDC)  # the next kernel reads the router's logits before its own gdc_wait
    if pid_weight == 0:
        _store_product(weight, activated, shared, offs_n, N, offs_m, mask_m, K, BLOCK_K)
    else:
        offs_choice, is_chosen = choices_of_expert(
            router_logits, pid_weight - 1, offs_m, is_real, NUM_EXPERTS, BLOCK_E, TOP_K
        )
        if any_of(is_chosen):
            of_expert = rows_from(w2, (pid_weight - 1).to(tl.int64) * N, EXPERT_K)
            _store_product(of_expert, expert_activated, chosen, offs_n, N, offs_choice, is_chosen, EXPERT_K, BLOCK_K)


@triton.jit
def _store_product(weight, x, y, offs_n, N, offs_m, mask_m, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Multiply rows of a weight [N, K] with rows offs_m of x [.., K], and store them in the same rows of y [.., N]."""
    acc = gemm(weight, offs_n, N, x, offs_m, mask_m, K, BLOCK_K)
    ptrs = y + offs_m[None] * N + offs_n[:, None]
    tl.store(ptrs, acc.to(y.dtype.element_ty), (offs_n < N)[:, None] & mask_m[None])


@triton.jit
def _add_outputs_kernel(
    residual,
    shared,
    chosen,
    router_logits,
    lengths,
    y,
    alpha,
    N: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Add the residual, the shared MLP's output and the weighted sum of the experts' outputs: BLOCK_N of a sequence.

    Grid: (batch, cdiv(N, BLOCK_N)).

    Args:
        residual, y: [batch, N] in float32.
        shared: [batch, N].
        chosen: [batch * TOP_K, N], the outputs of each choice; not read where lengths is 0.
        router_logits: [batch, NUM_EXPERTS] in float32.
        lengths: [batch] int32.
    """
    gdc_launch_dependents(USE_GDC)
    pid_m, offs_topk = tl.program_id(0), tl.arange(0, BLOCK_TOPK)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n, is_real = offs_n < N, tl.load(lengths + pid_m) > 0
    # `route` has ended: `_multiply_outputs_kernel` lets this kernel begin only after its own `gdc_wait`. The load
    # bypasses the multiprocessor's cache, which may hold older values until this kernel's `gdc_wait`.
    keys = load_expert_keys(router_logits + pid_m * NUM_EXPERTS, NUM_EXPERTS, BLOCK_E, ".cg")
    _, topk_weights = topk_of_keys(keys, TOP_K, BLOCK_TOPK)
    gdc_wait(USE_GDC)

    mask = (is_real & (offs_topk < TOP_K))[:, None] & mask_n[None]
    products = tl.load(chosen + (pid_m * TOP_K + offs_topk[:, None]) * N + offs_n[None], mask, 0.0).to(tl.float32)
    DTYPE: tl.constexpr = chosen.dtype.element_ty
    total = tl.sum(topk_weights[:, None] * products, 0).to(DTYPE).to(tl.float32)
    offs = pid_m * N + offs_n
    outputs = tl.load(residual + offs, mask_n, 0.0) + alpha * tl.load(shared + offs, mask_n, 0.0).to(tl.float32)
    tl.store(y + offs, outputs + alpha * total, mask_n)
