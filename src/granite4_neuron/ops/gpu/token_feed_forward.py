"""A layer's feed-forward part for a token of each sequence, as `ops.gpu.token_mixer` is its mixer.

These are kernels in Triton, `ops.gpu.token_feed_forward_kernels`, on a GPU.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops import moe, norm
from granite4_neuron.ops.gpu import functions
from granite4_neuron.ops.xla import topk


def activate(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise, and activate an MLP.

    Args:
        x: [batch, columns], float32.
        weight: [2 * width, columns], gate rows first.

    Returns:
        [batch, width] in weight's dtype.
    """
    return moe.silu_and_mul(F.linear(norm.rms_norm(x, norm_weight, eps), weight))


def route(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise, and compute `ops.router_logits`.

    Args:
        x: [batch, columns], float32.
        weight: [num_experts, columns].

    Returns:
        (normalised x in norm_weight's dtype, logits [batch, num_experts] in float32).
    """
    normed = norm.rms_norm(x, norm_weight, eps)
    return normed, moe.router_logits(normed, weight)


def activate_experts(
    normed: torch.Tensor,
    weight: torch.Tensor,
    w1: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activate the shared MLP, and the experts that the router chose.

    Args:
        normed, router_logits: from `route`.
        weight: [2 * width of the shared MLP, columns], gate rows first.
        w1: [num_experts, 2 * width of an expert, columns], gate rows first.
        lengths: [batch], int32; where it is 0 the experts' activations are unspecified.

    Returns:
        ([batch, width of the shared MLP], [batch * top_k, width of an expert]) in the weights' dtype.
    """
    ids = topk.topk_softmax(router_logits, top_k)[1].flatten()
    return moe.silu_and_mul(F.linear(normed, weight)), functions.multiply_rows(normed, w1, ids, True)


def add_feed_forward(
    residual: torch.Tensor,
    activated: torch.Tensor,
    weight: torch.Tensor,
    expert_activated: torch.Tensor,
    w2: torch.Tensor,
    router_logits: torch.Tensor,
    lengths: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    """Compute residual + alpha * (the shared MLP's output) + alpha * (the experts' weighted sum).

    Args:
        residual: [batch, rows], float32.
        activated, expert_activated: from `activate_experts`.
        weight: [rows, width of the shared MLP].
        w2: [num_experts, rows, width of an expert].
        router_logits: from `route`.
        lengths: [batch], int32; where it is 0 the result is unspecified.
    """
    topk_weights, ids = topk.topk_softmax(router_logits, len(expert_activated) // len(activated))
    residual = norm.residual_add(residual, F.linear(activated, weight), alpha)
    y = functions.multiply_rows(expert_activated, w2, ids.flatten(), False).view(*ids.shape, -1)
    return norm.residual_add(residual, (y * topk_weights[..., None]).sum(1).to(y.dtype), alpha)
