"""Mixture of experts: each token through the few experts that its router chose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from granite4_neuron.ops.quantization import linear

# torch 2.9 has the CPU implementation under its private name only.
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where (gate, up) are the halves of the last axis: [..., 2 * width] to [..., width]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def mlp(
    x: torch.Tensor,
    input_weight: torch.Tensor,
    output_weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """output_weight (silu(gate) * up), with (gate, up) = input_weight x; x [..., hidden_size] to the same shape.

    The scales are those of quantized weights, see `quantization.linear`.
    """
    return linear(silu_and_mul(linear(x, input_weight, scale=input_scale)), output_weight, scale=output_scale)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How well each expert suits each token, in float32: rounding it to a reduced dtype would change choices.

    Args:
        x: [tokens, hidden_size].
        weight: [num_experts, hidden_size].

    Returns:
        [tokens, num_experts].
    """
    return F.linear(x.float(), weight.float())


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
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of weight * w2[e] (silu(gate) * up), with (gate, up) = w1[e] x.

    Arguments have the names and the order of those of vLLM's function of the same name. For a CPU: in a compiled graph
    the router's choice may decide no shape, see `ops.xla`.

    Args:
        hidden_states: [tokens, hidden_size].
        w1: [num_experts, 2 * intermediate_size, hidden_size], gate rows first.
        w2: [num_experts, hidden_size, intermediate_size].
        topk_weights, topk_ids: [tokens, top_k], see `topk_softmax`.
        w1_scale, w2_scale: of quantized weights, [num_experts, rows], see `quantization.linear`.

    Returns:
        [tokens, hidden_size] in the dtype of hidden_states; the sum over experts is taken in float32.
    """
    if w1_scale is None and _rows_are_aligned(w1) and _rows_are_aligned(w2):
        return _experts_by_group(hidden_states, w1, w2, topk_weights, topk_ids)
    return experts_one_by_one(hidden_states, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, mlp)


def experts_one_by_one(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    mlp: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """`fused_experts`, an expert at a time: nobody holds two of them dequantized.

    Args:
        mlp: this function, or another way to compute it.
    """
    output = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert in topk_ids.unique().tolist():
        tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
        scales = () if w1_scale is None else (w1_scale[expert], w2_scale[expert])
        y = mlp(hidden_states[tokens], w1[expert], w2[expert], *scales)
        output.index_add_(0, tokens, y.float() * topk_weights[tokens, places, None])
    return output.to(hidden_states.dtype)


def _rows_are_aligned(weights):
    """Whether rows start at multiples of 16 bytes, as the grouped product requires; all published models' do."""
    return weights.shape[2] * weights.dtype.itemsize % 16 == 0


def _experts_by_group(hidden_states, w1, w2, topk_weights, topk_ids):
    """Tokens are sorted by expert and multiplied group by group: only the weights of chosen experts are read."""
    tokens, top_k = topk_ids.shape
    flat_ids = topk_ids.reshape(-1)
    order = flat_ids.argsort(stable=True)
    experts = torch.arange(w1.shape[0], device=flat_ids.device)
    group_ends = (flat_ids[:, None] == experts).sum(0).cumsum(0).to(torch.int32)

    x = hidden_states[order // top_k]
    activated = silu_and_mul(_grouped_mm(x, w1.transpose(1, 2), offs=group_ends))
    y = _grouped_mm(activated, w2.transpose(1, 2), offs=group_ends)

    weighted = torch.empty(y.shape, dtype=torch.float32, device=y.device)
    weighted[order] = y.float() * topk_weights.reshape(-1)[order, None]
    return weighted.view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)
