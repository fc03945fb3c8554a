"""A rank's feed-forward parts of a layer. Their results are added before anything is said to the other ranks."""

from __future__ import annotations

import torch
from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_module
from torch import nn
from torch.nn import functional as F

from granite4_neuron.layers.moe import SharedMLP
from granite4_neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.ops import router_logits, topk_softmax
from granite4_neuron.ops.xla.moe import fused_experts


class NeuronSharedMLP(SharedMLP):
    """The MLP that every token takes."""

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        """This rank's part of `scale` times the output, float32."""
        gate, up = self.input_linear(hidden_states).float().chunk(2, dim=-1)
        activated = F.silu(gate) * up * scale
        return F.linear(activated.to(hidden_states.dtype), self.output_linear.weight).float()


class NeuronExperts(nn.Module):
    """A router in float32, and experts whose widths are split over the ranks; see `ops.topk_softmax`.

    The experts' weights are in NxD's module for them, which shards them and knows its kernels.
    """

    def __init__(self, config: GraniteMoeHybridInferenceConfig):
        super().__init__()
        granite = config.granite
        self.top_k = granite.num_experts_per_tok
        self.num_experts = granite.num_local_experts
        self.uses_nxd = config.expert_path == "nxd"
        self.router = nn.ModuleDict({"layer": nn.Linear(granite.hidden_size, self.num_experts, bias=False)})
        self.expert_mlps = initialize_moe_module(config).expert_mlps

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        """`scale` times the experts' weighted sum: [batch, tokens, hidden_size] to the same shape, float32.

        It is this rank's part of the sum over the experts' widths.
        """
        x = hidden_states.flatten(0, 1)
        weights, chosen = topk_softmax(router_logits(x, self.router["layer"].weight), self.top_k)
        weights = weights * scale
        if self.uses_nxd:
            output = self.expert_mlps(x, self._affinities(weights, chosen), chosen, seq_len=hidden_states.shape[1])
        else:
            experts = self.expert_mlps.mlp_op
            w1, w2 = (linear.weight.transpose(1, 2) for linear in (experts.gate_up_proj, experts.down_proj))
            output = fused_experts(x, w1, w2, weights, chosen)
        return output.float().view(hidden_states.shape)

    def _affinities(self, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[tokens, top_k] to [tokens, num_experts], in the dtype of the kernels; 0 for experts that are not chosen."""
        is_chosen = chosen[..., None] == torch.arange(self.num_experts, device=chosen.device)
        return (weights[..., None] * is_chosen).sum(1).to(self.expert_mlps.dtype)
