"""Projections of one token per sequence, fused with their neighbours: the norm before, the residual after."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.devices.cuda.gemm import gemm, gemm_config, gemm_grid, rms_norm_rows, rows_of_program
from granite4_neuron.devices.cuda.gemv import gemv_config, load_vector
from granite4_neuron.devices.cuda.launch import gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.operator import operator, register_launches
from granite4_neuron.devices.cuda.triton_utils import dtype_of, tl, triton
from granite4_neuron.devices.cuda.weights import (
    dense,
    gemv,
    load_factor,
    load_normed_factor,
    load_tile,
    prepare,
    stored,
)
from granite4_neuron.ops import norm

# -- norm, and queries, keys and values


@operator()
def project_heads(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    eps: float,
    query_scales: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise x, [batch, columns] in float32, and project with three weights [rows, columns] of one format:
    [batch, all rows].
    """
    given = (query, query_scales), (key, key_scales), (value, value_scales)
    weights = [dense(*each, x.shape[1], norm_weight.dtype) for each in given]
    return F.linear(norm.rms_norm(x, norm_weight, eps), torch.cat(weights))


@project_heads.register_fake
def _(x, norm_weight, query, key, value, *others):
    return norm_weight.new_empty(len(x), len(query) + len(key) + len(value))


def _launch_project_heads(
    one_row: bool,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    eps: float,
    query_scales: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    (batch, columns), query_rows, key_rows = x.shape, len(query), len(key)
    weights = stored(query, query_scales), stored(key, key_scales), stored(value, value_scales)
    y = norm_weight.new_empty(batch, query_rows + 2 * key_rows)
    if one_row:
        block_k = triton.next_power_of_2(columns)
        block_n, _, num_warps = gemv_config(query_rows, block_k, dtype=query.dtype)
        num_programs = triton.cdiv(query_rows, block_n) + 2 * triton.cdiv(key_rows, block_n)
        _project_heads_of_one_kernel[num_programs,](
            prepare(x, norm_weight, eps, query, query_scales),
            norm_weight,
            *weights,
            y,
            eps,
            QUERY_ROWS=query_rows,
            KEY_ROWS=key_rows,
            K=columns,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            **launch_options(x, num_warps),
        )
    else:
        normed = rms_norm_rows(x, norm_weight, eps)
        options = gemm_config(normed, query_rows)
        num_programs = triton.cdiv(query_rows, options["BLOCK_N"]) + 2 * triton.cdiv(key_rows, options["BLOCK_N"])
        _project_heads_kernel[gemm_grid(batch, num_programs)](
            normed,
            *weights,
            y,
            QUERY_ROWS=query_rows,
            KEY_ROWS=key_rows,
            **options,
        )
    return y


project_heads_of_one = register_launches(project_heads, _launch_project_heads)


@triton.jit
def _project_heads_of_one_kernel(
    x,
    norm_weight,
    query,
    key,
    value,
    y,
    eps,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N outputs of one sequence with one of the weights.

    Grid: (cdiv(QUERY_ROWS, BLOCK_N) + 2 * cdiv(KEY_ROWS, BLOCK_N),).

    Args:
        x: [K] in float32, before its norm, or as `weights.prepare` returns it.
        norm_weight: [K].
        query: [QUERY_ROWS, K]. key, value: [KEY_ROWS, K]. All `weights.stored`.
        y: [QUERY_ROWS + 2 * KEY_ROWS].
    """
    gdc_launch_dependents(USE_GDC)
    QUERY_PROGRAMS: tl.constexpr = (QUERY_ROWS + BLOCK_N - 1) // BLOCK_N
    KEY_PROGRAMS: tl.constexpr = (KEY_ROWS + BLOCK_N - 1) // BLOCK_N
    pid_n, weight, rows = tl.program_id(0), query, QUERY_ROWS
    if pid_n >= QUERY_PROGRAMS + KEY_PROGRAMS:
        pid_n -= QUERY_PROGRAMS + KEY_PROGRAMS
        weight, rows = value, KEY_ROWS
        y += QUERY_ROWS + KEY_ROWS
    elif pid_n >= QUERY_PROGRAMS:
        pid_n -= QUERY_PROGRAMS
        weight, rows = key, KEY_ROWS
        y += QUERY_ROWS
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    tile = load_tile(weight, offs_n, rows, offs_k, K)
    norm_weights = load_vector(norm_weight, offs_k, K)
    gdc_wait(USE_GDC)
    acc = gemv(tile, load_normed_factor(x, norm_weights, eps, weight, offs_k, K), USE_GDC)
    tl.store(y + offs_n, acc.to(y.dtype.element_ty), offs_n < rows)


@triton.jit
def _project_heads_kernel(
    x,
    query,
    key,
    value,
    y,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M of M tokens with one of the weights.

    Grid: (cdiv(M, BLOCK_M), cdiv(QUERY_ROWS, BLOCK_N) + 2 * cdiv(KEY_ROWS, BLOCK_N)).

    Args:
        x: [M, K], normalised.
        query: [QUERY_ROWS, K]. key, value: [KEY_ROWS, K]. All `weights.stored`.
        y: [M, QUERY_ROWS + 2 * KEY_ROWS].
    """
    gdc_launch_dependents(USE_GDC)
    QUERY_PROGRAMS: tl.constexpr = (QUERY_ROWS + BLOCK_N - 1) // BLOCK_N
    KEY_PROGRAMS: tl.constexpr = (KEY_ROWS + BLOCK_N - 1) // BLOCK_N
    pid_n, weight, rows = tl.program_id(1), query, QUERY_ROWS
    y_ptrs = y
    if pid_n >= QUERY_PROGRAMS + KEY_PROGRAMS:
        pid_n -= QUERY_PROGRAMS + KEY_PROGRAMS
        weight, rows = value, KEY_ROWS
        y_ptrs += QUERY_ROWS + KEY_ROWS
    elif pid_n >= QUERY_PROGRAMS:
        pid_n -= QUERY_PROGRAMS
        weight, rows = key, KEY_ROWS
        y_ptrs += QUERY_ROWS
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = rows_of_program(M, BLOCK_M)
    mask_m = offs_m < M
    gdc_wait(USE_GDC)
    acc = gemm(weight, offs_n, rows, x, offs_m, mask_m, K, BLOCK_K)
    y_ptrs += offs_m[None] * (QUERY_ROWS + 2 * KEY_ROWS) + offs_n[:, None]
    tl.store(y_ptrs, acc.to(y.dtype.element_ty), (offs_n < rows)[:, None] & mask_m[None])


# -- a product, added to the residual


@operator()
def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    alpha: float,
    eps: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute residual + alpha * (weight x), where x is normalised first if it has a norm.

    Args:
        residual: [batch, rows], float32.
        x: [batch, columns]; in float32 if it has a norm.
    """
    if norm_weight is not None:
        x = norm.rms_norm(x, norm_weight, eps)
    return norm.residual_add(residual, F.linear(x, dense(weight, scales, x.shape[1], x.dtype)), alpha)


@add_product.register_fake
def _(residual, *others):
    return torch.empty_like(residual)


def _launch_add_product(
    one_row: bool,
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    alpha: float,
    eps: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    (rows, columns), matrix = (len(weight), x.shape[1]), stored(weight, scales)
    y = torch.empty_like(residual)
    if one_row:
        block_k = triton.next_power_of_2(columns)
        block_n, num_tiles, num_warps = gemv_config(rows, block_k, dtype=weight.dtype)
        _add_product_of_one_kernel[triton.cdiv(rows, block_n * num_tiles),](
            residual,
            prepare(x, norm_weight, eps, weight, scales),
            norm_weight,
            matrix,
            y,
            alpha,
            eps,
            N=rows,
            K=columns,
            BLOCK_N=block_n,
            NUM_TILES=num_tiles,
            BLOCK_K=block_k,
            DTYPE=dtype_of(x if norm_weight is None else norm_weight),
            **launch_options(x, num_warps),
        )
    else:
        x = x if norm_weight is None else rms_norm_rows(x, norm_weight, eps)
        options = gemm_config(x, rows)
        _add_product_kernel[gemm_grid(len(x), triton.cdiv(rows, options["BLOCK_N"]))](
            residual,
            x,
            matrix,
            y,
            alpha,
            N=rows,
            **options,
        )
    return y


add_product_of_one = register_launches(add_product, _launch_add_product)


@triton.jit
def _add_product_of_one_kernel(
    residual,
    x,
    norm_weight,
    weight,
    y,
    alpha,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute NUM_TILES * BLOCK_N outputs of one sequence.

    Grid: (cdiv(N, NUM_TILES * BLOCK_N),).

    Args:
        residual, y: [N] in float32.
        x: [K], in float32 before its norm; or as `weights.prepare` returns it.
        norm_weight: [K], or None.
        weight: [N, K], `weights.stored`.
        DTYPE: of products.
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(0) * (BLOCK_N * NUM_TILES) + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    tile = load_tile(weight, offs_n, N, offs_k, K)
    if norm_weight is None:
        gdc_wait(USE_GDC)
        factor = load_factor(x, weight, offs_k, K)
    else:
        norm_weights = load_vector(norm_weight, offs_k, K)
        gdc_wait(USE_GDC)
        factor = load_normed_factor(x, norm_weights, eps, weight, offs_k, K)
    for i in tl.static_range(NUM_TILES):
        before = tl.load(residual + offs_n, offs_n < N, 0.0)
        next_tile = tile
        if i + 1 < NUM_TILES:
            next_tile = load_tile(weight, offs_n + BLOCK_N, N, offs_k, K)  # while this one is multiplied
        acc = gemv(tile, factor, USE_GDC).to(DTYPE)
        tl.store(y + offs_n, before + alpha * acc.to(tl.float32), offs_n < N)
        tile, offs_n = next_tile, offs_n + BLOCK_N


@triton.jit
def _add_product_kernel(
    residual,
    x,
    weight,
    y,
    alpha,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M of M tokens.

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)).

    Args:
        residual, y: [M, N] in float32.
        x: [M, K], normalised if it has a norm.
        weight: [N, K], `weights.stored`.
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = rows_of_program(M, BLOCK_M)
    mask_m = offs_m < M
    offs = offs_m[None] * N + offs_n[:, None]
    mask = (offs_n < N)[:, None] & mask_m[None]
    gdc_wait(USE_GDC)
    before = tl.load(residual + offs, mask, 0.0)
    acc = gemm(weight, offs_n, N, x, offs_m, mask_m, K, BLOCK_K).to(x.dtype.element_ty)
    tl.store(y + offs, before + alpha * acc.to(tl.float32), mask)
