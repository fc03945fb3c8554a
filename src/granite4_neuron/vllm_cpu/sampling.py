"""What vLLM's sampler of verified drafts lacks on a CPU."""

from __future__ import annotations

import torch


def expand_kernel(
    output: torch.Tensor,
    input: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int,
) -> None:
    """One value of each request for each of its tokens, in any dtype: what vLLM's kernel of this name does.

    Args:
        output: [tokens], written.
        input: [requests]; `replace_from` among them becomes `replace_to`.
        cu_num_tokens: [requests], where each request's tokens end.
        MAX_NUM_TOKENS: of Triton's, without effect.
    """
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input == replace_from, replace_to, input)
    expanded = values.to(output.dtype).repeat_interleave(lengths)
    output[: len(expanded)] = expanded


def register() -> None:
    """Put it where vLLM's CPU platform looks for its kernels when a worker starts.

    Its own writes to a copy where dtypes are not int64, so that temperatures of sampled requests are whatever was in
    memory.
    """
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand_kernel
