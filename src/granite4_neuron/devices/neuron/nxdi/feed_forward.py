"""A rank's share of a layer's feed-forward parts. The layer adds their results before one all-reduce."""

from __future__ import annotations

import torch
from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_module
from torch import nn
from torch.nn import functional as F

from granite4_neuron.devices.graphs.operators import fused_experts, topk_softmax
from granite4_neuron.devices.neuron.expert_blocks import combine_choices, expert_blocks
from granite4_neuron.devices.neuron.expert_slots import expert_slots
from granite4_neuron.devices.neuron.nki.experts_decode import experts_decode
from granite4_neuron.devices.neuron.nki.experts_prefill import experts_prefill
from granite4_neuron.devices.neuron.nki.launch import launch
from granite4_neuron.devices.neuron.nxdi.config import SLOT_TOKENS, GraniteMoeHybridInferenceConfig
from granite4_neuron.model.moe import SharedMLP
from granite4_neuron.ops import router_logits


class NeuronSharedMLP(SharedMLP):
    """The MLP that every token takes."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output, float32."""
        gate, up = self.input_linear(hidden_states).float().chunk(2, dim=-1)
        activated = F.silu(gate) * up
        return self.operators.linear(activated.to(hidden_states.dtype), self.output_linear.weight).float()


class _Router(nn.Module):
    """A router's weights, under the checkpoint's name."""

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.layer = nn.Linear(hidden_size, num_experts, bias=False)


class NeuronExperts(nn.Module):
    """A router in float32, and experts whose widths are split over the ranks; see `ops.topk_softmax`.

    The experts' weights are in NxD's module for them, which shards them and knows its kernels. AWS's fused kernel
    `moe_block_tkg` of nki-library does not take h-small on four ranks: it chooses at most 8 experts (h-small: 10), and
    a rank's expert width must be a multiple of 128 (h-small: 192).
    """

    def __init__(self, config: GraniteMoeHybridInferenceConfig):
        super().__init__()
        granite = config.granite
        self.top_k = granite.num_experts_per_tok
        self.num_experts = granite.num_local_experts
        self.form_of = config.form_of_experts
        self.router = _Router(granite.hidden_size, self.num_experts)
        self.expert_mlps = initialize_moe_module(config).expert_mlps
        # NxD would copy each rank's part of gate and up, which lie apart. `checkpoint.convert` puts them side by side.
        self.expert_mlps.mlp_op.gate_up_proj.weight.partition_stride = 1

    def forward(self, hidden_states: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
        """Return the experts' weighted sum: this rank's part of the sum over their widths.

        Args:
            hidden_states: [batch, tokens, hidden_size].
            is_real: [batch, tokens], false for padding.

        Returns:
            As hidden_states, in float32; finite in padding.
        """
        x = hidden_states.flatten(0, 1)
        weights, chosen = topk_softmax(router_logits(x, self.router.layer.weight), self.top_k)
        form = self.form_of(len(x))
        if form == "nxd":
            output = self.expert_mlps(x, self._affinities(weights, chosen), chosen, seq_len=hidden_states.shape[1])
        elif form in ("kernel", "nki blocks"):
            output = self._by_kernel(x, weights, chosen.where(is_real.view(-1, 1), self.num_experts))
        else:
            most = None if form == "gather" else 0
            output = fused_experts(x, *self._weights(), weights, chosen, input_first=True, most_gathered=most)
        return output.float().view(hidden_states.shape)

    def _by_kernel(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Compute the experts by kernel. A choice whose number is no expert is skipped."""
        if len(x) <= SLOT_TOKENS:
            slots = expert_slots(chosen, weights, self.num_experts)
            first, *others = launch(experts_decode, x, *self._weights(), *slots)
            return sum(others, first)
        blocks = expert_blocks(chosen, self.num_experts)
        (choice_outputs,) = launch(experts_prefill, x, *self._weights(), *blocks)
        return combine_choices(choice_outputs, chosen, weights, self.num_experts)

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [num_experts, hidden_size, 2 * width], gate first, and [num_experts, width, hidden_size]."""
        experts = self.expert_mlps.mlp_op
        return experts.gate_up_proj.weight, experts.down_proj.weight

    def _affinities(self, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Map [tokens, top_k] to [tokens, num_experts], in the kernels' dtype; 0 for experts that are not chosen."""
        is_chosen = chosen[..., None] == torch.arange(self.num_experts, device=chosen.device)
        return (weights[..., None] * is_chosen).sum(1).to(self.expert_mlps.dtype)
