"""Operators of one token of each of many sequences, whose products are multiplied by the tensor cores' wgmma.

This instruction multiplies 64 rows at once, and a program of it reads a weight's rows for up to 128 tokens. It adds up
in another order than that of `gemm`, which is for few. A product with few outputs is cut into parts of its columns, so
that all multiprocessors have one; the parts are added, in their order, by the kernel that also adds the residual.
"""

from __future__ import annotations

from typing import Any

import torch

from granite4_neuron.devices.cuda import head, products, token_mixer, token_mlp, token_projections
from granite4_neuron.devices.cuda.gemm import rms_norm_rows
from granite4_neuron.devices.cuda.gemv import load_vector, rms_norm
from granite4_neuron.devices.cuda.launch import (
    NUM_WARPS_SMALL,
    gdc_launch_dependents,
    gdc_wait,
    launch_options,
    supports_gdc,
)
from granite4_neuron.devices.cuda.operator import operator, register_form, register_launch
from granite4_neuron.devices.cuda.products import has_descriptors, outputs_of, tile_options
from granite4_neuron.devices.cuda.triton_utils import TensorDescriptor, dtype_of, entries_of_slots, tl, triton
from granite4_neuron.devices.cuda.weights import parts_of
from granite4_neuron.ops import Weight

FEWEST_ROWS = 33  # from which these operators are used
# Columns per program of the convolution.
_BLOCK_N = 256
# Tiles as of `products.tile_options`: of the head, and of other products.
_TILE_OF_HEAD, _TILE = (128, 128, 8, 4), (64, 64, 4, 5)
_PART_COLUMNS = 1024  # of a product that is cut into parts
_NUM_WARPS_OF_SUM = 8


# -- products


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    is_gated: bool = False,
    divisor: float | None = None,
    has_parts: bool = False,
    out: torch.Tensor | None = None,
    tile: tuple[int, int, int, int] = _TILE,
) -> torch.Tensor:
    """Multiply x [rows, columns] with a weight of its dtype: [rows, outputs] in x's dtype, or in float32 divided by
    `divisor`, or with `has_parts` [parts, rows, outputs] in float32. `out`: for the first of these, with its stride.
    """
    (rows, columns), num_weights = x.shape, 1 + is_gated
    n = len(weight) // num_weights
    matrices = weight.view(num_weights, n, columns)
    if x.itemsize != 2 or not has_descriptors(x, matrices):
        y = products.multiply_tokens(x, weight, None, is_gated, has_parts)
        if out is not None:
            return out.copy_(y)
        return y[None] if has_parts else y if divisor is None else y.float() / divisor
    part = _PART_COLUMNS if has_parts else columns
    shape = (triton.cdiv(columns, part), rows, n) if has_parts else (rows, n)
    y = x.new_empty(shape, dtype=torch.float32 if has_parts or divisor is not None else None) if out is None else out
    options: dict[str, Any] = tile_options(x, *tile, num_weights)
    block_m, block_n, block_k = (options[f"BLOCK_{axis}"] for axis in "MNK")
    del options["PRECISION"]
    _multiply_kernel[triton.cdiv(rows, block_m) * triton.cdiv(n, block_n), triton.cdiv(columns, part)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(matrices, [num_weights, block_n, block_k]),
        y,
        divisor,
        y.stride(-2),
        M=rows,
        N=n,
        K=columns,
        PART_K=part,
        NUM_WEIGHTS=num_weights,
        HAS_PARTS=has_parts,
        USE_GDC=supports_gdc(x),
        launch_pdl=supports_gdc(x),
        **options,
    )
    return y


