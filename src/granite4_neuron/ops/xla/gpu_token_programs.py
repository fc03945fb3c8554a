"""Programs of the Triton kernels of one token: their sizes, how they wait for each other, read and multiply.

A program has some rows of a matrix, whole; of a large matrix one tile of rows after another, so that it reads the
vector once for all of them. Where a GPU can, a kernel begins while the one before it still runs, as soon as all of its
programs are past `wait`. Before its own `wait` a program reads weights, and state that no other kernel of the step
writes; it writes nothing. What the last kernel but one wrote is there too.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# A tile has 4 rows of up to so many numbers, of one matrix or of each of two, or 2 longer ones. These numbers, and
# those of warps and tiles, were fastest on an H200.
_WIDEST_OF_FOUR = {1: 4096, 2: 1024}
_MOST_TILES = 8
_MOST_WARPS = 8
_WARPS_AT_ONCE = 2048
# Warps of programs that have one row of the router or a part of a head's state.
WARPS_OF_SMALL_PARTS = 4


def shape_of_program(rows: int, width: int, matrices: int = 1) -> tuple[int, int, int]:
    """Return how many rows of each matrix a tile has, how many tiles a program, and its warps.

    Args:
        rows: of all programs.
        width: of a row, a power of two.
        matrices: that a program reads rows of.
    """
    block = 4 if width <= _WIDEST_OF_FOUR[matrices] else 2
    warps = min(_MOST_WARPS, max(2, width // 1024))
    # A power of two, so that there are not many kernels, and about as many programs as run at once.
    tiles = 2 ** round(math.log2(max(1.0, rows * warps / (block * _WARPS_AT_ONCE))))
    return block, min(tiles, _MOST_TILES // matrices), warps


def launch_options(x: torch.Tensor, warps: int) -> dict[str, bool | int]:
    """Return how a kernel is launched; `overlaps`: whether it begins before the one before it has ended."""
    overlaps = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"overlaps": overlaps, "launch_pdl": overlaps, "num_warps": warps}


@triton.jit
def wait(overlaps: tl.constexpr):
    """Wait for the kernels before this one to end; the one after it may begin when all programs have come here."""
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()


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
def multiply(tile, values):
    """Multiply rows [block, width] with values [1, width] in float32: [block] in float32."""
    return tl.sum(tile.to(tl.float32) * values, 1)
