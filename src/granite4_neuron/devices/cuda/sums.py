"""Sums in an order that does not depend on the layout of threads, for numbers that several kernels must compute alike.

Kernels that use them are launched with `EXACT_PRODUCTS`: otherwise the compiler may or may not fuse a product with a
sum, depending on the layout of threads.
"""

from __future__ import annotations

from granite4_neuron.devices.cuda.triton_utils import tl, triton

# Options of a launch: no product is fused with a sum, except by `tl.fma`.
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
