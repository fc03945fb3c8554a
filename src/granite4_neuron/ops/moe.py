"""Mixture of experts: each token through the few experts that its router chose."""

from __future__ import annotations

import torch
from torch.nn import functional as F

# torch 2.9 has the CPU implementation under its private name only.
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


def topk_softmax(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts, then normalise over the chosen ones only.

    Args:
        router_logits: [tokens, num_experts].
        top_k: experts per token.

    Returns:
        (topk_weights in float32, topk_ids in int64), each [tokens, top_k]; weights of a token sum to 1.
    """
    top_logits, topk_ids = router_logits.float().topk(top_k, dim=-1)
    return top_logits.softmax(-1), topk_ids


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Sum over each token's experts of weight * w2[e] (silu(gate) * up), with (gate, up) = w1[e] x.

    Leading arguments are those of vLLM's function of the same name. Tokens are sorted by expert and multiplied group by
    group: one token reads the weights of its own experts only, and nothing depends on the host knowing the choice.

    Args:
        hidden_states: [tokens, hidden_size].
        w1: [num_experts, 2 * intermediate_size, hidden_size], gate rows first.
        w2: [num_experts, hidden_size, intermediate_size].
        topk_weights, topk_ids: [tokens, top_k], see `topk_softmax`.

    Returns:
        [tokens, hidden_size] in the dtype of hidden_states; the sum over experts is taken in float32.
    """
    tokens, top_k = topk_ids.shape
    flat_ids = topk_ids.reshape(-1)
    order = flat_ids.argsort(stable=True)
    experts = torch.arange(w1.shape[0], device=flat_ids.device)
    group_ends = (flat_ids[:, None] == experts).sum(0).cumsum(0).to(torch.int32)

    x = hidden_states[order // top_k]
    gate, up = _grouped_mm(x, w1.transpose(1, 2), offs=group_ends).chunk(2, dim=-1)
    y = _grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=group_ends)

    weighted = torch.empty(y.shape, dtype=torch.float32, device=y.device)
    weighted[order] = y.float() * topk_weights.reshape(-1)[order, None]
    return weighted.view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)
