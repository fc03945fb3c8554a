"""The feed-forward part of a layer with experts, for one token per sequence, as three operators.

The weights of an expert are read once for all sequences that chose it, and not at all if none did. With several
sequences, idle ones (of length 0) choose no experts. `ops.gpu.experts` says how kernels choose experts.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops import moe, norm
from granite4_neuron.ops.gpu.experts import (
    expert_keys,
    expert_of_key,
    load_expert_keys,
    topk_of_keys,
    without_key,
)
from granite4_neuron.ops.gpu.gemm import gemm, gemm_config, gemm_grid, rows_of_program
from granite4_neuron.ops.gpu.gemv import gemv, gemv_config, load_tile, load_vector, rms_norm
from granite4_neuron.ops.gpu.launch import NUM_WARPS_SMALL, gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.ops.gpu.linear import multiply_rows
from granite4_neuron.ops.gpu.operator import for_one_row, operator, register_launch
from granite4_neuron.ops.gpu.token_mlp import activate_rows, activate_tiles
from granite4_neuron.ops.gpu.triton_utils import tl, triton
from granite4_neuron.ops.xla.topk import topk_softmax

# Warps of programs for one row of the second products.
_NUM_WARPS_OF_ROW = 2
# Elements of the router's weight that a program reads, and columns of a program that adds outputs.
_ROUTER_BLOCK_SIZE = 8192
_SUM_BLOCK_N = 512

# -- norm and router


@operator()
def route(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise, and compute `ops.router_logits`.

    Args:
        x: [batch, columns], float32.
        weight: [num_experts, columns].

    Returns:
        (normalised x in norm_weight's dtype, logits [batch, num_experts] in float32).
    """
    normed = norm.rms_norm(x, norm_weight, eps)
    return normed, moe.router_logits(normed, weight)


@route.register_fake
def _(x, norm_weight, weight, eps):
    return norm_weight.new_empty(x.shape), x.new_empty(len(x), len(weight))


