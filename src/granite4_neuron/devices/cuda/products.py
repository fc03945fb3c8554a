"""Products of many tokens with a weight, or of each token with its experts' weights, summed in one order.

A token's outputs have the same bits whatever the number of tokens, its place among them and the tiles: an output is one
sum over ascending columns, by the same instruction. For 16-bit numbers this is the tensor cores' wgmma, which adds 16
columns at a time, for float32 one fused multiply-add after another. So tiles may depend on the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from granite4_neuron.devices.cuda.gemv import silu_and_mul
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops import moe

# The fewest tiles for which larger tiles are used: they keep most of an H200's 132 multiprocessors busy.
_FEWEST_TILES = 96
# (BLOCK_M, BLOCK_N, num_warps, num_stages) of 16-bit numbers, the largest first, as they were fastest on an H200 in the
# layers of h-350m, h-1b and h-tiny. BLOCK_M is at least 64, and there are at least four warps: with less, Triton uses
# another instruction.
_TILES = (128, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 5), (64, 32, 4, 6)
_TILES_OF_FLOAT32 = (64, 64, 4, 2), (64, 32, 4, 2)
_BLOCK_BYTES = 128  # of a row of a tile


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `ops.linear` of unquantized weights."""
    y = multiply_tokens(x.reshape(-1, x.shape[-1]), weight, bias, False, False)
    return y.view(*x.shape[:-1], -1)


