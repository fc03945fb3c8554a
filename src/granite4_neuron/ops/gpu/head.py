"""The head, for any number of tokens; each token has the same bits in any number."""

from __future__ import annotations

import torch

from granite4_neuron.ops import head
from granite4_neuron.ops.gpu.gemm import gemm, gemm_config, gemm_grid, padded_batch, rows_of_program
from granite4_neuron.ops.gpu.launch import gdc_launch_dependents, gdc_wait
from granite4_neuron.ops.gpu.operator import operator, register_launch
from granite4_neuron.ops.gpu.triton_utils import tl, triton


def logits(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute `ops.logits` of weights that are not quantized."""
    return score_tokens(x.reshape(-1, x.shape[-1]), weight, scaling).view(*x.shape[:-1], -1)


@operator()
def score_tokens(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute `ops.logits` of x, [rows, columns]: [rows, vocab_size] in float32."""
    return head.logits(x, weight, scaling)


@score_tokens.register_fake
def _(x, weight, scaling):
    return x.new_empty(len(x), len(weight), dtype=torch.float32)


def _launch_score_tokens(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    (vocab_size, columns), rows = weight.shape, len(x)
    x, y = x.contiguous(), x.new_empty(rows, vocab_size, dtype=torch.float32)
    block_n, block_k, options = gemm_config(x, vocab_size)
    _score_tokens_kernel[gemm_grid(rows, triton.cdiv(vocab_size, block_n))](
        x,
        weight,
        y,
        scaling,
        M=rows,
        BLOCK_M=padded_batch(rows),
        N=vocab_size,
        K=columns,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **options,
    )
    return y


register_launch(score_tokens, _launch_score_tokens)


@triton.jit
def _score_tokens_kernel(
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
    """Compute BLOCK_N logits of BLOCK_M of M tokens.

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)).

    Args:
        x: [M, K] in weight's dtype, normalised.
        weight: [N, K].
        y: [M, N] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = rows_of_program(M, BLOCK_M)
    mask_m = offs_m < M
    gdc_wait(USE_GDC)
    acc = gemm(weight, offs_n, N, x, offs_m, mask_m, K, BLOCK_K).to(weight.dtype.element_ty).to(tl.float32)
    offs = offs_m[None].to(tl.int64) * N + offs_n[:, None]
    tl.store(y + offs, acc / scaling, (offs_n < N)[:, None] & mask_m[None])
