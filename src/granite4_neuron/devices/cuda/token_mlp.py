"""The first half of a token's MLP, with the norm before it; `add_product` is the second.

Layers with experts also use these functions for their shared MLP, in one kernel with the experts.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.devices.cuda.gemm import gemm_config, gemm_gate_up, gemm_grid, rms_norm_rows, rows_of_program
from granite4_neuron.devices.cuda.gemv import gemv_config, load_vector, silu_and_mul
from granite4_neuron.devices.cuda.launch import gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.operator import operator, register_launches
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.cuda.weights import dense, gemv, load_normed_factor, load_tile, prepare, rows_from, stored
from granite4_neuron.ops import moe, norm


@operator()
def activate(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise, and compute an MLP's activations.

    Args:
        x: [batch, columns], float32.
        weight: [2 * width, columns], gate rows first.

    Returns:
        [batch, width] in norm_weight's dtype.
    """
    weight = dense(weight, scales, x.shape[1], norm_weight.dtype)
    return moe.silu_and_mul(F.linear(norm.rms_norm(x, norm_weight, eps), weight))


@activate.register_fake
def _(x, norm_weight, weight, *others):
    return norm_weight.new_empty(len(x), len(weight) // 2)


def _launch_activate(
    one_row: bool,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    (batch, columns), rows, matrix = x.shape, len(weight) // 2, stored(weight, scales)
    y = norm_weight.new_empty(batch, rows)
    if one_row:
        block_k = triton.next_power_of_2(columns)
        block_n, num_tiles, num_warps = gemv_config(rows, block_k, 2, weight.dtype)
        _activate_of_one_kernel[triton.cdiv(rows, block_n * num_tiles),](
            prepare(x, norm_weight, eps, weight, scales),
            norm_weight,
            matrix,
            y,
            eps,
            N=rows,
            K=columns,
            BLOCK_N=block_n,
            NUM_TILES=num_tiles,
            BLOCK_K=block_k,
            **launch_options(x, num_warps),
        )
    else:
        normed = rms_norm_rows(x, norm_weight, eps)
        options = gemm_config(normed, rows, 2)
        _activate_kernel[gemm_grid(batch, triton.cdiv(rows, options["BLOCK_N"]))](
            normed,
            matrix,
            y,
            N=rows,
            **options,
        )
    return y


activate_of_one = register_launches(activate, _launch_activate)


@triton.jit
def _activate_of_one_kernel(
    x,
    norm_weight,
    weight,
    y,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute NUM_TILES * BLOCK_N activations of one sequence.

    Grid: (cdiv(N, NUM_TILES * BLOCK_N),).

    Args:
        x: [K] in float32, before its norm, or as `weights.prepare` returns it.
        norm_weight: [K].
        weight: [2 * N, K], gate rows first; `weights.stored`.
        y: [N].
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(0) * (BLOCK_N * NUM_TILES) + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    gate = load_tile(weight, offs_n, N, offs_k, K)
    up = load_tile(rows_from(weight, N, K), offs_n, N, offs_k, K)
    norm_weights = load_vector(norm_weight, offs_k, K)
    gdc_wait(USE_GDC)
    factor = load_normed_factor(x, norm_weights, eps, weight, offs_k, K)
    activate_tiles(gate, up, factor, weight, y, offs_n, N, offs_k, K, BLOCK_N, NUM_TILES, USE_GDC)


@triton.jit
def activate_tiles(
    gate,
    up,
    factor,
    weight,
    y,
    offs_n,
    N,
    offs_k,
    K,
    BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Compute NUM_TILES blocks of activations of one vector, and store them in y [N].

    Args:
        gate, up: the first tiles, already loaded.
        factor: of `load_factor`.
        weight: [2 * N, K].
        offs_n: [BLOCK_N], of the first tiles.
        HAS_FP8: as for `gemv`.
    """
    for i in tl.static_range(NUM_TILES):
        next_gate, next_up, next_offs_n = gate, up, offs_n + BLOCK_N
        if i + 1 < NUM_TILES:  # while this one is multiplied
            next_gate = load_tile(weight, next_offs_n, N, offs_k, K)
            next_up = load_tile(rows_from(weight, N, K), next_offs_n, N, offs_k, K)
        activated = silu_and_mul(gemv(gate, factor, HAS_FP8), gemv(up, factor, HAS_FP8), y.dtype.element_ty)
        tl.store(y + offs_n, activated, offs_n < N)
        gate, up, offs_n = next_gate, next_up, next_offs_n


@triton.jit
def _activate_kernel(
    x,
    weight,
    y,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N activations of BLOCK_M of M tokens.

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)).

    Args:
        x: [M, K], normalised.
        weight: [2 * N, K], gate rows first; `weights.stored`.
        y: [M, N].
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = rows_of_program(M, BLOCK_M)
    gdc_wait(USE_GDC)
    activate_rows(x, weight, y, offs_n, N, offs_m, offs_m, offs_m < M, K, BLOCK_K)


@triton.jit
def activate_rows(x, weight, y, offs_n, N, offs_m, offs_y, mask_m, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute activations of rows offs_m of x [.., K], and store them in rows offs_y of y [.., N].

    Args:
        offs_n: [BLOCK_N].
        offs_m, offs_y, mask_m: [BLOCK_M]; where mask_m is false nothing is stored.
    """
    gate, up = gemm_gate_up(weight, offs_n, N, x, offs_m, mask_m, K, BLOCK_K)
    ptrs = y + offs_y[None] * N + offs_n[:, None]
    tl.store(ptrs, silu_and_mul(gate, up, y.dtype.element_ty), (offs_n < N)[:, None] & mask_m[None])
