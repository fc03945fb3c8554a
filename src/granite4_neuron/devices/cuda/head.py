"""The head, for any number of tokens; a token's bits do not depend on this number."""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.gemm import multiply
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.ops import head


def logits(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute `ops.logits` of unquantized weights."""
    return score_tokens(x.reshape(-1, x.shape[-1]), weight, scaling).view(*x.shape[:-1], -1)


@operator()
def score_tokens(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute `ops.logits` of x, [rows, columns]: [rows, vocab_size] in float32."""
    return head.logits(x, weight, scaling)


@score_tokens.register_fake
def _(x, weight, scaling):
    return x.new_empty(len(x), len(weight), dtype=torch.float32)


def _launch_score_tokens(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    return multiply(x.contiguous(), weight, x.new_empty(len(x), len(weight), dtype=torch.float32), scaling)


register_launch(score_tokens, _launch_score_tokens)
