"""Products of many tokens with a weight, or of each token with its experts' weights, summed in one order.

A token's outputs have the same bits whatever the number of tokens, its place among them and the tiles: an output is one
sum over ascending columns, by the same instruction. For 16-bit numbers this is the tensor cores' wgmma, which adds 16
columns at a time, for float32 one fused multiply-add after another. So tiles may depend on the number of tokens.

cuBLAS adds 16-bit numbers in this order too, if it does not divide a sum, and is faster where a product is not gated.
What it does for a shape is found by trying: it is used where it gives the bits of the kernel here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from granite4_neuron.devices.cuda.gemv import silu_and_mul
from granite4_neuron.devices.cuda.launch import has_compute_capability
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.triton_utils import TensorDescriptor, tl, triton
from granite4_neuron.devices.cuda.weights import dense, dequantized, parts_of
from granite4_neuron.ops import Weight, moe

# The fewest tiles for which larger tiles are used: they keep most of an H200's 132 multiprocessors busy.
_FEWEST_TILES = 96
# (BLOCK_M, rows of weights, num_warps, num_stages) of 16-bit numbers, the largest first, as they were fastest on an
# H200 in the layers of h-350m, h-1b and h-tiny. BLOCK_M is at least 64, and there are at least four warps: with less,
# Triton uses another instruction.
_TILES = (128, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 5), (64, 32, 4, 6)
_TILES_OF_FLOAT32 = (64, 64, 4, 2), (64, 32, 4, 2)
_BLOCK_BYTES = 128  # of a row of a tile
_TMA_BYTES = 16  # to which tensor descriptors are aligned


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, is_gated: bool = False) -> torch.Tensor:
    """Compute `ops.linear`; is_gated: return `ops.silu_and_mul` of it, then there is no bias."""
    values, scales = parts_of(weight)
    y = multiply_tokens(x.reshape(-1, x.shape[-1]), values, bias, is_gated, False, scales)
    return y.view(*x.shape[:-1], -1)


def mlp(
    x: torch.Tensor,
    input_weight: Weight,
    output_weight: Weight,
    multiply: Callable[..., torch.Tensor] = linear,
) -> torch.Tensor:
    """Compute `ops.mlp`; multiply: takes the arguments of `linear`."""
    is_gated = input_weight.shape[0] != output_weight.shape[1]
    activated = multiply(x, input_weight, None, is_gated)
    return multiply(activated if is_gated else moe.relu2(activated), output_weight)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.router_logits`."""
    return multiply_tokens(x, weight, None, False, True)


@operator()
def multiply_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    in_float32: bool,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply tokens by a weight.

    Args:
        x: [tokens, columns].
        weight: [rows, columns] in x's dtype; a quantized one, with scales, is dequantized first.
        bias: [rows] in x's dtype, or None.
        is_gated: return silu(gate) * up, see `ops.silu_and_mul`; then there is no bias.
        in_float32: return float32, not rounded to x's dtype.

    Returns:
        [tokens, rows], or half as many rows, in x's dtype or float32.
    """
    weight = dense(weight, scales, x.shape[1], x.dtype)
    if in_float32:
        y = x.float() @ weight.float().T
        return y if bias is None else y + bias.float()
    y = torch.nn.functional.linear(x, weight, bias)
    return moe.silu_and_mul(y) if is_gated else y


@multiply_tokens.register_fake
def _(x, weight, bias, is_gated, in_float32, scales=None):
    return x.new_empty(len(x), len(weight) // (1 + is_gated), dtype=torch.float32 if in_float32 else None)


def _launch_multiply_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    in_float32: bool,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    if scales is not None:
        weight = dequantized(weight, scales, x.shape[1], x.dtype)
    x, weight = with_whole_rows(x), weight.contiguous()
    suits_library = x.is_cuda and x.itemsize == 2 and x.is_contiguous() and bias is None and not is_gated
    if suits_library and _library_adds_alike(len(x), *weight.shape, in_float32, x.dtype, x.device):
        return _library_product(x, weight, in_float32)
    return _multiply(x, weight, bias, is_gated, in_float32)


def _library_product(x: torch.Tensor, weight: torch.Tensor, in_float32: bool) -> torch.Tensor:
    return torch.mm(x, weight.T, out_dtype=torch.float32) if in_float32 else torch.mm(x, weight.T)


@functools.cache
def _library_adds_alike(
    tokens: int, rows: int, columns: int, in_float32: bool, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether cuBLAS gives the bits of `_multiply` for a shape, by trying it."""
    x, weight = numbers_that_cancel(tokens, rows, columns, dtype, device)
    return torch.equal(_library_product(x, weight, in_float32), _multiply(x, weight, None, False, in_float32))


