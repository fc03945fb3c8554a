"""The head, for any number of tokens; a token's bits do not depend on this number."""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.gemm import multiply
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.weights import dense, parts_of
from granite4_neuron.ops import Weight, head


def logits(x: torch.Tensor, weight: Weight, scaling: float) -> torch.Tensor:
    """Compute `ops.logits`."""
    values, scales = parts_of(weight)
    return score_tokens(x.reshape(-1, x.shape[-1]), values, scaling, scales).view(*x.shape[:-1], -1)


@operator()
def score_tokens(
    x: torch.Tensor, weight: torch.Tensor, scaling: float, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `ops.logits` of x, [rows, columns]: [rows, vocab_size] in float32."""
    return head.logits(x, dense(weight, scales, x.shape[1], x.dtype), scaling)


@score_tokens.register_fake
def _(x, weight, *others):
    return x.new_empty(len(x), len(weight), dtype=torch.float32)


def _launch_score_tokens(
    x: torch.Tensor, weight: torch.Tensor, scaling: float, scales: torch.Tensor | None = None
) -> torch.Tensor:
    y = x.new_empty(len(x), len(weight), dtype=torch.float32)
    return multiply(x.contiguous(), weight, scales, y, scaling)


register_launch(score_tokens, _launch_score_tokens)
