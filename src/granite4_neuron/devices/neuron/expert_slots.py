"""The distinct experts that a few tokens chose, as a list of static length: each one's weights are read once.

In plain torch with static shapes, without a sort or a running sum, so that it compiles for any device.
"""

from __future__ import annotations

import torch


def num_slots(tokens: int, top_k: int, num_experts: int) -> int:
    """Return the most distinct experts that there can be; at least 2, so that two cores can share them."""
    return max(2, min(tokens * top_k, num_experts))


def expert_slots(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct chosen experts in ascending order, one to a slot, and every token's weight for each.

    Args:
        topk_ids: [tokens, top_k], integers. Ids outside 0 to num_experts - 1 choose nothing: the caller marks rows
            without a token with them.
        topk_weights: [tokens, top_k], float32.
        num_experts: experts of the layer.

    Returns:
        expert_ids: [slots] in int32, see `num_slots`; after the last chosen expert they are num_experts.
        combine_weights: [tokens, slots] in float32; 0 where a token did not choose the slot's expert.
    """
    topk_ids = topk_ids.to(torch.int32)
    experts = torch.arange(num_experts, dtype=torch.int32, device=topk_ids.device)
    tokens, top_k = topk_ids.shape
    slots = torch.arange(num_slots(tokens, top_k, num_experts), dtype=torch.int32, device=topk_ids.device)

    is_chosen = (topk_ids.reshape(-1, 1) == experts).any(0)
    chosen_before = (is_chosen[:, None] & (experts[:, None] < experts)).sum(0, dtype=torch.int32)
    is_in_slot = is_chosen & (chosen_before == slots[:, None])
    expert_ids = experts.where(is_in_slot, num_experts).amin(1)

    is_choice = (topk_ids[..., None] == expert_ids) & (expert_ids < num_experts)
    return expert_ids, topk_weights[..., None].where(is_choice, 0.0).sum(1)
