"""Programs of the Triton kernels of decode of several sequences, as `ops.gpu.token_programs` has those of one.

A program multiplies some rows of a matrix with the vectors of all sequences, some columns at a time, so that tensor
cores work on some while the next ones are on their way. Vectors are normalised before, by a kernel of its own. Kernels
wait for each other as those of one sequence do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from granite4_neuron.ops.gpu.token_programs import launch_options, let_next_begin, load_row, load_rows, normed, wait

_WARPS_OF_NORM = 8
_MULTIPROCESSORS = 132  # of an H200


def shape_of_product(x: torch.Tensor, rows: int, matrices: int = 1) -> tuple[int, int, dict[str, bool | int]]:
    """Return how vectors are multiplied with rows of a matrix.

    Args:
        x: [batch, columns], in the matrix's dtype.
        rows: of all programs.
        matrices: that a program reads rows of.

    Returns:
        (rows of a program, columns at a time, launch options).
    """
    block, num_bytes, warps, stages = _shape(rows, len(x), matrices)
    width = min(num_bytes // x.itemsize, max(16, triton.next_power_of_2(x.shape[1])))
    if x.is_cuda:
        memory = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin
        stages = max(1, min(stages, memory // ((matrices * block + padded(len(x))) * width * x.itemsize)))
    return block, width, launch_options(x, warps) | {"num_stages": stages}


def _shape(rows: int, batch: int, matrices: int) -> tuple[int, int, int, int]:
    """Return a program's rows, the bytes of a row that make a part, warps, and how many parts are under way at once.

    A layer takes at most 6 % longer than with the fastest of each kernel on an H200, with 8 and 32 sequences of h-350m,
    h-tiny and h-small, and 8 of h-1b.
    """
    if rows < 32 * _MULTIPROCESSORS:
        return 16, 512, 1 if batch <= 16 else 2, 5 - matrices
    if batch <= 16:
        return 32, 512, 2, 3
    return (32, 512, 4, 3) if rows < 64 * _MULTIPROCESSORS else (64, 256, 4, 4)


def padded(batch: int) -> int:
    """Return how many vectors tensor cores multiply for so many sequences."""
    return max(8, triton.next_power_of_2(batch))


def normed_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `ops.rms_norm`."""
    y, columns = weight.new_empty(x.shape), x.shape[1]
    options = launch_options(x, _WARPS_OF_NORM)
    _norm_row[len(x),](x, weight, y, eps, columns, triton.next_power_of_2(columns), **options)
    return y


@triton.jit
def _norm_row(x, weight, y, eps, columns: tl.constexpr, width: tl.constexpr, overlaps: tl.constexpr):
    let_next_begin(overlaps)
    token, column = tl.program_id(0), tl.arange(0, width)
    weights = load_row(weight, column, columns)
    wait(overlaps)
    values = normed(load_row(x + token * columns, column, columns), weights, eps, columns)
    tl.store(y + token * columns + column[None], values.to(y.dtype.element_ty), (column < columns)[None])


@triton.jit
def load_columns(x, vector, is_here, column, columns):
    """Load some columns of some vectors, [width, vectors]."""
    return tl.load(x + vector[None] * columns + column[:, None], is_here[None] & (column < columns)[:, None], 0.0)


@triton.jit
def multiply_vectors(weight, row, rows, x, vector, is_here, columns: tl.constexpr, width: tl.constexpr):
    """Multiply rows of a matrix with some vectors, [block, vectors] in float32.

    Args:
        row: [block].
        vector, is_here: [vectors], which rows of x, and whether there is one; if not, it is zeros.
    """
    total = tl.zeros([row.shape[0], vector.shape[0]], tl.float32)
    for start in range(0, columns, width):
        column = start + tl.arange(0, width)
        tile = load_rows(weight, row, rows, column, columns)
        total = tl.dot(tile, load_columns(x, vector, is_here, column, columns), total, input_precision="ieee")
    return total


@triton.jit
def multiply_gated(weight, row, rows, x, vector, is_here, columns: tl.constexpr, width: tl.constexpr):
    """Do as `multiply_vectors` with gate rows, and with as many up rows behind them: two of [block, vectors]."""
    gates = tl.zeros([row.shape[0], vector.shape[0]], tl.float32)
    ups = tl.zeros([row.shape[0], vector.shape[0]], tl.float32)
    for start in range(0, columns, width):
        column = start + tl.arange(0, width)
        gate = load_rows(weight, row, rows, column, columns)
        up = load_rows(weight + rows * columns, row, rows, column, columns)
        values = load_columns(x, vector, is_here, column, columns)
        gates = tl.dot(gate, values, gates, input_precision="ieee")
        ups = tl.dot(up, values, ups, input_precision="ieee")
    return gates, ups
