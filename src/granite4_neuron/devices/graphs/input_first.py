"""Operators whose matrices lie with the inputs first, [in, out], for a device that multiplies them so.

PyTorch's Neuron device has no pass that stores a weight in another layout: a graph that takes [out, in] transposes each
weight in every launch. Arguments and results are those of the definitions in `ops`, except that the last two axes of
each matrix are exchanged.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.graphs import moe
from granite4_neuron.ops.moe import activate


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `ops.linear`; weight [columns, rows]."""
    product = x @ weight
    return product if bias is None else product + bias


def mlp(x: torch.Tensor, input_weight: torch.Tensor, output_weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.mlp`; input_weight [hidden_size, 2 * width], output_weight [width, hidden_size]."""
    return linear(activate(linear(x, input_weight), output_weight.shape[0]), output_weight)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.router_logits`; weight [hidden_size, num_experts]."""
    return x.float() @ weight.float()


def logits(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute `ops.logits`; weight [hidden_size, vocab_size]."""
    return (x @ weight).float() / scaling


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    most_gathered: int | None = None,
) -> torch.Tensor:
    """Compute `graphs.moe.fused_experts`; w1 [num_experts, hidden_size, 2 * intermediate_size]."""
    arguments = hidden_states, w1, w2, topk_weights, topk_ids
    return moe.fused_experts(*arguments, input_first=True, most_gathered=most_gathered)