def mlp(x: torch.Tensor, input_weight: torch.Tensor, output_weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.mlp` of unquantized weights."""
    is_gated = input_weight.shape[0] != output_weight.shape[1]
    activated = multiply_tokens(x.reshape(-1, x.shape[-1]), input_weight, None, is_gated, False)
    if not is_gated:
        activated = moe.relu2(activated)
    return multiply_tokens(activated, output_weight, None, False, False).view(x.shape)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.router_logits`."""
    return multiply_tokens(x, weight, None, False, True)


@operator()
def multiply_tokens(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_gated: bool, in_float32: bool
) -> torch.Tensor:
    """Multiply tokens by a weight.

    Args:
        x: [tokens, columns].
        weight: [rows, columns] in x's dtype.
        bias: [rows] in x's dtype, or None.
        is_gated: return silu(gate) * up, see `ops.silu_and_mul`; then there is no bias.
        in_float32: return float32, not rounded to x's dtype.

    Returns:
        [tokens, rows], or half as many rows, in x's dtype or float32.
    """
    if in_float32:
        y = x.float() @ weight.float().T
        return y if bias is None else y + bias.float()
    y = torch.nn.functional.linear(x, weight, bias)
    return moe.silu_and_mul(y) if is_gated else y


@multiply_tokens.register_fake
def _(x, weight, bias, is_gated, in_float32):
    return x.new_empty(len(x), len(weight) // (1 + is_gated), dtype=torch.float32 if in_float32 else None)


def _launch_multiply_tokens(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_gated: bool, in_float32: bool
) -> torch.Tensor:
    x = with_whole_rows(x)
    tokens, columns = x.shape
    n = len(weight) // (1 + is_gated)
    y = x.new_empty(tokens, n, dtype=torch.float32 if in_float32 else None)
    options = tiles(x, tokens, n, 1 + is_gated)
    grid = triton.cdiv(tokens, options["BLOCK_M"]) * triton.cdiv(n, options["BLOCK_N"])
    _multiply_tokens_kernel[grid,](
        x,
        weight.contiguous(),
        bias,
        y,
        tokens,
        x.stride(0),
        N=n,
        K=columns,
        IS_GATED=is_gated,
        GROUP_M=8,
        **options,
    )
    return y


register_launch(multiply_tokens, _launch_multiply_tokens)


def with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x, [rows, columns], with each row contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def input_precision(highest: str = "ieee") -> str:
    """Return how kernels multiply float32 numbers, which is torch's setting.

    Args:
        highest: "ieee", or "tf32x3" for tensor cores, which lose two bits of a product.
    """
    return highest if torch.get_float32_matmul_precision() == "highest" else "tf32"


def shared_memory(x: torch.Tensor) -> int:
    """Return the bytes of shared memory that a program may have on x's device; an H200's if x is not on a GPU."""
    if not x.is_cuda:
        return 227 * 1024
    device = torch.cuda.get_device_properties(x.device)
    memory: int = device.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it
    return memory


def tiles(x: torch.Tensor, tokens: int, n: int, num_weights: int) -> dict[str, Any]:
    """Return tiles and launch options of a product.

    Args:
        x: in the weight's dtype.
        n: outputs of a token.
        num_weights: weights from which a program reads rows: 2 for gate and up.
    """
    for choice in _TILES if x.itemsize == 2 else _TILES_OF_FLOAT32:
        options = tile_options(x, *choice, num_weights)
        if triton.cdiv(tokens, options["BLOCK_M"]) * triton.cdiv(n, options["BLOCK_N"]) >= _FEWEST_TILES:
            break
    return options


def tile_options(
    x: torch.Tensor, block_m: int, rows_of_weights: int, num_warps: int, num_stages: int, num_weights: int
) -> dict[str, Any]:
    """Return launch options for tiles of block_m tokens and of rows of all weights, with as many stages as fit."""
    stage = (block_m + rows_of_weights) * _BLOCK_BYTES
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": rows_of_weights // num_weights,
        "BLOCK_K": _BLOCK_BYTES // x.itemsize,
        "PRECISION": input_precision(),
        "num_warps": num_warps,
        "num_stages": max(1, min(num_stages, shared_memory(x) // stage)),
    }


@triton.jit(do_not_specialize=["M"])
def _multiply_tokens_kernel(
    x,
    weight,
    bias,
    y,
    M,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M tokens.

    Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),), in an order in which neighbours read the same tiles.

    Args:
        x: [M, K], with its stride.
        weight: [N, K]; if gated, N gate rows and then N up rows.
        bias: [N], or None.
        y: [M, N].
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    size_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    offs_m = (first_m + within % size_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = within // size_m * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = x + tl.where(offs_m < M, offs_m, 0)[:, None] * stride_x
    DTYPE: tl.constexpr = x.dtype.element_ty
    if IS_GATED:
        gate, up = multiply_tile_gate_up(rows, weight, offs_n, N, K, BLOCK_K, PRECISION)
        output = silu_and_mul(gate, up, DTYPE)
    else:
        output = multiply_tile(rows, weight, offs_n, N, K, BLOCK_K, PRECISION)
        if bias is not None:
            output += tl.load(bias + offs_n, offs_n < N, 0.0).to(tl.float32)[None]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None]
    tl.store(y + offs_m[:, None] * N + offs_n[None], output.to(y.dtype.element_ty), mask)


@triton.jit
def _load_columns(ptrs, start, offs_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns from start on; zeros beyond the last one."""
    if K % BLOCK_K == 0:
        return tl.load(ptrs + start)
    return tl.load(ptrs + start, start + offs_k < K, 0.0)


@triton.jit
def multiply_tile(
    rows, weight, offs_n, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr
):
    """Multiply rows with rows of a weight [N, K]: [BLOCK_M, BLOCK_N] in float32; columns from N on are meaningless.

    Args:
        rows: [BLOCK_M, 1] pointers to rows of K numbers.
    """
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = rows + offs_k[None]
    weight_ptrs = weight + tl.where(offs_n < N, offs_n, 0)[None] * K + offs_k[:, None]
    acc = tl.zeros([rows.shape[0], offs_n.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        tile = _load_columns(x_ptrs, start, offs_k[None], K, BLOCK_K)
        weights = _load_columns(weight_ptrs, start, offs_k[:, None], K, BLOCK_K)
        acc = tl.dot(tile, weights, acc, input_precision=PRECISION)
    return acc


@triton.jit
def multiply_tile_gate_up(
    rows, weight, offs_n, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr
):
    """Do the same as `multiply_tile` with the gate rows and with the up rows of a weight [2 * N, K]."""
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = rows + offs_k[None]
    gate_ptrs = weight + tl.where(offs_n < N, offs_n, 0)[None] * K + offs_k[:, None]
    acc_gate = tl.zeros([rows.shape[0], offs_n.shape[0]], tl.float32)
    acc_up = tl.zeros([rows.shape[0], offs_n.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        tile = _load_columns(x_ptrs, start, offs_k[None], K, BLOCK_K)
        gate = _load_columns(gate_ptrs, start, offs_k[:, None], K, BLOCK_K)
        up = _load_columns(gate_ptrs + N * K, start, offs_k[:, None], K, BLOCK_K)
        acc_gate = tl.dot(tile, gate, acc_gate, input_precision=PRECISION)
        acc_up = tl.dot(tile, up, acc_up, input_precision=PRECISION)
    return acc_gate, acc_up
