"""Sums whose order does not depend on which threads hold what, for numbers that several kernels have to compute alike.

Kernels that use them are launched with `EXACT_PRODUCTS`: otherwise a compiler rounds a product before it is added, or
not, as it suits the threads.
"""

from __future__ import annotations

from granite4_neuron.ops.gpu.triton_utils import tl, triton

# Options of a launch: no product is joined with a sum, but where a kernel says `tl.fma`.
EXACT_PRODUCTS = {"enable_fp_fusion": False}
_MOST_LEVELS = tl.constexpr(20)


@triton.jit
def sum_of_pairs(values):
    """Add up rows of values, [ROWS, COLUMNS] with a power of two of columns: neighbours, then neighbouring sums, and
    so on. [ROWS].
    """
    for _ in tl.static_range(_MOST_LEVELS):
        if values.shape[1] > 1:
            values = tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]), 2)
    return tl.reshape(values, [values.shape[0]])
