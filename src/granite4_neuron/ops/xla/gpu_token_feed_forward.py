"""A layer's feed-forward part for one token of one sequence, as `ops.xla.gpu_token_mixer` is its mixer.

These are kernels in Triton, `ops.xla.gpu_token_feed_forward_kernels`, on a GPU.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops import moe, norm
from granite4_neuron.ops.xla import topk


def activate(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise, and activate an MLP.

    Args:
        x: [1, columns], float32.
        weight: [2 * width, columns], gate rows first.

    Returns:
        [1, width] in weight's dtype.
    """
    return moe.silu_and_mul(F.linear(norm.rms_norm(x, norm_weight, eps), weight))


def route(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise, and compute `ops.router_logits`: x [1, columns] in float32 to [1, num_experts] in float32."""
    return moe.router_logits(norm.rms_norm(x, norm_weight, eps), weight)


def activate_experts(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    top_k: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `activate` of the shared MLP, and of the experts that the router chose.

    Args:
        x, norm_weight, weight: as for `activate`.
        w1: [num_experts, 2 * width, columns], gate rows first.
        router_logits: from `route`.

    Returns:
        ([1, width of the shared MLP], [top_k, width of an expert]) in the weights' dtype.
    """
    ids = topk.topk_softmax(router_logits, top_k)[1][0]
    experts = [activate(x, norm_weight, expert, eps) for expert in w1[ids]]
    return activate(x, norm_weight, weight, eps), torch.cat(experts)


def add_feed_forward(
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: torch.Tensor,
    expert_activated: torch.Tensor,
    w2: torch.Tensor,
    router_logits: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    """Compute residual + alpha * (the shared MLP's output) + alpha * (the experts' weighted sum).

    Args:
        residual: [1, rows], float32.
        activated, expert_activated: from `activate_experts`.
        weight: [rows, width of the shared MLP].
        w2: [num_experts, rows, width of an expert].
        router_logits: from `route`.
    """
    topk_weights, ids = topk.topk_softmax(router_logits, len(expert_activated))
    residual = norm.residual_add(residual, F.linear(activated, weight), alpha)
    y = torch.bmm(w2[ids[0]], expert_activated[..., None])[..., 0]
    return norm.residual_add(residual, (y * topk_weights[0, :, None]).sum(0, keepdim=True).to(y.dtype), alpha)