@triton.jit
def _multiply_kernel(
    x,
    weight,
    y,
    divisor,
    stride_y,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PART_K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M rows, of PART_K columns.

    Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N), cdiv(K, PART_K)). Neighbouring programs read the same weights.

    Args:
        x: [M, K]. weight: [NUM_WEIGHTS, N, K]: gate and up, or one weight. Both are tensor descriptors.
        y: [M, N] with its stride; with HAS_PARTS [cdiv(K, PART_K), M, N] in float32.
        divisor: of outputs, after they are rounded to x's dtype; or None.
    """
    gdc_launch_dependents(USE_GDC)
    tiles_m: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    first_m, first_n = tl.program_id(0) % tiles_m * BLOCK_M, tl.program_id(0) // tiles_m * BLOCK_N
    part = tl.program_id(1)
    gdc_wait(USE_GDC)
    acc = tl.zeros([BLOCK_M, NUM_WEIGHTS * BLOCK_N], tl.float32)
    for start in range(0, PART_K, BLOCK_K):  # beyond the last column are zeros
        at = part * PART_K + start
        tile = x.load([first_m, at])
        weights = weight.load([0, first_n, at]).reshape([NUM_WEIGHTS * BLOCK_N, BLOCK_K])
        acc = tl.dot(tile, tl.trans(weights), acc)
    offs_m, offs_n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None]
    if HAS_PARTS:
        y += part * M * N
    output = outputs_of(acc, NUM_WEIGHTS, x.dtype)
    if divisor is not None:
        output = output.to(x.dtype).to(tl.float32) / divisor
    tl.store(y + offs_m[:, None] * stride_y + offs_n[None], output.to(y.dtype.element_ty), mask)


def _add_parts(
    residual: torch.Tensor,
    parts: torch.Tensor,
    x: torch.Tensor,
    alpha: float,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add the parts of a product of x, rounded to x's dtype and multiplied by alpha, to a residual. Return the sum, and
    its `ops.rms_norm` if there is a norm.
    """
    rows, columns = residual.shape
    y, normed = torch.empty_like(residual), None if norm_weight is None else norm_weight.new_empty(rows, columns)
    _add_parts_kernel[rows,](
        residual,
        parts,
        norm_weight,
        y,
        normed,
        alpha,
        eps,
        PARTS=len(parts),
        M=rows,
        N=columns,
        BLOCK_N=triton.next_power_of_2(columns),
        DTYPE=dtype_of(x),
        **launch_options(residual, _NUM_WARPS_OF_SUM),
    )
    return y, normed


