"""Products of matrices with several vectors, on tensor cores: block sizes, norms, loops.

A program computes BLOCK_N outputs of BLOCK_M of M vectors from rows of a weight [N, K], BLOCK_K columns at a time, so
that tensor cores work on some columns while the next ones are being loaded. A separate kernel normalises the vectors
first.

An output has the same bits for any number of vectors and any place of its vector among them. Every configuration adds
up in one order: by one tensor-core instruction, mma.sync of 16 columns (in float32 a fused multiply-add of one), from
the first column to the last. The larger instruction of newer GPUs, wgmma, which Triton uses for 64 rows and 4 warps,
adds in another order; so no configuration may have both. Norms have one program per vector, the same for any number of
vectors.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.gemv import load_vector, rms_norm
from granite4_neuron.devices.cuda.launch import MULTIPROCESSORS, gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.products import shared_memory
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.cuda.weights import load_numbers, rows_from, stored

_NUM_WARPS_OF_NORM = 8
_MOST_OF_A_PROGRAM = 32  # vectors


def gemm_config(x: torch.Tensor, n: int, num_weights: int = 1) -> dict[str, bool | int]:
    """Return the options of a product's launch: M, BLOCK_M, K, BLOCK_N, BLOCK_K and those of `launch_options`.

    Args:
        x: [M, K].
        n: outputs of a vector in all programs.
        num_weights: weights from each of which a program reads BLOCK_N rows: 2 for gate and up.
    """
    batch, columns = x.shape
    block_n, num_bytes, num_warps, num_stages = _config(n, batch, num_weights)
    block_m, block_k = padded_batch(batch), min(num_bytes // x.itemsize, max(32, triton.next_power_of_2(columns)))
    stage = (num_weights * block_n + block_m) * block_k * x.itemsize
    num_stages = max(1, min(num_stages, shared_memory(x) // stage))
    shape = dict(M=batch, BLOCK_M=block_m, K=columns, BLOCK_N=block_n, BLOCK_K=block_k)
    return {**shape, **launch_options(x, num_warps), "num_stages": num_stages}


def _config(n: int, batch: int, num_weights: int) -> tuple[int, int, int, int]:
    """Return (BLOCK_N, the bytes of BLOCK_K columns, num_warps, num_stages).

    With these a layer takes at most 6 % longer than with each kernel's fastest configuration on an H200, with 8 and 32
    sequences of h-350m, h-tiny and h-small, and 8 of h-1b.
    """
    if n < 32 * MULTIPROCESSORS:
        return 16, 512, 1 if batch <= 16 else 2, 5 - num_weights
    if batch <= 16:
        return 32, 512, 2, 3
    return (32, 512, 4, 3) if n < 64 * MULTIPROCESSORS else (64, 256, 2, 4)


def padded_batch(batch: int) -> int:
    """Return BLOCK_M for a batch: how many vectors the tensor cores of a program multiply."""
    return min(_MOST_OF_A_PROGRAM, max(8, triton.next_power_of_2(batch)))


def gemm_grid(batch: int, num_programs: int) -> tuple[int, int]:
    """Return the grid for `batch` vectors with num_programs per BLOCK_M vectors. Neighbouring programs read the same
    weight.
    """
    return triton.cdiv(batch, padded_batch(batch)), num_programs


def rms_norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `ops.rms_norm` of x, [M, K] in float32, in weight's dtype."""
    y, columns = weight.new_empty(x.shape), x.shape[1]
    options = launch_options(x, _NUM_WARPS_OF_NORM)
    block_k = triton.next_power_of_2(columns)
    _rms_norm_kernel[len(x),](x, weight, y, eps, K=columns, BLOCK_K=block_k, **options)
    return y


