"""The activations of experts and of the shared MLP beside them, for one token per sequence.

The weights of an expert are read once for all sequences that chose it, and not at all if none did. With several
sequences, idle ones (of length 0) choose no experts. `devices.cuda.experts` says how kernels choose experts.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.devices.cuda.experts import (
    any_of,
    choices_of_expert,
    expert_of_key,
    load_expert_keys,
    ranks_of_keys,
    without_key,
)
from granite4_neuron.devices.cuda.gemm import gemm_config, gemm_grid, rows_of_program
from granite4_neuron.devices.cuda.gemv import gemv_config, load_vector
from granite4_neuron.devices.cuda.launch import gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.linear import multiply_rows
from granite4_neuron.devices.cuda.operator import operator, register_launches
from granite4_neuron.devices.cuda.token_mlp import activate_rows, activate_tiles
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.cuda.weights import (
    NUM_WARPS_OF_VECTOR,
    block_of_vector,
    dense,
    empty_vector,
    load_factor,
    load_tile,
    pieces_of,
    rows_from,
    store_block,
    stored,
)
from granite4_neuron.devices.graphs.topk import topk_softmax
from granite4_neuron.ops import moe


@operator()
def activate_experts(
    normed: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    top_k: int,
    scales: torch.Tensor | None = None,
    w1_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the activations of the shared MLP and of the experts that the router chose.

    Args:
        normed, router_logits: from `route`.
        weight: [2 * width of the shared MLP, columns], gate rows first.
        w1: [num_experts, 2 * width of an expert, columns], gate rows first.
        lengths: [batch], int32; where it is 0 the experts' activations are unspecified.

    Returns:
        ([batch, width of the shared MLP], [batch * top_k, width of an expert]) in normed's dtype.
    """
    ids = topk_softmax(router_logits, top_k)[1].flatten()
    weight = dense(weight, scales, normed.shape[1], normed.dtype)
    return moe.silu_and_mul(F.linear(normed, weight)), multiply_rows(normed, w1, ids, True, w1_scales)


@activate_experts.register_fake
def _(normed, weight, w1, router_logits, lengths, top_k, *others):
    tokens = len(normed)
    return normed.new_empty(tokens, len(weight) // 2), normed.new_empty(tokens * top_k, w1.shape[1] // 2)


def _launch_activate_experts(
    one_row: bool,
    normed: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    top_k: int,
    scales: torch.Tensor | None = None,
    w1_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, columns), num_experts = normed.shape, len(w1)
    rows, expert_rows = len(weight) // 2, w1.shape[1] // 2
    matrices = stored(weight, scales), stored(w1, w1_scales)
    activated, expert_activated = normed.new_empty(batch, rows), normed.new_empty(batch * top_k, expert_rows)
    of_experts = dict(NUM_EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), TOP_K=top_k)
    if one_row:
        block_k = triton.next_power_of_2(columns)
        block_n, num_tiles, num_warps = gemv_config(rows + top_k * expert_rows, block_k, 2, w1.dtype)
        size = block_n * num_tiles
        vector: tuple[torch.Tensor, ...] = (normed,)
        experts = None
        if w1_scales is not None:
            vector, experts = _prepare(normed, w1, w1_scales, router_logits, **of_experts)
        _activate_experts_of_one_kernel[triton.cdiv(rows, size) + top_k * triton.cdiv(expert_rows, size),](
            vector,
            *matrices,
            router_logits,
            experts,
            activated,
            expert_activated,
            N=rows,
            EXPERT_N=expert_rows,
            K=columns,
            BLOCK_N=block_n,
            NUM_TILES=num_tiles,
            BLOCK_K=block_k,
            **of_experts,
            **launch_options(normed, num_warps),
        )
    else:
        options = gemm_config(normed, rows + min(num_experts, batch * top_k) * expert_rows, 2)
        block_n = options["BLOCK_N"]
        num_programs = triton.cdiv(rows, block_n) + num_experts * triton.cdiv(expert_rows, block_n)
        _activate_experts_kernel[gemm_grid(batch, num_programs)](
            normed,
            *matrices,
            router_logits,
            lengths,
            activated,
            expert_activated,
            N=rows,
            EXPERT_N=expert_rows,
            **of_experts,
            **options,
        )
    return activated, expert_activated


activate_experts_of_one = register_launches(activate_experts, _launch_activate_experts)


