"""Products of matrices with one vector, for decode of one sequence: block sizes, the vector, its norm.

A program computes BLOCK_N outputs from whole rows of a weight, [N, K]. For a large weight it computes NUM_TILES such
blocks, so that it reads the vector once for all of them.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.triton_utils import tl, triton

# (BLOCK_N, num_warps) by the number of weights and BLOCK_K. Within 2 % of the fastest on an H200, in the layers of
# h-350m (K = 768), h-tiny (1,536) and h-small (4,096).
_CONFIGS = {
    1: {2048: (4, 2), 4096: (4, 4), 8192: (2, 8)},
    2: {1024: (4, 2), 2048: (2, 2), 4096: (4, 8)},
}
_MIN_SIZE_OF_TWO_TILES = 2**24
# Of quantized weights: a tile's rows of all weights, and a warp's columns; fastest on an H200 in h-small's layers.
_QUANTIZED_CONFIGS = {torch.int8: (4, 2048), torch.uint8: (4, 2048), torch.float8_e4m3fn: (4, 1024)}


def gemv_config(
    n: int, block_k: int, num_weights: int = 1, dtype: torch.dtype = torch.bfloat16
) -> tuple[int, int, int]:
    """Return (BLOCK_N, NUM_TILES, num_warps) of a product.

    Args:
        n: outputs of all programs.
        block_k: the size of the vector, rounded up to a power of two.
        num_weights: weights from each of which a program reads BLOCK_N rows: 2 for gate and up.
        dtype: of their values.
    """
    if dtype in _QUANTIZED_CONFIGS:
        rows, columns_of_warp = _QUANTIZED_CONFIGS[dtype]
        return rows // num_weights, 1, max(1, block_k // columns_of_warp)
    configs = _CONFIGS[num_weights]
    block_n, num_warps = configs[min(max(block_k, min(configs)), max(configs))]
    return block_n, 2 if n * block_k * num_weights >= _MIN_SIZE_OF_TWO_TILES else 1, num_warps


@triton.jit
def load_vector(x, offs_k, K):
    """Load a vector [K]: [1, BLOCK_K], zeros beyond its end."""
    return tl.load(x + offs_k[None], (offs_k < K)[None], 0.0)


@triton.jit
def rms_norm(x, weight, eps, K):
    """Compute `ops.rms_norm` of x, both [1, BLOCK_K]: rounded to the weight's dtype, returned in float32."""
    return rms_norm_part(x, x, weight, eps, K)


@triton.jit
def rms_norm_part(part, x, weight, eps, K):
    """Compute a part of `ops.rms_norm` of x: a part of x and that of the weight, both [1, BLOCK_N]."""
    rstd = tl.rsqrt(tl.sum(x * x, 1) / K + eps)
    return (part * rstd[:, None] * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)


@triton.jit
def silu_and_mul(gate, up, DTYPE: tl.constexpr):
    """Compute `ops.silu_and_mul`, rounded to DTYPE wherever that rounds."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    return ((gate * tl.sigmoid(gate)).to(DTYPE).to(tl.float32) * up).to(DTYPE)