@triton.jit
def _rms_norm_kernel(x, weight, y, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, USE_GDC: tl.constexpr):
    """Normalise a row of x, [M, K] in float32, to y in weight's dtype. Grid: (M,)."""
    gdc_launch_dependents(USE_GDC)
    pid_m, offs_k = tl.program_id(0), tl.arange(0, BLOCK_K)
    weights = load_vector(weight, offs_k, K)
    gdc_wait(USE_GDC)
    values = rms_norm(load_vector(x + pid_m * K, offs_k, K), weights, eps, K)
    tl.store(y + pid_m * K + offs_k[None], values.to(y.dtype.element_ty), (offs_k < K)[None])


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    y: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """Multiply x [M, K] with a weight [N, K] and write the products to y [M, N], rounded to x's dtype and then divided
    by `scaling`, if any. Return y.
    """
    options = gemm_config(x, len(weight))
    programs = triton.cdiv(len(weight), options["BLOCK_N"])
    _multiply_kernel[gemm_grid(len(x), programs)](x, stored(weight, scales), y, scaling, N=len(weight), **options)
    return y


@triton.jit
def _multiply_kernel(
    x,
    weight,
    y,
    scaling,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_N outputs of BLOCK_M of M vectors.

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)).

    Args:
        x: [M, K].
        weight: [N, K], `weights.stored`.
        y: [M, N].
        scaling: the divisor of outputs, in float32; or None.
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = rows_of_program(M, BLOCK_M)
    mask_m = offs_m < M
    gdc_wait(USE_GDC)
    outputs = gemm(weight, offs_n, N, x, offs_m, mask_m, K, BLOCK_K).to(x.dtype.element_ty)
    if scaling is not None:
        outputs = outputs.to(tl.float32) / scaling
    offs = offs_m[None].to(tl.int64) * N + offs_n[:, None]
    tl.store(y + offs, outputs.to(y.dtype.element_ty), (offs_n < N)[:, None] & mask_m[None])


@triton.jit
def rows_of_program(M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the numbers of a program's vectors in `gemm_grid`, [BLOCK_M]; they may go beyond the last of M vectors."""
    offs_m = tl.arange(0, BLOCK_M)
    if M > BLOCK_M:  # otherwise the compiler can know which of them exist
        offs_m += tl.program_id(0) * BLOCK_M
    return offs_m


@triton.jit
def _load_columns(x, offs_m, mask_m, offs_k, K):
    """Load some columns of rows offs_m of x [.., K]: [BLOCK_K, BLOCK_M], zeros where mask_m is false."""
    return tl.load(x + offs_m[None] * K + offs_k[:, None], mask_m[None] & (offs_k < K)[:, None], 0.0)


@triton.jit
def gemm(weight, offs_n, N, x, offs_m, mask_m, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Multiply rows of a weight [N, K] with rows of x [.., K]: [BLOCK_N, BLOCK_M] in float32.

    Args:
        weight: `weights.stored`.
        offs_n: [BLOCK_N].
        offs_m, mask_m: [BLOCK_M], the rows of x, and whether each exists; the result is zero for a row that does not.
    """
    acc = tl.zeros([offs_n.shape[0], offs_m.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        tile = load_numbers(weight, offs_n, N, start, K, BLOCK_K, x.dtype.element_ty)
        columns = _load_columns(x, offs_m, mask_m, start + tl.arange(0, BLOCK_K), K)
        acc = tl.dot(tile, columns, acc, input_precision="ieee")
    return acc


@triton.jit
def gemm_gate_up(weight, offs_n, N, x, offs_m, mask_m, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Do the same as `gemm` with the gate and the up rows of a weight [2 * N, K]: two of [BLOCK_N, BLOCK_M]."""
    up_weight = rows_from(weight, N, K)
    acc_gate = tl.zeros([offs_n.shape[0], offs_m.shape[0]], tl.float32)
    acc_up = tl.zeros([offs_n.shape[0], offs_m.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        gate = load_numbers(weight, offs_n, N, start, K, BLOCK_K, x.dtype.element_ty)
        up = load_numbers(up_weight, offs_n, N, start, K, BLOCK_K, x.dtype.element_ty)
        columns = _load_columns(x, offs_m, mask_m, start + tl.arange(0, BLOCK_K), K)
        acc_gate = tl.dot(gate, columns, acc_gate, input_precision="ieee")
        acc_up = tl.dot(up, columns, acc_up, input_precision="ieee")
    return acc_gate, acc_up
