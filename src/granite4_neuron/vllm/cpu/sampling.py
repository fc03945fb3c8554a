"""Corrections of functions of vLLM's rejection sampler that are wrong on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

import torch


def expand_kernel(
    output: torch.Tensor,
    input: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int,
) -> None:
    """Repeat each request's value for each of its tokens, in any dtype, as vLLM's Triton kernel of this name does.

    Args:
        output: [tokens], written.
        input: [requests]; `replace_from` becomes `replace_to`.
        cu_num_tokens: [requests], the end of each request's tokens.
        MAX_NUM_TOKENS: Triton's; not used.
    """
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input == replace_from, replace_to, input)
    expanded = values.to(output.dtype).repeat_interleave(lengths)
    output[: len(expanded)] = expanded


def rejecting_placeholders(kernel: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's `_rejection_random_sample_kernel_impl` so that it rejects placeholders for drafts, -1. By itself it
    reads, for a placeholder, the probability of the last token in the previous row, and so may accept it.
    """

    @wraps(kernel)
    def reject(output, ends, drafts, draft_probs, target_probs, bonus, recovered, uniform, *others, **constants):
        uniform = uniform.masked_fill(drafts < 0, math.inf)  # higher than any probability
        drafts = drafts.clamp(min=0)
        kernel(output, ends, drafts, draft_probs, target_probs, bonus, recovered, uniform, *others, **constants)

    return reject


def register() -> None:
    """Replace vLLM's functions, which its CPU platform looks up when a worker starts.

    For dtypes other than int64 vLLM's own `_expand_kernel_impl` writes to a copy, and leaves the temperatures of
    sampled requests uninitialised.
    """
    from vllm.utils import cpu_triton_utils as kernels

    kernels._expand_kernel_impl = expand_kernel
    kernels._rejection_random_sample_kernel_impl = rejecting_placeholders(kernels._rejection_random_sample_kernel_impl)
