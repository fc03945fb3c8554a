"""Mixture of experts with static shapes: which weights are read depends on the router, how many does not."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops.moe import silu_and_mul


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_scale: None = None,
    w2_scale: None = None,
) -> torch.Tensor:
    """`ops.fused_experts` of weights that are not quantized: no graph has others."""
    if topk_ids.numel() < w1.shape[0]:
        return chosen_experts(hidden_states, w1, w2, topk_weights, topk_ids)
    return all_experts(hidden_states, w1, w2, topk_weights, topk_ids)


def chosen_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """For few tokens: fetch the weights of each choice."""
    tokens, top_k = topk_ids.shape
    flat_ids = topk_ids.reshape(-1)
    x = hidden_states[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, -1, 1)
    gate, up = (w1.index_select(0, flat_ids) @ x).chunk(2, dim=1)
    y = w2.index_select(0, flat_ids) @ (F.silu(gate) * up)
    weighted = y.float().view(tokens, top_k, -1) * topk_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


def all_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """For many tokens: every expert for every token, with the weight 0 where it was not chosen.

    The second product sums over the experts too: a result per expert would be the largest tensor of the model.
    """
    experts = torch.arange(w1.shape[0], device=topk_ids.device)
    weights = (topk_weights[..., None] * (topk_ids[..., None] == experts)).sum(1)  # [tokens, num_experts]
    activated = silu_and_mul(torch.einsum("th,efh->etf", hidden_states, w1)).float() * weights.T[..., None]
    return torch.einsum("etf,ehf->th", activated.to(w2.dtype), w2)
