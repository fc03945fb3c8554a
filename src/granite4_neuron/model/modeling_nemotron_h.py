"""NVIDIA Nemotron 3, from tokens to logits:

    x = E[tokens]
    for each layer:
        x = x + part(norm(x))               Mamba-2, attention, an MLP, or experts
    logits = H @ norm(x)

It is computed as Granite's model, whose multipliers are 1 here. Attention has no rotary positions. MLP and experts have
no gate, and their activation is a squared ReLU. One expert is shared by all tokens: it is the layer's MLP. In Super and
Ultra the other experts compute in a latent space of fewer dimensions, between two projections.

Source: transformers' NemotronHForCausalLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig, NemotronHConfig
from granite4_neuron.model.attention import Attention
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.linear import Linear
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.moe import Router, RouterWeights, SharedMLP, SparseMoe
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.ops import Weight


class NemotronHForCausalLM(GraniteMoeHybridForCausalLM):
    """A Nemotron 3 model, dense or with experts."""

    @staticmethod
    def make_layer(config: ModelConfig, number: int, parallel: Parallel) -> DecoderLayer:
        assert isinstance(config, NemotronHConfig)  # `families`
        parts = config.parts(config.layer_types[number])
        mixer: Mamba2 | Attention | None = None
        if parts.mixer == MAMBA:
            mixer = Mamba2(config, parallel, number)
        elif parts.mixer == ATTENTION:
            mixer = Attention(config, parallel)
        mlp = SharedMLP(config, parallel, parts.mlp_width) if parts.mlp_width else None
        experts = NemotronHExperts(config, parallel) if parts.has_experts else None
        return DecoderLayer(config, parallel, mixer, mlp, experts)


class NemotronHExperts(SparseMoe):
    """Experts that a sigmoid chooses, see `ops.topk_sigmoid`. The router computes in float32, and its weights are in
    float32, whatever the model's dtype.

    With `moe_latent_size` the result is fc2_latent_proj(experts(fc1_latent_proj(x))); the router takes x itself. Every
    rank has both projections: the second is linear, so each applies it to its part of the experts' sum, and the layer
    has one all-reduce as without them.
    """

    def __init__(self, config: NemotronHConfig, parallel: Parallel):
        super().__init__(config, parallel)
        self.router = _Router(config.hidden_size, config.num_local_experts)
        self.n_group, self.topk_group = config.n_group, config.topk_group
        self.norm_topk_prob, self.routed_scaling_factor = config.norm_topk_prob, config.routed_scaling_factor
        self.has_latent_space = config.moe_latent_size > 0
        if self.has_latent_space:
            self.fc1_latent_proj = Linear(config.hidden_size, config.moe_latent_size, bias=False)
            self.fc2_latent_proj = Linear(config.moe_latent_size, config.hidden_size, bias=False)

    def choice(self) -> dict[str, Any]:
        return dict(
            correction_bias=self.router.e_score_correction_bias.float(),
            n_group=self.n_group,
            topk_group=self.topk_group,
            norm_topk_prob=self.norm_topk_prob,
            scaling_factor=self.routed_scaling_factor,
        )

    def latent_weights(self) -> dict[str, Weight]:
        if not self.has_latent_space:
            return {}
        return dict(latent_input=self.fc1_latent_proj.weight, latent_output=self.fc2_latent_proj.weight)

    def multiply(self, tokens: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        if not self.has_latent_space:
            return super().multiply(tokens, router_logits)
        return self.fc2_latent_proj(super().multiply(self.fc1_latent_proj(tokens), router_logits))

    def router_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().router_logits(tokens.float())

    def choose(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.operators.topk_sigmoid(router_logits, top_k=self.top_k, **self.choice())


class _Router(Router):
    """A router with a bias that affects the choice of experts only."""

    keeps_float32 = ("e_score_correction_bias",)

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__(hidden_size, num_experts)
        self.layer = _Float32RouterWeights(hidden_size, num_experts, bias=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts))


class _Float32RouterWeights(RouterWeights):
    keeps_float32 = ("weight",)
