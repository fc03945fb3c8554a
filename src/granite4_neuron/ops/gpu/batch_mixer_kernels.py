"""Triton kernels of a mixer's token of several sequences: products with what follows them, and norms before.

Each function has the arguments and results of the operator of its name in `ops.gpu.token_mixer`, on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from granite4_neuron.ops.gpu.batch_programs import multiply_vectors, normed_rows, padded, shape_of_product
from granite4_neuron.ops.gpu.token_programs import let_next_begin, wait


def mixer_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    lengths: torch.Tensor,
    *,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    (rows, columns), (channels, taps), batch = weight.shape, conv_weight.shape, len(x)
    y = x.new_empty(batch, rows)
    normed = normed_rows(x, norm_weight, eps)
    block, width, options = shape_of_product(normed, rows)
    sizes = batch, padded(batch), rows, columns, rows - channels - num_heads, channels, taps
    _mixer_inputs[triton.cdiv(rows, block),](
        normed,
        weight,
        conv_weight,
        conv_bias,
        conv_state,
        lengths,
        y,
        *sizes,
        triton.next_power_of_2(taps),
        block,
        width,
        **options,
    )
    return y


@triton.jit
def _mixer_inputs(
    x,
    weight,
    conv_weight,
    conv_bias,
    conv_state,
    lengths,
    y,
    batch: tl.constexpr,
    padded_batch: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    first_channel: tl.constexpr,
    channels: tl.constexpr,
    taps: tl.constexpr,
    padded_taps: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    row, token = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, padded_batch)
    is_token = token < batch
    channel, tap = row - first_channel, tl.arange(0, padded_taps)[None, None]
    is_channel = (channel >= 0) & (channel < channels)
    is_window = (is_channel[:, None] & is_token[None])[:, :, None]
    window = conv_state + (token[None] * channels + channel[:, None])[:, :, None] * (taps - 1) + tap
    before = tl.load(window, is_window & (tap < taps - 1), 0.0)
    shifted = tl.load(window + 1, is_window & (tap < taps - 2), 0.0)
    is_tap = is_channel[:, None, None] & (tap < taps)
    weights = tl.load(conv_weight + channel[:, None, None] * taps + tap, is_tap, 0.0).to(tl.float32)
    convolved = tl.zeros([block, padded_batch], tl.float32)
    if conv_bias is not None:
        convolved += tl.load(conv_bias + channel, is_channel, 0.0).to(tl.float32)[:, None]
    is_real = tl.load(lengths + token, is_token, 0) > 0
    wait(overlaps)

    projected = multiply_vectors(weight, row, rows, x, token, is_token, columns, width).to(weight.dtype.element_ty)
    inputs = tl.where(tap < taps - 1, before, projected[:, :, None]).to(tl.float32)
    for number in tl.static_range(taps):
        # Not a sum of products: which of two a compiler rounds may differ from sequence to sequence.
        values, factors = _at_tap(inputs, tap, number), _at_tap(weights, tap, number)
        convolved = tl.fma(values, tl.broadcast_to(factors, values.shape), convolved)
    outputs = tl.where(is_channel[:, None], convolved * tl.sigmoid(convolved), projected.to(tl.float32))
    tl.store(y + token[None] * rows + row[:, None], outputs, (row < rows)[:, None] & is_token[None])
    # One thread's input is another one's place.
    tl.debug_barrier()
    following = tl.where(tap < taps - 2, shifted, projected[:, :, None])
    tl.store(window, following, is_window & is_real[None, :, None] & (tap < taps - 1))


@triton.jit
def _at_tap(values, tap, number: tl.constexpr):
    """Return one tap's part of [..., taps], exactly."""
    return tl.sum(tl.where(tap == number, values, 0.0), 2)


def project_heads(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    batch, columns = x.shape
    query_rows, key_rows = len(query), len(key)
    y = query.new_empty(batch, query_rows + 2 * key_rows)
    normed = normed_rows(x, norm_weight, eps)
    block, width, options = shape_of_product(normed, query_rows)
    programs = triton.cdiv(query_rows, block) + 2 * triton.cdiv(key_rows, block)
    sizes = batch, padded(batch), query_rows, key_rows, columns, block, width
    _project_heads[programs,](normed, query, key, value, y, *sizes, **options)
    return y


@triton.jit
def _project_heads(
    x,
    query,
    key,
    value,
    y,
    batch: tl.constexpr,
    padded_batch: tl.constexpr,
    query_rows: tl.constexpr,
    key_rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    query_programs: tl.constexpr = (query_rows + block - 1) // block
    key_programs: tl.constexpr = (key_rows + block - 1) // block
    program, weight, rows = tl.program_id(0), query, query_rows
    at = y
    if program >= query_programs + key_programs:
        program -= query_programs + key_programs
        weight, rows = value, key_rows
        at += query_rows + key_rows
    elif program >= query_programs:
        program -= query_programs
        weight, rows = key, key_rows
        at += query_rows
    row, token = program * block + tl.arange(0, block), tl.arange(0, padded_batch)
    is_token = token < batch
    wait(overlaps)
    total = multiply_vectors(weight, row, rows, x, token, is_token, columns, width)
    at += token[None] * (query_rows + 2 * key_rows) + row[:, None]
    tl.store(at, total.to(y.dtype.element_ty), (row < rows)[:, None] & is_token[None])


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    (rows, columns), batch = weight.shape, len(x)
    y = torch.empty_like(residual)
    x = x if norm_weight is None else normed_rows(x, norm_weight, eps)
    block, width, options = shape_of_product(x, rows)
    sizes = batch, padded(batch), rows, columns, block, width
    _add_product[triton.cdiv(rows, block),](residual, x, weight, y, alpha, *sizes, **options)
    return y


@triton.jit
def _add_product(
    residual,
    x,
    weight,
    y,
    alpha,
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
    is_token = token < batch
    at = token[None] * rows + row[:, None]
    is_here = (row < rows)[:, None] & is_token[None]
    wait(overlaps)
    before = tl.load(residual + at, is_here, 0.0)
    total = multiply_vectors(weight, row, rows, x, token, is_token, columns, width).to(weight.dtype.element_ty)
    tl.store(y + at, before + alpha * total.to(tl.float32), is_here)