def numbers_that_cancel(
    tokens: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random x and weight of which each sum is 0, so that all of an output is the rounding of its partial sums:
    it shows their order, which outputs of 16 bits otherwise seldom do.
    """
    generator, half = torch.Generator(device).manual_seed(0), columns // 2

    def half_of(count: int) -> torch.Tensor:
        numbers = torch.randn(count, half, generator=generator, device=device, dtype=dtype)
        # In 8 bits: a GPU may have little room beside the weights.
        exponents = torch.randint(-4, 5, numbers.shape, generator=generator, device=device, dtype=torch.int8)
        return numbers.mul_(exponents.exp2())

    order = torch.randperm(2 * half, generator=generator, device=device)
    x, weight = half_of(tokens), half_of(rows)
    x, weight = torch.cat([x, x], 1)[:, order], torch.cat([weight, -weight], 1)[:, order]
    last = 0, columns % 2
    return torch.nn.functional.pad(x, last), torch.nn.functional.pad(weight, last)


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_gated: bool, in_float32: bool
) -> torch.Tensor:
    tokens, columns = x.shape
    num_weights = 1 + is_gated
    n = len(weight) // num_weights
    y = x.new_empty(tokens, n, dtype=torch.float32 if in_float32 else None)
    options = tiles(x, tokens, n, num_weights)
    matrices = weight.view(num_weights, n, columns)
    block_m, block_n, block_k = (options[f"BLOCK_{axis}"] for axis in "MNK")
    grid = triton.cdiv(tokens, block_m) * triton.cdiv(n, block_n)
    if by_descriptors := has_descriptors(x, matrices, y):
        tensors = (
            TensorDescriptor.from_tensor(x, [block_m, block_k]),
            TensorDescriptor.from_tensor(matrices, [num_weights, block_n, block_k]),
            TensorDescriptor.from_tensor(y, [block_m, block_n]),
        )
    else:
        tensors = x, weight, y
    _multiply_tokens_kernel[grid,](
        *tensors,
        bias,
        tokens,
        x.stride(0),
        N=n,
        K=columns,
        NUM_WEIGHTS=num_weights,
        GROUP_M=8,
        BY_DESCRIPTORS=by_descriptors,
        **options,
    )
    return y


register_launch(multiply_tokens, _launch_multiply_tokens)


def with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x, [rows, columns], with each row contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def has_descriptors(*tensors: torch.Tensor) -> bool:
    """Return whether kernels on the tensors' device copy tiles by tensor descriptors, and these tensors suit them."""
    if tensors[0].is_cuda and not has_compute_capability(tensors[0], 9):
        return False
    return all(
        each.data_ptr() % _TMA_BYTES == 0
        # Elements, not bytes: the interpreter of Triton 3.5 leaves out their size, and real widths suit both.
        and all(stride % _TMA_BYTES == 0 for stride in each.stride()[:-1])
        for each in tensors
    )


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
    y,
    bias,
    M,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_DESCRIPTORS: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M tokens.

    Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),), in an order in which neighbours read the same tiles.

    Args:
        x: [M, K], with its stride.
        weight: [NUM_WEIGHTS, N, K]: gate and up, or one weight.
        y: [M, N]. With BY_DESCRIPTORS these three are tensor descriptors.
        bias: [N], or None.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    size_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    pid_m, pid_n = first_m + within % size_m, within // size_m
    offs_m, offs_n = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if BY_DESCRIPTORS:
        acc = tl.zeros([BLOCK_M, NUM_WEIGHTS * BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            tile = x.load([pid_m * BLOCK_M, start])
            weights = weight.load([0, pid_n * BLOCK_N, start]).reshape([NUM_WEIGHTS * BLOCK_N, BLOCK_K])
            acc = tl.dot(tile, tl.trans(weights), acc, input_precision=PRECISION)
        output = outputs_of(acc, NUM_WEIGHTS, y.dtype)
    else:
        rows = x + tl.where(offs_m < M, offs_m, 0)[:, None] * stride_x
        acc = multiply_tile(rows, weight, pid_n * BLOCK_N, N, K, NUM_WEIGHTS, BLOCK_N, BLOCK_K, PRECISION)
        output = outputs_of(acc, NUM_WEIGHTS, y.dtype.element_ty)
    if bias is not None:
        output += tl.load(bias + offs_n, offs_n < N, 0.0).to(tl.float32)[None]
    if BY_DESCRIPTORS:
        y.store([pid_m * BLOCK_M, pid_n * BLOCK_N], output.to(y.dtype))
    else:
        mask = (offs_m < M)[:, None] & (offs_n < N)[None]
        tl.store(y + offs_m[:, None] * N + offs_n[None], output.to(y.dtype.element_ty), mask)


@triton.jit
def load_columns(ptrs, start, offs_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns from start on; zeros beyond the last one."""
    if K % BLOCK_K == 0:
        return tl.load(ptrs + start)
    return tl.load(ptrs + start, start + offs_k < K, 0.0)


@triton.jit
def rows_of_weights(first, N: tl.constexpr, NUM_WEIGHTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the numbers of BLOCK_N rows of each of some weights [NUM_WEIGHTS, N, ..], from the row `first` on:
    [NUM_WEIGHTS * BLOCK_N]; of the row 0 in place of rows from N on.
    """
    offs_n = tl.arange(0, NUM_WEIGHTS * BLOCK_N)
    row = first + offs_n % BLOCK_N
    if N % BLOCK_N != 0:
        row = tl.where(row < N, row, 0)
    return row + offs_n // BLOCK_N * N


@triton.jit
def multiply_tile(
    rows,
    weight,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply rows with BLOCK_N rows of each of some weights, from the row `first` on: [BLOCK_M, NUM_WEIGHTS *
    BLOCK_N] in float32; columns of rows from N on are meaningless.

    Args:
        rows: [BLOCK_M, 1] pointers to rows of K numbers.
        weight: [NUM_WEIGHTS, N, K].
    """
    offs_k = tl.arange(0, BLOCK_K)
    row = rows_of_weights(first, N, NUM_WEIGHTS, BLOCK_N)
    x_ptrs, weight_ptrs = rows + offs_k[None], weight + row[None] * K + offs_k[:, None]
    acc = tl.zeros([rows.shape[0], NUM_WEIGHTS * BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        tile = load_columns(x_ptrs, start, offs_k[None], K, BLOCK_K)
        weights = load_columns(weight_ptrs, start, offs_k[:, None], K, BLOCK_K)
        acc = tl.dot(tile, weights, acc, input_precision=PRECISION)
    return acc


@triton.jit
def outputs_of(acc, NUM_WEIGHTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the outputs of products with gate and up, [BLOCK_M, 2 * BLOCK_N], in DTYPE; those with one weight stay as
    they are.
    """
    output = acc
    if NUM_WEIGHTS == 2:
        parts = tl.reshape(acc, [acc.shape[0], 2, acc.shape[1] // 2])
        gate, up = tl.split(tl.permute(parts, [0, 2, 1]))
        output = silu_and_mul(gate, up, DTYPE)
    return output


@triton.jit
def dot_of_weights(left, right, acc, PRECISION: tl.constexpr):
    """Add the product of two matrices, one of which may have float32 weights and the other bfloat16 values.

    Then the weights are the sum of two such numbers, to keep 16 of their digits.
    """
    if left.dtype == tl.bfloat16 and right.dtype == tl.float32:
        high, low = in_two(right)
        acc = tl.dot(left, high, acc)
        acc = tl.dot(left, low, acc)
    elif left.dtype == tl.float32 and right.dtype == tl.bfloat16:
        high, low = in_two(left)
        acc = tl.dot(high, right, acc)
        acc = tl.dot(low, right, acc)
    else:
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def in_two(values):
    """Return two numbers of bfloat16 for each finite one of float32, whose sum has 16 of its digits."""
    # Integers round, because a GPU converts two numbers at once only where nothing but tensor cores reads them.
    high = ((values.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (values - high).to(tl.bfloat16)
