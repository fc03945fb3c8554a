"""Products of one token with a weight, or of each token with its experts' weights; and `linear` and `mlp`."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.devices.cuda import products
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.cuda.weights import dense, load_numbers, parts_of, rows_from, stored
from granite4_neuron.ops import Weight, moe


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, is_gated: bool = False) -> torch.Tensor:
    """Compute `products.linear`."""
    if x.numel() != x.shape[-1]:
        return products.linear(x, weight, bias, is_gated)
    values, scales = parts_of(weight)
    y = multiply_rows(x.reshape(1, -1), values, None, is_gated, scales)
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def mlp(x: torch.Tensor, input_weight: Weight, output_weight: Weight) -> torch.Tensor:
    """Compute `ops.mlp`."""
    return products.mlp(x, input_weight, output_weight, linear)


@operator()
def multiply_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor | None,
    is_gated: bool,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each token by a weight, or by several of many weights.

    Args:
        x: [tokens, columns].
        weight: [rows, columns]; with ids [weights, rows, columns].
        ids: [tokens * weights of a token], int, or None.
        is_gated: return silu(gate) * up, see `ops.silu_and_mul`.

    Returns:
        [tokens, rows] or [len(ids), rows], or half as many rows, in x's dtype.
    """
    weight = dense(weight, scales, x.shape[1], x.dtype)
    if ids is None:
        y = F.linear(x, weight.to(x.dtype))
    else:
        y = torch.bmm(weight[ids], x.repeat_interleave(len(ids) // len(x), 0)[..., None])[..., 0]
    return moe.silu_and_mul(y) if is_gated else y


@multiply_rows.register_fake
def _(x, weight, ids, is_gated, scales=None):
    return x.new_empty(len(x) if ids is None else len(ids), weight.shape[-2] // (1 + is_gated))


def _launch_multiply_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor | None,
    is_gated: bool,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    num_products = len(x) if ids is None else len(ids)
    columns = x.shape[1]
    rows = weight.shape[-2] // (1 + is_gated)
    y = x.new_empty(num_products, rows)
    block_n, block_k, num_warps = _config(columns)
    # Neighbouring programs read the same rows of weights, so that tokens of one expert find them in the cache.
    grid = num_products, triton.cdiv(rows, block_n)
    _multiply_rows_kernel[grid](
        x,
        stored(weight, scales),
        ids,
        y,
        num_products // len(x),
        N=rows,
        K=columns,
        IS_GATED=is_gated,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
    )
    return y


def _config(columns: int) -> tuple[int, int, int]:
    """Return (BLOCK_N, BLOCK_K, num_warps); these were fastest on an H200."""
    if columns <= 512:
        return 4, min(256, max(32, triton.next_power_of_2(columns))), 1
    return (1, 1024, 1) if columns < 2048 else (2, 1024, 4)


register_launch(multiply_rows, _launch_multiply_rows)


@triton.jit
def _multiply_rows_kernel(
    x,
    weight,
    ids,
    y,
    products_per_token,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N outputs of one product, with sums in float32.

    Grid: (products, cdiv(N, BLOCK_N)).

    Args:
        x: [products / products_per_token, K].
        weight: [N, K], or with ids [weights, N, K]; `weights.stored`. If gated it has N gate rows and then N up rows.
        ids: [products] int, the weight of each product; or None.
        y: [products, N].
        products_per_token: the weights that each token is multiplied by.
    """
    pid_m = tl.program_id(0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x += (pid_m // products_per_token) * K
    if ids is not None:
        weight = rows_from(weight, tl.load(ids + pid_m).to(tl.int64) * ((2 if IS_GATED else 1) * N), K)
    up_weight = rows_from(weight, N, K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if IS_GATED:
        acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x + offs_k, offs_k < K, other=0.0).to(tl.float32)[None]
        acc += load_numbers(weight, offs_n, N, start, K, BLOCK_K, tl.float32).to(tl.float32) * values
        if IS_GATED:
            acc_up += load_numbers(up_weight, offs_n, N, start, K, BLOCK_K, tl.float32).to(tl.float32) * values
    total = tl.sum(acc, 1)
    if IS_GATED:
        total = total * tl.sigmoid(total) * tl.sum(acc_up, 1)
    tl.store(y + pid_m * N + offs_n, total.to(y.dtype.element_ty), offs_n < N)
