"""Operators of graphs on a GPU, whose compiler makes one loop of a look-up, a product that is written as a sum, and
what follows it. For one token that is faster than a product of matrices.
"""

from __future__ import annotations

from typing import Any

import torch

from granite4_neuron.ops import quantization
from granite4_neuron.ops.attention import RunningSoftmax
from granite4_neuron.ops.moe import experts_by_group, silu_and_mul
from granite4_neuron.ops.xla import attention, moe


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `ops.linear` of weights that are not quantized."""
    if x.numel() > x.shape[-1]:
        return quantization.linear(x, weight, bias)
    y = (weight * x.flatten().float()).sum(-1)
    return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], -1)


def mlp(x: torch.Tensor, input_weight: torch.Tensor, output_weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.mlp` of weights that are not quantized."""
    return linear(silu_and_mul(linear(x, input_weight)), output_weight)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.fused_experts` of weights that are not quantized; each is read where it lies, and once.

    Several tokens' products are by groups, which a GPU has in bfloat16 only.
    """
    arguments = (hidden_states, w1, w2, topk_weights, topk_ids)
    if topk_ids.numel() < w1.shape[0]:
        return _chosen_experts(*arguments)
    return (experts_by_group if hidden_states.dtype == torch.bfloat16 else moe.fused_experts)(*arguments)


def _chosen_experts(hidden_states, w1, w2, topk_weights, topk_ids):
    ids = topk_ids.flatten()
    x = hidden_states[:, None].expand(-1, topk_ids.shape[1], -1).flatten(0, 1)
    activated = silu_and_mul((w1.index_select(0, ids) * x[:, None].float()).sum(-1).to(x.dtype))
    y = (w2.index_select(0, ids) * activated[:, None].float()).sum(-1)
    return (y.view(*topk_ids.shape, -1) * topk_weights[..., None]).sum(1).to(x.dtype)


def cached_attention(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Compute `ops.cached_attention`."""
    softmax = RunningSoftmax if query.shape[1] > 1 else _SingleTokenSoftmax
    return attention.cached_attention(query, *arguments, softmax=softmax)


class _SingleTokenSoftmax(RunningSoftmax):
    """`RunningSoftmax` of a few queries for each head of keys."""

    @staticmethod
    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x[..., None] * y[:, :, None]).sum(-2)
