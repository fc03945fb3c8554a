"""Feed-forward layers, and mixture of experts: each token through the few experts that its router chose.

An MLP or an expert has two matrices. The first has the rows of gate and then of up, and silu(gate) * up is the
activation. If the first has only as many rows as the second has columns, there is no gate, and the activation is a
squared ReLU: `activate`.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from granite4_neuron.ops.quantization import linear
from granite4_neuron.ops.weight import Weight, as_tensor

# In torch 2.9 the CPU implementation has only a private name.
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
SMALLEST_SUM = 1e-20  # keeps the weights finite where all scores are 0
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up, where (gate, up) are the halves of the last axis: [..., 2 * width] to [..., width]."""
    # Slices, because torch's chunk is lowered for Neuron with an index per element.
    width = x.shape[-1] // 2
    return F.silu(x[..., :width]) * x[..., width:]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Compute max(x, 0)^2."""
    return F.relu(x).square()


def activate(x: torch.Tensor, width: int) -> torch.Tensor:
    """Compute `silu_and_mul` of [..., 2 * width], and `relu2` of [..., width]: [..., width]."""
    return relu2(x) if x.shape[-1] == width else silu_and_mul(x)


def mlp(x: torch.Tensor, input_weight: Weight, output_weight: Weight) -> torch.Tensor:
    """Compute output_weight activate(input_weight x); x [..., hidden_size] to the same shape.

    Args:
        input_weight: [2 * width, hidden_size], or [width, hidden_size] without a gate.
        output_weight: [hidden_size, width].
    """
    return linear(activate(linear(x, input_weight), output_weight.shape[-1]), output_weight)


def router_logits(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Score how well each expert suits each token, in float32: rounding to a 16-bit dtype would change choices.

    Args:
        x: [tokens, hidden_size].
        weight: [num_experts, hidden_size].

    Returns:
        [tokens, num_experts].
    """
    return F.linear(x.float(), as_tensor(weight, torch.float32).float())


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


def topk_sigmoid(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by sigmoid(logit) + bias, and weigh them by the sigmoid alone.

    Experts are in `n_group` equal, consecutive groups. A token chooses among the experts of `topk_group` groups: those
    whose two best experts have the largest sums.

    Args:
        router_logits: [tokens, num_experts].
        correction_bias: [num_experts].
        top_k: experts per token.
        norm_topk_prob: whether a token's weights are divided by their sum.
        scaling_factor: multiplies the weights.

    Returns:
        (topk_weights in float32, topk_ids in int64), each [tokens, top_k].

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; transformers' NemotronHTopkRouter.
    """
    scores = router_logits.float().sigmoid()
    choice = scores + correction_bias.float()
    if n_group > 1:
        groups = choice.unflatten(-1, (n_group, -1))
        best_groups = groups.topk(2, dim=-1)[0].sum(-1).topk(topk_group, dim=-1)[1]
        is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best_groups, True)
        choice = groups.masked_fill(~is_open[..., None], -math.inf).flatten(-2)
    topk_ids = choice.topk(top_k, dim=-1)[1]
    topk_weights = scores.gather(-1, topk_ids)
    if norm_topk_prob:
        topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return topk_weights * scaling_factor, topk_ids


def fused_experts(
    hidden_states: torch.Tensor,
    w1: Weight,
    w2: Weight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Sum over each token's experts of weight * w2[e] activate(w1[e] x).

    Arguments have the names and order of vLLM's function of this name. This form is for a CPU: in a compiled graph no
    shape may depend on the router's choice, see `devices.graphs`.

    Args:
        hidden_states: [tokens, hidden_size].
        w1: [num_experts, 2 * intermediate_size, hidden_size], gate rows first; or [num_experts, intermediate_size,
            hidden_size] without a gate.
        w2: [num_experts, hidden_size, intermediate_size].
        topk_weights, topk_ids: [tokens, top_k], see `topk_softmax`.

    Returns:
        [tokens, hidden_size] in the dtype of hidden_states; the sum over experts is taken in float32.
    """
    if isinstance(w1, torch.Tensor) and isinstance(w2, torch.Tensor) and all(map(_have_grouped_product, (w1, w2))):
        return experts_by_group(hidden_states, w1, w2, topk_weights, topk_ids)
    return _experts_one_by_one(hidden_states, w1, w2, topk_weights, topk_ids)


def _experts_one_by_one(
    hidden_states: torch.Tensor, w1: Weight, w2: Weight, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Compute one expert at a time, so that at most one is held dequantized."""
    output = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert in topk_ids.unique().tolist():
        tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
        y = mlp(hidden_states[tokens], _expert(w1, expert), _expert(w2, expert))
        output.index_add_(0, tokens, y.float() * topk_weights[tokens, places, None])
    return output.to(hidden_states.dtype)


def _expert(weights: Weight, number: int) -> Weight:
    return weights[number] if isinstance(weights, torch.Tensor) else weights.expert(number)


def _have_grouped_product(weights: torch.Tensor) -> bool:
    """Return whether torch's grouped product supports the dtype and the alignment: rows must start at multiples of 16
    bytes, as in all published models.
    """
    return weights.dtype in _GROUPED_DTYPES and weights.shape[2] * weights.dtype.itemsize % 16 == 0


def experts_by_group(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Sort tokens by expert and multiply group by group: only the weights of chosen experts are read."""
    tokens, top_k = topk_ids.shape
    flat_ids = topk_ids.reshape(-1)
    order = flat_ids.argsort(stable=True)
    experts = torch.arange(w1.shape[0], device=flat_ids.device)
    group_ends = (flat_ids[:, None] == experts).sum(0).cumsum(0).to(torch.int32)

    x = hidden_states[order // top_k]
    activated = activate(_grouped_mm(x, w1.transpose(1, 2), offs=group_ends), w2.shape[-1])
    y = _grouped_mm(activated, w2.transpose(1, 2), offs=group_ends)

    weighted = torch.empty(y.shape, dtype=torch.float32, device=y.device)
    weighted[order] = y.float() * topk_weights.reshape(-1)[order, None]
    return weighted.view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)