@triton.jit
def _add_parts_kernel(
    residual,
    parts,
    norm_weight,
    y,
    normed,
    alpha,
    eps,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Add up a row, and normalise it.

    Grid: (M,).

    Args:
        residual, y: [M, N] in float32.
        parts: [PARTS, M, N] in float32.
        norm_weight: [N], or None. normed: [M, N] in its dtype; or None.
        DTYPE: of products.
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.arange(0, BLOCK_N)
    if norm_weight is not None:
        weights = load_vector(norm_weight, offs_n, N)
    offs = tl.program_id(0) * N + offs_n[None]
    mask = (offs_n < N)[None]
    gdc_wait(USE_GDC)
    total = tl.load(parts + offs, mask, 0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * M * N + offs, mask, 0.0)
    values = tl.load(residual + offs, mask, 0.0) + alpha * total.to(DTYPE).to(tl.float32)
    tl.store(y + offs, values, mask)
    if norm_weight is not None:
        tl.store(normed + offs, rms_norm(values, weights, eps, N).to(normed.dtype.element_ty), mask)


# -- norm, projection and convolution


def _launch_mixer_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    projected, (channels, d_conv) = _multiply(rms_norm_rows(x, norm_weight, eps), weight), conv_weight.shape
    (batch, rows), y = projected.shape, projected.new_empty(projected.shape, dtype=torch.float32)
    _convolution_kernel[batch, triton.cdiv(rows, _BLOCK_N)](
        projected,
        conv_weight,
        conv_bias,
        conv_state,
        lengths,
        slots,
        y,
        N=rows,
        FIRST_CHANNEL=rows - channels - num_heads,
        CHANNELS=channels,
        D_CONV=d_conv,
        BLOCK_N=_BLOCK_N,
        **launch_options(x, NUM_WARPS_SMALL),
    )
    return y


mixer_inputs = register_form(token_mixer.mixer_inputs, "of_many", _launch_mixer_inputs)


@triton.jit
def _convolution_kernel(
    projected,
    conv_weight,
    conv_bias,
    conv_state,
    lengths,
    slots,
    y,
    N: tl.constexpr,
    FIRST_CHANNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    D_CONV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Handle BLOCK_N of a sequence's columns: convolve the CHANNELS columns from FIRST_CHANNEL on; cast the others.

    Grid: (batch, cdiv(N, BLOCK_N)).

    Args:
        projected: [batch, N].
        conv_weight: [CHANNELS, D_CONV]. conv_bias: [CHANNELS], or None.
        conv_state: [sequences, CHANNELS, D_CONV - 1]; unchanged where lengths is 0.
        lengths: [batch] int32.
        slots: [batch] int32, each row's entry of conv_state is slot - 1; None if row i has entry i.
        y: [batch, N] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    row = tl.program_id(0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_c = offs_n - FIRST_CHANNEL
    mask_c = (offs_c >= 0) & (offs_c < CHANNELS)
    window = conv_state + (entries_of_slots(slots, row, True) * CHANNELS + offs_c) * (D_CONV - 1)
    convolved = tl.zeros([BLOCK_N], tl.float32)
    if conv_bias is not None:
        convolved += tl.load(conv_bias + offs_c, mask_c, 0.0).to(tl.float32)
    factors, values = (), ()
    for w in tl.static_range(D_CONV):
        factors += (tl.load(conv_weight + offs_c * D_CONV + w, mask_c, 0.0).to(tl.float32),)  # type: ignore[assignment]
    for w in tl.static_range(D_CONV - 1):
        values += (tl.load(window + w, mask_c, 0.0),)  # type: ignore[assignment]
    is_real = tl.load(lengths + row) > 0
    gdc_wait(USE_GDC)
    new = tl.load(projected + row * N + offs_n, offs_n < N, 0.0)
    values += (new,)  # type: ignore[assignment]
    for w in tl.static_range(D_CONV):  # as `token_mixer` adds taps
        convolved = tl.fma(values[w].to(tl.float32), factors[w], convolved)
    outputs = tl.where(mask_c, convolved * tl.sigmoid(convolved), new.to(tl.float32))
    tl.store(y + row * N + offs_n, outputs, offs_n < N)
    tl.debug_barrier()  # a thread may have read values that another overwrites
    for w in tl.static_range(D_CONV - 1):
        tl.store(window + w, values[w + 1], mask_c & is_real)


# -- the rest of a layer


def _launch_add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    alpha: float,
    eps: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    x = x if norm_weight is None else rms_norm_rows(x, norm_weight, eps)
    return _add_parts(residual, _multiply(x, weight, has_parts=True), x, alpha)[0]


def _launch_activate(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float, scales: torch.Tensor | None = None
) -> torch.Tensor:
    return _multiply(rms_norm_rows(x, norm_weight, eps), weight, is_gated=True)


def _launch_project_heads(
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
    weights = query, key, value
    normed, y = rms_norm_rows(x, norm_weight, eps), norm_weight.new_empty(len(x), sum(map(len, weights)))
    for weight, out in zip(weights, y.split([*map(len, weights)], 1), strict=True):
        _multiply(normed, weight, out=out)
    return y


project_heads = register_form(token_projections.project_heads, "of_many", _launch_project_heads)
add_product = register_form(token_projections.add_product, "of_many", _launch_add_product)
activate = register_form(token_mlp.activate, "of_many", _launch_activate)


@operator()
def add_product_and_mlp(
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    mlp_norm_weight: torch.Tensor,
    mlp_input: torch.Tensor,
    mlp_output: torch.Tensor,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    """Compute `add_product`, then `activate` and `add_product` of an MLP whose input is the sum."""
    residual = token_projections.add_product(residual, x, norm_weight, weight, alpha, eps)
    activated = token_mlp.activate(residual, mlp_norm_weight, mlp_input, eps)
    return token_projections.add_product(residual, activated, None, mlp_output, alpha, eps)


@add_product_and_mlp.register_fake
def _(residual, *others):
    return torch.empty_like(residual)


def _launch_add_product_and_mlp(
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    mlp_norm_weight: torch.Tensor,
    mlp_input: torch.Tensor,
    mlp_output: torch.Tensor,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    x = x if norm_weight is None else rms_norm_rows(x, norm_weight, eps)
    parts = _multiply(x, weight, has_parts=True)
    residual, normed = _add_parts(residual, parts, x, alpha, mlp_norm_weight, eps)
    assert normed is not None
    activated = _multiply(normed, mlp_input, is_gated=True)
    return _launch_add_product(residual, activated, None, mlp_output, alpha, eps)


register_launch(add_product_and_mlp, _launch_add_product_and_mlp)


# -- the head


def logits(x: torch.Tensor, weight: Weight, scaling: float) -> torch.Tensor:
    """Compute `ops.logits` of one token of each sequence, [rows, hidden_size]."""
    values, scales = parts_of(weight)
    if len(x) < FEWEST_ROWS or scales is not None:
        return head.logits(x, weight, scaling)
    return score_tokens(x, values, scaling)


def _launch_score_tokens(
    x: torch.Tensor, weight: torch.Tensor, scaling: float, scales: torch.Tensor | None = None
) -> torch.Tensor:
    return _multiply(x.contiguous(), weight, divisor=scaling, tile=_TILE_OF_HEAD)


score_tokens = register_form(head.score_tokens, "of_many", _launch_score_tokens)
