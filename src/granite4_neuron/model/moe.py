"""Feed-forward layers: the shared MLP of every token, and the experts, of which each token chooses a few.

On several ranks each returns its rank's part of the sum, in float32. The layer adds the parts of both before it sends
them to the other ranks.
"""

from __future__ import annotations

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.binding import Module
from granite4_neuron.model.linear import Linear, Matrix
from granite4_neuron.model.parallel import Parallel


class SharedMLP(Module):
    """output_linear(silu(gate) * up), with gate and up stacked in input_linear, gate first."""

    def __init__(self, config: ModelConfig, parallel: Parallel):
        super().__init__()
        width = config.rank_dimensions(parallel.degree).shared_intermediate_size
        self.parallel = parallel
        self.input_linear = Linear(config.hidden_size, 2 * width, bias=False)
        self.output_linear = Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.parallel.degree == 1:
            return self.operators.mlp(hidden_states, self.input_linear.weight, self.output_linear.weight)
        return self.output_linear(self.operators.silu_and_mul(self.input_linear(hidden_states))).float()


class SparseMoe(Module):
    """A router, and experts whose widths are split over the ranks; see `ops.topk_softmax` and `ops.fused_experts`."""

    def __init__(self, config: ModelConfig, parallel: Parallel):
        super().__init__()
        experts, hidden = config.num_local_experts, config.hidden_size
        width = config.rank_dimensions(parallel.degree).intermediate_size
        self.top_k = config.num_experts_per_tok
        self.router = _Router(hidden, experts)
        self.input_linear = StackedWeights(experts, 2 * width, hidden)
        self.output_linear = StackedWeights(experts, hidden, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.flatten(0, -2)
        router_logits = self.operators.router_logits(tokens, self.router.layer.weight)
        chosen = self.operators.topk_softmax(router_logits, self.top_k)
        weights = self.input_linear.weight, self.output_linear.weight
        output = self.operators.fused_experts(tokens, *weights, *chosen)
        return output.view(hidden_states.shape)


class _Router(Module):
    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.layer = _RouterWeights(hidden_size, num_experts, bias=False)


class _RouterWeights(Linear):
    """Weights for `ops.router_logits`, never quantized: rounding must not change which experts a token gets."""

    may_be_quantized = False


class StackedWeights(Matrix):
    """Weights of all experts in one tensor, [num_experts, rows, columns], under the checkpoint's name."""
