"""Feed-forward layers: the MLP that all tokens share, and the experts, of which each token chooses a few.

On several ranks each returns its rank's part of the sum, in float32. The layer adds the parts of both before it sends
them to the other ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.binding import Module
from granite4_neuron.model.linear import Linear, Matrix
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.ops import Weight, relu2


class SharedMLP(Module):
    """output_linear(activate(input_linear(x))), see `ops.mlp`: with a gate, its rows come first in input_linear.

    Args:
        width: the whole model's MLP width.
    """

    def __init__(self, config: ModelConfig, parallel: Parallel, width: int):
        super().__init__()
        self.width = width // parallel.degree
        self.parallel = parallel
        self.is_gated = config.has_gated_mlp
        rows = 2 * self.width if self.is_gated else self.width
        self.input_linear = Linear(config.hidden_size, rows, bias=False)
        self.output_linear = Linear(self.width, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.parallel.degree == 1:
            return self.operators.mlp(hidden_states, self.input_linear.weight, self.output_linear.weight)
        return self.output_linear(self._activate(self.input_linear(hidden_states))).float()

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.silu_and_mul(x) if self.is_gated else relu2(x)


class SparseMoe(Module):
    """A router, and experts whose widths are split over the ranks; see `choose` and `ops.fused_experts`."""

    def __init__(self, config: ModelConfig, parallel: Parallel):
        super().__init__()
        experts, hidden = config.num_local_experts, config.expert_hidden_size
        width = config.rank_dimensions(parallel.degree).intermediate_size
        self.top_k = config.num_experts_per_tok
        self.router = Router(config.hidden_size, experts)
        self.input_linear = StackedWeights(experts, 2 * width if config.has_gated_mlp else width, hidden)
        self.output_linear = StackedWeights(experts, hidden, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.flatten(0, -2)
        return self.multiply(tokens, self.router_logits(tokens)).view(hidden_states.shape)

    def router_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute `ops.router_logits` of [tokens, hidden_size]."""
        return self.operators.router_logits(tokens, self.router.layer.weight)

    def multiply(self, tokens: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Compute `ops.fused_experts` of [tokens, hidden_size] with the experts that the logits choose."""
        weights = self.input_linear.weight, self.output_linear.weight
        return self.operators.fused_experts(tokens, *weights, *self.choose(router_logits))

    def choice(self) -> dict[str, Any]:
        """Return the fields of `ops.layer_weights.FeedForwardWeights` that describe `choose`, except `top_k`."""
        return {}

    def latent_weights(self) -> dict[str, Weight]:
        """Return the fields of `ops.layer_weights.FeedForwardWeights` with the projections around the experts."""
        return {}

    def choose(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts by [tokens, num_experts]: return their weights and ids, as `ops.topk_softmax`."""
        return self.operators.topk_softmax(router_logits, self.top_k)


class Router(Module):
    """The router's weights under the checkpoint's name."""

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.layer = RouterWeights(hidden_size, num_experts, bias=False)


class RouterWeights(Linear):
    """Weights for `ops.router_logits`, never quantized: rounding must not change which experts a token gets."""

    may_be_quantized = False


class StackedWeights(Matrix):
    """Weights of all experts in one tensor, [num_experts, rows, columns], under the checkpoint's name."""
