"""Grouped-query attention over a cache with one row per slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.binding import Module
from granite4_neuron.model.linear import Linear
from granite4_neuron.model.parallel import Parallel, RowParallelLinear
from granite4_neuron.model.step import Step
from granite4_neuron.ops import apply_rotary
from granite4_neuron.ops.layer_weights import AttentionWeights
from granite4_neuron.state.hybrid_state import KeyValueState

RotaryTables = tuple[torch.Tensor, torch.Tensor]


class Attention(Module):
    """Projections, rotary positions if the model has them, attention, projection; heads are split over the ranks.

    The scores are multiplied by the config's attention_multiplier; there is no 1 / sqrt(head_dim).
    """

    def __init__(self, config: ModelConfig, parallel: Parallel):
        super().__init__()
        dimensions = config.rank_dimensions(parallel.degree)
        self.head_dim = config.head_dim
        self.scale = config.attention_multiplier
        width, kv_width = dimensions.attention_heads * self.head_dim, dimensions.key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, width, bias=bias)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = RowParallelLinear(width, config.hidden_size, bias, parallel)

    def forward(
        self, hidden_states: torch.Tensor, step: Step, state: KeyValueState, rotary: RotaryTables | None
    ) -> torch.Tensor:
        """Map [batch, tokens, hidden_size] to the same shape; add the step's keys and values to `state` in place."""
        projected = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.o_proj(self.attend(projected, step, state, rotary))

    def weights(self, norm: torch.Tensor, eps: float, residual_multiplier: float) -> AttentionWeights:
        """Return the weights of the half of a decoder layer that holds this module; the arguments are the other
        weights.
        """
        return AttentionWeights(
            norm=norm,
            q_proj=self.q_proj.weight,
            q_bias=self.q_proj.bias,
            k_proj=self.k_proj.weight,
            k_bias=self.k_proj.bias,
            v_proj=self.v_proj.weight,
            v_bias=self.v_proj.bias,
            o_proj=self.o_proj.weight,
            o_bias=self.o_proj.bias,
            head_dim=self.head_dim,
            scale=self.scale,
            eps=eps,
            residual_multiplier=residual_multiplier,
        )

    def attend(
        self, projected: Sequence[torch.Tensor], step: Step, state: KeyValueState, rotary: RotaryTables | None
    ) -> torch.Tensor:
        """Compute everything between the projections.

        Args:
            projected: queries, keys and values, each [batch, tokens, heads * head_dim].

        Returns:
            [batch, tokens, heads * head_dim].
        """
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)

        index = (step.positions, step.lengths)
        self.operators.write_cache(state.key, key, *index, step.slots)
        self.operators.write_cache(state.value, value, *index, step.slots)
        slots = None if step.in_order else step.slots
        output = self.operators.cached_attention(
            query, state.key, state.value, *index, slots, self.scale, step.kv_length
        )
        return output.flatten(-2)
