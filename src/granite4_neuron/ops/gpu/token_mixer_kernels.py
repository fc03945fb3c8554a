"""Triton kernels of a mixer's one token: products with what precedes and follows them.

Each function has the arguments and results of the operator of its name in `ops.gpu.token_mixer`, on a GPU.
Products of several sequences are in `ops.gpu.batch_mixer_kernels`. `ops.gpu.token_programs` says when a kernel
may read and write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from granite4_neuron.ops.gpu import batch_mixer_kernels as batch
from granite4_neuron.ops.gpu.functions_kernels import convolve_channels, load_convolution, shift_window
from granite4_neuron.ops.gpu.token_programs import (
    WARPS_OF_SMALL_PARTS,
    launch_options,
    let_next_begin,
    load_row,
    load_rows,
    multiply,
    normed,
    shape_of_program,
    wait,
)

# A program's rows of a head's state.
_CHANNELS = 16


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
    if len(x) > 1:
        convolution = conv_weight, conv_bias, conv_state, lengths
        return batch.mixer_inputs(x, norm_weight, weight, *convolution, num_heads=num_heads, eps=eps)
    (rows, columns), (channels, taps) = weight.shape, conv_weight.shape
    y = x.new_empty(1, rows)
    width = triton.next_power_of_2(columns)
    block, tiles, warps = shape_of_program(rows, width)
    # An element for each thread, or each would do the work of all.
    padded_taps = max(triton.next_power_of_2(taps), 32 * warps // block)
    sizes = rows, columns, rows - channels - num_heads, channels, taps, padded_taps, block, tiles, width
    _mixer_inputs[triton.cdiv(rows, block * tiles),](
        x,
        norm_weight,
        weight,
        conv_weight,
        conv_bias,
        conv_state,
        lengths,
        y,
        eps,
        *sizes,
        **launch_options(x, warps),
    )
    return y


@triton.jit
def _mixer_inputs(
    x,
    norm_weight,
    weight,
    conv_weight,
    conv_bias,
    conv_state,
    lengths,
    y,
    eps,
    rows: tl.constexpr,
    columns: tl.constexpr,
    first_channel: tl.constexpr,
    channels: tl.constexpr,
    taps: tl.constexpr,
    padded_taps: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    row = tl.program_id(0) * (block * tiles) + tl.arange(0, block)
    column = tl.arange(0, width)
    tile = load_rows(weight, row, rows, column, columns)
    norm_weights = load_row(norm_weight, column, columns)
    is_real = tl.load(lengths) > 0
    for number in tl.static_range(tiles):
        channel = row - first_channel
        is_channel = (channel >= 0) & (channel < channels)
        window, shifted, weights, offset = load_convolution(
            conv_state, conv_weight, conv_bias, channel, is_channel, taps, padded_taps
        )
        if number == 0:
            wait(overlaps)
            values = normed(load_row(x, column, columns), norm_weights, eps, columns)
        following = tile
        if number + 1 < tiles:
            following = load_rows(weight, row + block, rows, column, columns)  # while this one is multiplied
        projected = multiply(tile, values).to(weight.dtype.element_ty)
        convolved = convolve_channels(projected, window, weights, offset, taps, padded_taps)
        tl.store(y + row, tl.where(is_channel, convolved, projected.to(tl.float32)), row < rows)
        shift_window(conv_state, projected, shifted, channel, is_channel & is_real, taps, padded_taps)
        tile, row = following, row + block


def advance_mixer(
    inputs: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
) -> torch.Tensor:
    rows, num_heads, head_dim, d_state = ssm_state.shape
    d_inner = num_heads * head_dim
    y = inputs.new_empty(rows, d_inner)
    groups = (inputs.shape[1] - 2 * d_inner - num_heads) // (2 * d_state)
    block = min(_CHANNELS, triton.next_power_of_2(head_dim))
    sizes = num_heads, num_heads // groups, head_dim, d_state, block, triton.next_power_of_2(d_state)
    _advance_mixer[num_heads, triton.cdiv(head_dim, block), rows](
        inputs,
        dt_bias,
        A_log,
        D,
        ssm_state,
        lengths,
        y,
        lowest_dt,
        highest_dt,
        *sizes,
        **launch_options(inputs, WARPS_OF_SMALL_PARTS),
    )
    return y


@triton.jit
def _advance_mixer(
    inputs,
    dt_bias,
    A_log,
    D,
    ssm_state,
    lengths,
    y,
    lowest_dt,
    highest_dt,
    num_heads: tl.constexpr,
    heads_per_group: tl.constexpr,
    head_dim: tl.constexpr,
    d_state: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    let_next_begin(overlaps)
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(0)
    d_inner: tl.constexpr = num_heads * head_dim
    group_width: tl.constexpr = num_heads // heads_per_group * d_state
    d = tl.program_id(1) * block + tl.arange(0, block)
    n = tl.arange(0, columns)
    is_d, is_state = d < head_dim, n < d_state
    channel = head * head_dim + d
    at = channel[:, None] * d_state + n[None]
    is_real = tl.load(lengths + row) > 0
    is_here = is_d[:, None] & is_state[None] & is_real  # an idle sequence's state is neither read nor written
    ssm_state += row * d_inner * d_state
    state = tl.load(ssm_state + at, is_here, 0.0)
    bias, A = tl.load(dt_bias + head).to(tl.float32), -tl.exp(tl.load(A_log + head).to(tl.float32))
    skip = tl.load(D + head).to(tl.float32)
    wait(overlaps)

    inputs += row * (2 * d_inner + 2 * group_width + num_heads)
    gate = tl.load(inputs + channel, is_d, 0.0)
    inputs += d_inner
    x = tl.load(inputs + channel, is_d, 0.0)
    inputs += d_inner
    of_group = (head // heads_per_group) * d_state + n
    b = tl.load(inputs + of_group, is_state, 0.0)
    c = tl.load(inputs + group_width + of_group, is_state, 0.0)
    dt = tl.load(inputs + 2 * group_width + head) + bias
    # log(1 + exp(dt)), with the digits of exp(dt) that a sum with 1 has not.
    e = tl.exp(tl.minimum(dt, 20.0))
    sum = 1.0 + e
    soft = tl.where(sum == 1.0, e, tl.log(sum) * e / tl.where(sum == 1.0, 1.0, sum - 1.0))
    dt = tl.where(dt <= 20.0, soft, dt)
    dt = tl.minimum(tl.maximum(dt, lowest_dt, tl.PropagateNan.ALL), highest_dt, tl.PropagateNan.ALL)

    state = state * tl.exp(dt * A) + (dt * x)[:, None] * b[None]
    tl.store(ssm_state + at, state, is_here)
    tl.store(y + row * d_inner + channel, (tl.sum(state * c[None], 1) + x * skip) * gate * tl.sigmoid(gate), is_d)


def project_heads(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    if len(x) > 1:
        return batch.project_heads(x, norm_weight, query, key, value, eps)
    query_rows, key_rows, columns = len(query), len(key), x.shape[1]
    y = query.new_empty(1, query_rows + 2 * key_rows)
    width = triton.next_power_of_2(columns)
    block, _, warps = shape_of_program(query_rows, width)
    programs = triton.cdiv(query_rows, block) + 2 * triton.cdiv(key_rows, block)
    sizes = query_rows, key_rows, columns, block, width
    _project_heads[programs,](x, norm_weight, query, key, value, y, eps, *sizes, **launch_options(x, warps))
    return y


@triton.jit
def _project_heads(
    x,
    norm_weight,
    query,
    key,
    value,
    y,
    eps,
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
    if program >= query_programs + key_programs:
        program -= query_programs + key_programs
        weight, rows = value, key_rows
        y += query_rows + key_rows
    elif program >= query_programs:
        program -= query_programs
        weight, rows = key, key_rows
        y += query_rows
    row = program * block + tl.arange(0, block)
    column = tl.arange(0, width)
    tile = load_rows(weight, row, rows, column, columns)
    norm_weights = load_row(norm_weight, column, columns)
    wait(overlaps)
    total = multiply(tile, normed(load_row(x, column, columns), norm_weights, eps, columns))
    tl.store(y + row, total.to(y.dtype.element_ty), row < rows)


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    if len(x) > 1:
        return batch.add_product(residual, x, norm_weight, weight, alpha, eps)
    rows, columns = weight.shape
    y = torch.empty_like(residual)
    width = triton.next_power_of_2(columns)
    block, tiles, warps = shape_of_program(rows, width)
    sizes = rows, columns, block, tiles, width
    _add_product[triton.cdiv(rows, block * tiles),](
        residual, x, norm_weight, weight, y, alpha, eps, *sizes, **launch_options(x, warps)
    )
    return y


@triton.jit
def _add_product(
    residual,
    x,
    norm_weight,
    weight,
    y,
    alpha,
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
    tile = load_rows(weight, row, rows, column, columns)
    if norm_weight is None:
        wait(overlaps)
        values = load_row(x, column, columns).to(tl.float32)
    else:
        norm_weights = load_row(norm_weight, column, columns)
        wait(overlaps)
        values = normed(load_row(x, column, columns), norm_weights, eps, columns)
    for number in tl.static_range(tiles):
        before = tl.load(residual + row, row < rows, 0.0)
        following = tile
        if number + 1 < tiles:
            following = load_rows(weight, row + block, rows, column, columns)  # while this one is multiplied
        total = multiply(tile, values).to(weight.dtype.element_ty)
        tl.store(y + row, before + alpha * total.to(tl.float32), row < rows)
        tile, row = following, row + block