def _launch_route_of_one(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts, columns = weight.shape
    normed, logits = norm_weight.new_empty(x.shape), x.new_empty(1, num_experts)
    # There are few rows, so each has a program of its own, to take as little time as possible.
    _route_of_one_kernel[num_experts,](
        x,
        norm_weight,
        weight,
        normed,
        logits,
        eps,
        K=columns,
        BLOCK_K=triton.next_power_of_2(columns),
        **launch_options(x, NUM_WARPS_SMALL),
    )
    return normed, logits


def _launch_route(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_experts, columns), batch = weight.shape, len(x)
    normed, logits = norm_weight.new_empty(x.shape), x.new_empty(batch, num_experts)
    block_k = triton.next_power_of_2(columns)
    block_e = max(1, min(_ROUTER_BLOCK_SIZE // block_k, triton.next_power_of_2(num_experts)))
    _route_kernel[triton.cdiv(num_experts, block_e), batch](
        x,
        norm_weight,
        weight,
        normed,
        logits,
        eps,
        NUM_EXPERTS=num_experts,
        K=columns,
        BLOCK_E=block_e,
        BLOCK_K=block_k,
        **launch_options(x, NUM_WARPS_SMALL),
    )
    return normed, logits


register_launch(route, _launch_route)
route_of_one = for_one_row(route, _launch_route_of_one)


@triton.jit
def _route_of_one_kernel(
    x, norm_weight, weight, normed, logits, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, USE_GDC: tl.constexpr
):
    """Compute one expert's logit of one sequence; the first program also stores the normalised vector.

    Grid: (num_experts,).

    Args:
        x: [K] in float32, before its norm.
        norm_weight: [K].
        weight: [num_experts, K].
        normed: [K] in norm_weight's dtype.
        logits: [num_experts] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    offs_k = tl.arange(0, BLOCK_K)
    pid_e = tl.program_id(0)
    row = load_vector(weight + pid_e * K, offs_k, K)
    norm_weights = load_vector(norm_weight, offs_k, K)
    gdc_wait(USE_GDC)
    values = rms_norm(load_vector(x, offs_k, K), norm_weights, eps, K)
    tl.store(logits + pid_e + tl.arange(0, 1), gemv(row, values))
    if pid_e == 0:
        tl.store(normed + offs_k[None], values.to(normed.dtype.element_ty), (offs_k < K)[None])


@triton.jit
def _route_kernel(
    x,
    norm_weight,
    weight,
    normed,
    logits,
    eps,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_E experts' logits of one sequence; the sequence's first program also stores its normalised vector.

    Grid: (cdiv(NUM_EXPERTS, BLOCK_E), batch).

    Args:
        x: [batch, K] in float32, before its norm.
        norm_weight: [K].
        weight: [NUM_EXPERTS, K].
        normed: [batch, K] in norm_weight's dtype.
        logits: [batch, NUM_EXPERTS] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    pid_m, offs_k = tl.program_id(1), tl.arange(0, BLOCK_K)
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    tile = load_tile(weight, offs_e, NUM_EXPERTS, offs_k, K)
    norm_weights = load_vector(norm_weight, offs_k, K)
    gdc_wait(USE_GDC)
    values = rms_norm(load_vector(x + pid_m * K, offs_k, K), norm_weights, eps, K)
    tl.store(logits + pid_m * NUM_EXPERTS + offs_e, gemv(tile, values), offs_e < NUM_EXPERTS)
    if tl.program_id(0) == 0:
        ptrs = normed + pid_m * K + offs_k[None]
        tl.store(ptrs, values.to(normed.dtype.element_ty), (offs_k < K)[None])


# -- activations of the shared MLP and of the experts


@operator()
def activate_experts(
    normed: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the activations of the shared MLP and of the experts that the router chose.

    Args:
        normed, router_logits: from `route`.
        weight: [2 * width of the shared MLP, columns], gate rows first.
        w1: [num_experts, 2 * width of an expert, columns], gate rows first.
        lengths: [batch], int32; where it is 0 the experts' activations are unspecified.

    Returns:
        ([batch, width of the shared MLP], [batch * top_k, width of an expert]) in the weights' dtype.
    """
    ids = topk_softmax(router_logits, top_k)[1].flatten()
    return moe.silu_and_mul(F.linear(normed, weight)), multiply_rows(normed, w1, ids, True)


@activate_experts.register_fake
def _(normed, weight, w1, router_logits, lengths, top_k):
    tokens = len(normed)
    return normed.new_empty(tokens, len(weight) // 2), normed.new_empty(tokens * top_k, w1.shape[1] // 2)


def _launch_activate_experts_of_one(
    normed: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_experts, expert_rows, columns), rows = w1.shape, len(weight) // 2
    expert_rows //= 2
    activated, expert_activated = weight.new_empty(1, rows), weight.new_empty(top_k, expert_rows)
    block_k = triton.next_power_of_2(columns)
    block_n, num_tiles, num_warps = gemv_config(rows + top_k * expert_rows, block_k, 2)
    size = block_n * num_tiles
    _activate_experts_of_one_kernel[triton.cdiv(rows, size) + top_k * triton.cdiv(expert_rows, size),](
        normed,
        weight,
        w1,
        router_logits,
        activated,
        expert_activated,
        N=rows,
        EXPERT_N=expert_rows,
        K=columns,
        NUM_EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        BLOCK_N=block_n,
        NUM_TILES=num_tiles,
        BLOCK_K=block_k,
        **launch_options(normed, num_warps),
    )
    return activated, expert_activated


def _launch_activate_experts(
    normed: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_experts, expert_rows, _), rows, batch = w1.shape, len(weight) // 2, len(normed)
    expert_rows //= 2
    activated, expert_activated = weight.new_empty(batch, rows), weight.new_empty(batch * top_k, expert_rows)
    options = gemm_config(normed, rows + min(num_experts, batch * top_k) * expert_rows, 2)
    num_programs = triton.cdiv(rows, options["BLOCK_N"]) + num_experts * triton.cdiv(expert_rows, options["BLOCK_N"])
    _activate_experts_kernel[gemm_grid(batch, num_programs)](
        normed,
        weight,
        w1,
        router_logits,
        lengths,
        activated,
        expert_activated,
        N=rows,
        EXPERT_N=expert_rows,
        NUM_EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        **options,
    )
    return activated, expert_activated


register_launch(activate_experts, _launch_activate_experts)
activate_experts_of_one = for_one_row(activate_experts, _launch_activate_experts_of_one)


@triton.jit
def _activate_experts_of_one_kernel(
    normed,
    weight,
    w1,
    router_logits,
    activated,
    expert_activated,
    N: tl.constexpr,
    EXPERT_N: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute NUM_TILES * BLOCK_N activations of one sequence, of the shared MLP or of one of its TOP_K experts.

    Grid: (cdiv(N, SIZE) + TOP_K * cdiv(EXPERT_N, SIZE),), SIZE = NUM_TILES * BLOCK_N.

    Args:
        normed: [K] in the weights' dtype.
        weight: [2 * N, K], gate rows first.
        w1: [NUM_EXPERTS, 2 * EXPERT_N, K], gate rows first.
        router_logits: [NUM_EXPERTS] in float32.
        activated: [N].
        expert_activated: [TOP_K, EXPERT_N].
    """
    SIZE: tl.constexpr = BLOCK_N * NUM_TILES
    SHARED_PROGRAMS: tl.constexpr = (N + SIZE - 1) // SIZE
    EXPERT_PROGRAMS: tl.constexpr = (EXPERT_N + SIZE - 1) // SIZE
    pid = tl.program_id(0)
    offs_k = tl.arange(0, BLOCK_K)
    if pid < SHARED_PROGRAMS:
        offs_n = pid * SIZE + tl.arange(0, BLOCK_N)
        gate = load_tile(weight, offs_n, N, offs_k, K)
        up = load_tile(weight + N * K, offs_n, N, offs_k, K)
        gdc_wait(USE_GDC)
        gdc_launch_dependents(USE_GDC)  # the next kernel reads the router's logits before its own gdc_wait
        values = load_vector(normed, offs_k, K).to(tl.float32)
        activate_tiles(gate, up, values, weight, activated, offs_n, N, offs_k, K, BLOCK_N, NUM_TILES)
    else:
        rank = (pid - SHARED_PROGRAMS) // EXPERT_PROGRAMS
        offs_n = (pid - SHARED_PROGRAMS) % EXPERT_PROGRAMS * SIZE + tl.arange(0, BLOCK_N)
        gdc_wait(USE_GDC)
        gdc_launch_dependents(USE_GDC)
        expert = _expert_of_rank(router_logits, rank, NUM_EXPERTS, BLOCK_E)
        w1 += expert.to(tl.int64) * (2 * EXPERT_N * K)
        gate = load_tile(w1, offs_n, EXPERT_N, offs_k, K)
        up = load_tile(w1 + EXPERT_N * K, offs_n, EXPERT_N, offs_k, K)
        values = load_vector(normed, offs_k, K).to(tl.float32)
        y = expert_activated + rank * EXPERT_N
        activate_tiles(gate, up, values, w1, y, offs_n, EXPERT_N, offs_k, K, BLOCK_N, NUM_TILES)


@triton.jit
def _expert_of_rank(router_logits, rank, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the expert of this rank: `rank` experts have larger logits."""
    keys = load_expert_keys(router_logits, NUM_EXPERTS, BLOCK_E, "")
    for _ in range(rank):
        keys = without_key(keys, tl.max(keys, 0))
    return expert_of_key(tl.max(keys, 0), BLOCK_E)


@triton.jit
def _activate_experts_kernel(
    x,
    weight,
    w1,
    router_logits,
    lengths,
    activated,
    expert_activated,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    N: tl.constexpr,
    EXPERT_N: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N activations of the shared MLP for BLOCK_M of M tokens, or of an expert for those that chose it.

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N) + NUM_EXPERTS * cdiv(EXPERT_N, BLOCK_N)).

    Args:
        x: [M, K] in the weights' dtype, normalised.
        weight: [2 * N, K], gate rows first.
        w1: [NUM_EXPERTS, 2 * EXPERT_N, K], gate rows first.
        router_logits: [M, NUM_EXPERTS] in float32.
        lengths: [M] int32.
        activated: [M, N].
        expert_activated: [M * TOP_K, EXPERT_N].
    """
    gdc_launch_dependents(USE_GDC)
    SHARED_PROGRAMS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    EXPERT_PROGRAMS: tl.constexpr = (EXPERT_N + BLOCK_N - 1) // BLOCK_N
    pid, offs_m = tl.program_id(1), rows_of_program(M, BLOCK_M)
    mask_m = offs_m < M
    is_real = tl.load(lengths + offs_m, mask_m, 0) > 0
    gdc_wait(USE_GDC)
    if pid < SHARED_PROGRAMS:
        offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
        activate_rows(x, weight, activated, offs_n, N, offs_m, offs_m, mask_m, K, BLOCK_K)
    else:
        expert = (pid - SHARED_PROGRAMS) // EXPERT_PROGRAMS
        offs_n = (pid - SHARED_PROGRAMS) % EXPERT_PROGRAMS * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_y, is_chosen = _choices_of_expert(router_logits, expert, offs_m, is_real, NUM_EXPERTS, BLOCK_E, TOP_K)
        if _any(is_chosen):
            w1 += expert.to(tl.int64) * (2 * EXPERT_N * K)
            activate_rows(x, w1, expert_activated, offs_n, EXPERT_N, offs_m, offs_y, is_chosen, K, BLOCK_K)


@triton.jit
def _choices_of_expert(
    router_logits, expert, offs_m, is_real, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr
):
    """Return, for each token, which of all M * TOP_K choices is this expert, and whether a real token chose it: two of
    [BLOCK_M].
    """
    offs_e = tl.arange(0, BLOCK_E)[None]
    ptrs = router_logits + offs_m[:, None] * NUM_EXPERTS + offs_e
    keys = expert_keys(tl.load(ptrs, is_real[:, None] & (offs_e < NUM_EXPERTS), -float("inf")), offs_e, BLOCK_E)
    key = tl.sum(tl.where(offs_e == expert, keys, 0), 1)
    rank = tl.sum((keys > key[:, None]).to(tl.int32), 1)
    return offs_m * TOP_K + rank, is_real & (rank < TOP_K)


@triton.jit
def _any(mask):
    return tl.sum(mask.to(tl.int32), 0) > 0


# -- outputs of the shared MLP and of the experts, added to the residual


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
    residual = norm.residual_add(residual, F.linear(activated, weight), alpha)
    y = multiply_rows(expert_activated, w2, ids.flatten(), False).view(*ids.shape, -1)
    return norm.residual_add(residual, (y * topk_weights[..., None]).sum(1).to(y.dtype), alpha)


@add_feed_forward.register_fake
def _(residual, *others):
    return torch.empty_like(residual)


def _launch_add_feed_forward_of_one(
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: torch.Tensor,
    expert_activated: torch.Tensor,
    w2: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    (rows, columns), (top_k, expert_columns), num_experts = weight.shape, expert_activated.shape, len(w2)
    y = torch.empty_like(residual)
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
        NUM_EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        BLOCK_TOPK=triton.next_power_of_2(top_k),
        BLOCK_K=triton.next_power_of_2(columns),
        BLOCK_EXPERT_K=triton.next_power_of_2(expert_columns),
        **launch_options(residual, _NUM_WARPS_OF_ROW),
    )
    return y


def _launch_add_feed_forward(
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: torch.Tensor,
    expert_activated: torch.Tensor,
    w2: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    batch, (choices, expert_columns) = len(activated), expert_activated.shape
    (num_experts, rows, _), top_k = w2.shape, choices // batch
    shared, chosen, y = weight.new_empty(batch, rows), weight.new_empty(choices, rows), torch.empty_like(residual)
    options = gemm_config(activated, rows * (1 + min(num_experts, choices)))
    block_e = triton.next_power_of_2(num_experts)
    _multiply_outputs_kernel[gemm_grid(batch, triton.cdiv(rows, options["BLOCK_N"]) * (1 + num_experts))](
        activated,
        weight,
        expert_activated,
        w2,
        router_logits,
        lengths,
        shared,
        chosen,
        N=rows,
        EXPERT_K=expert_columns,
        NUM_EXPERTS=num_experts,
        BLOCK_E=block_e,
        TOP_K=top_k,
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
        NUM_EXPERTS=num_experts,
        BLOCK_E=block_e,
        TOP_K=top_k,
        BLOCK_TOPK=triton.next_power_of_2(top_k),
        BLOCK_N=sum_block_n,
        **launch_options(residual, NUM_WARPS_SMALL),
    )
    return y


register_launch(add_feed_forward, _launch_add_feed_forward)
add_feed_forward_of_one = for_one_row(add_feed_forward, _launch_add_feed_forward_of_one)


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
    shared = gemv(shared_row, load_vector(activated, offs_k, K).to(tl.float32)).to(DTYPE).to(tl.float32)
    values = tl.load(expert_activated + offs_topk[:, None] * EXPERT_K + offs_ek, mask, 0.0)
    products = gemv(expert_rows, values.to(tl.float32)).to(DTYPE).to(tl.float32)
    total = tl.sum(topk_weights * products, 0).to(DTYPE).to(tl.float32)
    offs_n = pid_n + tl.arange(0, 1)
    tl.store(y + offs_n, tl.load(residual + offs_n) + alpha * shared + alpha * total)


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
        weight: [N, K].
        expert_activated: [M * TOP_K, EXPERT_K].
        w2: [NUM_EXPERTS, N, EXPERT_K].
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
        offs_choice, is_chosen = _choices_of_expert(
            router_logits, pid_weight - 1, offs_m, is_real, NUM_EXPERTS, BLOCK_E, TOP_K
        )
        if _any(is_chosen):
            w2 += (pid_weight - 1).to(tl.int64) * (N * EXPERT_K)
            _store_product(w2, expert_activated, chosen, offs_n, N, offs_choice, is_chosen, EXPERT_K, BLOCK_K)


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