def _prepare(
    normed: torch.Tensor, w1: torch.Tensor, w1_scales: torch.Tensor, router_logits: torch.Tensor, **of_experts: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Prepare a vector as `weights.prepare` does. In the same launch choose experts, which are [TOP_K] in int32."""
    columns, has_bytes = normed.shape[1], w1_scales.dtype == torch.float32
    pieces, block_k = pieces_of(columns, has_bytes), block_of_vector(columns)
    vector = empty_vector(normed, w1, has_bytes, pieces)
    experts = torch.empty(of_experts["TOP_K"], dtype=torch.int32, device=normed.device)
    _prepare_kernel[1 + triton.cdiv(columns, block_k),](
        normed,
        router_logits,
        vector,
        experts,
        K=columns,
        HAS_BYTES=has_bytes,
        PIECES=pieces,
        BLOCK_K=block_k,
        **of_experts,
        **launch_options(normed, NUM_WARPS_OF_VECTOR),
    )
    return vector, experts


@triton.jit
def _prepare_kernel(
    normed,
    router_logits,
    vector,
    experts,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Choose TOP_K experts, or prepare BLOCK_K numbers of a vector.

    Grid: (1 + cdiv(K, BLOCK_K),).

    Args:
        normed: [K].
        router_logits: [NUM_EXPERTS] in float32.
        vector: a prepared vector of PIECES pieces.
        experts: [TOP_K] int32.
    """
    gdc_launch_dependents(USE_GDC)
    pid = tl.program_id(0)
    gdc_wait(USE_GDC)
    if pid == 0:
        ranks = ranks_of_keys(load_expert_keys(router_logits, NUM_EXPERTS, BLOCK_E, ""))
        tl.store(experts + ranks, tl.arange(0, BLOCK_E), ranks < TOP_K)
    else:
        values = load_vector(normed, (pid - 1) * BLOCK_K + tl.arange(0, BLOCK_K), K).to(tl.float32)
        store_block(vector, values, pid - 1, PIECES, HAS_BYTES)


@triton.jit
def _activate_experts_of_one_kernel(
    normed,
    weight,
    w1,
    router_logits,
    experts,
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
        normed: [K], or as `weights.prepare` returns it.
        weight: [2 * N, K], gate rows first; `weights.stored`.
        w1: [NUM_EXPERTS, 2 * EXPERT_N, K], gate rows first; `weights.stored`.
        router_logits: [NUM_EXPERTS] in float32.
        experts: [TOP_K] int32, those that they choose; None if no kernel before has chosen them.
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
        up = load_tile(rows_from(weight, N, K), offs_n, N, offs_k, K)
        gdc_wait(USE_GDC)
        gdc_launch_dependents(USE_GDC)  # the next kernel reads the router's logits before its own gdc_wait
        factor = load_factor(normed, weight, offs_k, K)
        activate_tiles(gate, up, factor, weight, activated, offs_n, N, offs_k, K, BLOCK_N, NUM_TILES, USE_GDC)
    else:
        rank = (pid - SHARED_PROGRAMS) // EXPERT_PROGRAMS
        offs_n = (pid - SHARED_PROGRAMS) % EXPERT_PROGRAMS * SIZE + tl.arange(0, BLOCK_N)
        gdc_wait(USE_GDC)
        gdc_launch_dependents(USE_GDC)
        if experts is None:
            expert = _expert_of_rank(router_logits, rank, NUM_EXPERTS, BLOCK_E)
        else:
            expert = tl.load(experts + rank)
        of_expert = rows_from(w1, expert.to(tl.int64) * (2 * EXPERT_N), K)
        gate = load_tile(of_expert, offs_n, EXPERT_N, offs_k, K)
        up = load_tile(rows_from(of_expert, EXPERT_N, K), offs_n, EXPERT_N, offs_k, K)
        factor = load_factor(normed, of_expert, offs_k, K)
        y = expert_activated + rank * EXPERT_N
        activate_tiles(gate, up, factor, of_expert, y, offs_n, EXPERT_N, offs_k, K, BLOCK_N, NUM_TILES, USE_GDC)


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
        x: [M, K], normalised.
        weight: [2 * N, K], gate rows first; `weights.stored`.
        w1: [NUM_EXPERTS, 2 * EXPERT_N, K], gate rows first; `weights.stored`.
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
        offs_y, is_chosen = choices_of_expert(router_logits, expert, offs_m, is_real, NUM_EXPERTS, BLOCK_E, TOP_K)
        if any_of(is_chosen):
            of_expert = rows_from(w1, expert.to(tl.int64) * (2 * EXPERT_N), K)
            activate_rows(x, of_expert, expert_activated, offs_n, EXPERT_N, offs_m, offs_y, is_chosen, K, BLOCK_K)
