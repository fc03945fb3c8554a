"""The NKI kernel for the experts of few tokens, with the arguments and results of the plain definition."""

import torch

from granite4_neuron.devices.graphs.moe import fused_experts as fused_experts_of_fixed_shapes
from granite4_neuron.devices.neuron.expert_slots import expert_slots
from granite4_neuron.devices.neuron.nki.common import MAX_PARTITIONS
from granite4_neuron.devices.neuron.nki.experts_decode import experts_decode, experts_decode_torch
from granite4_neuron.devices.neuron.nki.launch import launcher

MAX_TOKENS = MAX_PARTITIONS  # that the kernel takes

_experts_decode = launcher(experts_decode, experts_decode_torch)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.fused_experts` by the kernel, which reads each chosen expert once; for more tokens in plain torch.

    Args:
        w1: [num_experts, hidden_size, 2 * intermediate_size], gate first.
        w2: [num_experts, intermediate_size, hidden_size].
    """
    if len(hidden_states) > MAX_TOKENS:
        arguments = hidden_states, w1, w2, topk_weights, topk_ids
        return fused_experts_of_fixed_shapes(*arguments, input_first=True, most_gathered=0)
    first, *others = _experts_decode(hidden_states, w1, w2, *expert_slots(topk_ids, topk_weights, len(w2)))
    return sum(others, first).to(hidden_states.dtype)
