"""Programs of the Triton kernels of decode: their sizes, how they wait for each other, read and multiply.

A program has some rows of a matrix, whole; of a large matrix two tiles of rows, so that it reads the vector once for
both. Where a GPU can, a kernel begins while those before it still run, as soon as all programs of the one before it
have come to `let_next_begin`. Before its own `wait` a program reads weights, and state that no other kernel of the step
writes; it writes nothing. After it, whatever earlier kernels wrote is there. One kernel also reads before its `wait`
what the last but one wrote; so the last one lets it begin only after its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Rows of a tile, of each matrix, and warps, by the number of matrices and the width of a row. Within 2 % of the fastest
# on an H200, in the layers of h-350m (768 columns), h-tiny (1,536) and h-small (4,096).
_SHAPES = {
    1: {2048: (4, 2), 4096: (4, 4), 8192: (2, 8)},
    2: {1024: (4, 2), 2048: (2, 2), 4096: (4, 8)},
}
_NUMBERS_OF_TWO_TILES = 2**24
# Warps of programs that have one row of the router or a part of a head's state.
WARPS_OF_SMALL_PARTS = 4


def shape_of_program(rows: int, width: int, matrices: int = 1) -> tuple[int, int, int]:
    """Return how many rows of each matrix a tile has, how many tiles a program, and its warps.

    Args:
        rows: of all programs.
        width: of a row, a power of two.
        matrices: that a program reads rows of.
    """
    shapes = _SHAPES[matrices]
    block, warps = shapes[min(max(width, min(shapes)), max(shapes))]
    return block, 2 if rows * width * matrices >= _NUMBERS_OF_TWO_TILES else 1, warps


def launch_options(x: torch.Tensor, warps: int) -> dict[str, bool | int]:
    """Return how a kernel is launched; `overlaps`: whether it begins before those before it have ended."""
    overlaps = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"overlaps": overlaps, "launch_pdl": overlaps, "num_warps": warps}


@triton.jit
def let_next_begin(overlaps: tl.constexpr):
    """Let the kernel after this one begin when all programs of this one have come here."""
    if overlaps:
        gdc_launch_dependents()


@triton.jit
def wait(overlaps: tl.constexpr):
    """Wait for the kernels before this one to end."""
    if overlaps:
        gdc_wait()


@triton.jit
def load_rows(weight, row, rows, column, columns):
    """Load some rows of a matrix, whole, [block, width]."""
    is_here = (row < rows)[:, None] & (column < columns)[None]
    return tl.load(weight + row[:, None] * columns + column[None], is_here, 0.0)


@triton.jit
def load_row(x, column, columns):
    """Load a vector, [1, width]."""
    return tl.load(x + column[None], (column < columns)[None], 0.0)


@triton.jit
def normed(x, weights, eps, columns):
    """Compute `ops.rms_norm` of x with weights, both [1, width], rounded to the weights' dtype, in float32."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)
    return (x * scale[:, None] * weights.to(tl.float32)).to(weights.dtype).to(tl.float32)


@triton.jit
def silu_and_mul(gate, up, dtype: tl.constexpr):
    """Compute `ops.silu_and_mul`, rounded to a dtype wherever that is."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def multiply(tile, values):
    """Multiply rows [block, width] with values [1, width] in float32: [block] in float32."""
    return tl.sum(tile.to(tl.float32) * values, 1)
