"""IBM Granite 4.0 hybrid, from tokens to logits:

    x = embedding_multiplier * E[tokens]
    for each layer:
        x = x + residual_multiplier * mixer(norm(x))             Mamba-2 or attention
        n = norm(x)
        x = x + residual_multiplier * shared_mlp(n)
        x = x + residual_multiplier * experts(n)                 in models with experts
    logits = E @ norm(x) / logits_scaling                        E, or a head of its own

`DecoderLayer.forward` computes a layer, from `Mamba2`, `Attention`, `SharedMLP` and `SparseMoe`. A prompt, a part of
one, a verification and a single token are the same computation, which advances `state`; `HybridForCausalLM` has these
steps.

Source: transformers' GraniteMoeHybridForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn

from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.model.attention import Attention, RotaryTables
from granite4_neuron.model.bindable_model import Decoder
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.moe import SharedMLP, SparseMoe
from granite4_neuron.model.norm import norm_of
from granite4_neuron.model.parallel import Parallel, VocabParallelEmbedding
from granite4_neuron.model.step import Step
from granite4_neuron.ops import rotary_tables
from granite4_neuron.state.hybrid_state import HybridState


class GraniteMoeHybridModel(Decoder):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, parallel: Parallel, layers: Iterable[DecoderLayer]):
        super().__init__()
        self.config = config
        vocab_size = config.rank_dimensions(parallel.degree).vocab_size
        self.embed_tokens = VocabParallelEmbedding(vocab_size, config.hidden_size, parallel)
        self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(layers))  # torch's list has any modules
        self.norm = norm_of(config)

    def forward(
        self, input_ids: torch.Tensor, step: Step, state: HybridState
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden_states, kept_inputs = self.stack(self.embed(input_ids, step), step, state, self.rotary(step))
        return self.norm(hidden_states), kept_inputs

    def embed(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        # The residual stream is float32 whatever the weights' dtype: in bfloat16 it would be the largest source of
        # error.
        hidden_states = self.embed_tokens(input_ids) * self.config.embedding_multiplier
        # Padding enters as zeros, so it stays finite in every layer, like the state that its row reads.
        return hidden_states.masked_fill(~step.is_real[..., None], 0.0)

    def rotary(self, step: Step) -> RotaryTables | None:
        if not self.config.uses_rope:
            return None
        return rotary_tables(step.positions, self.config.head_dim, self.config.rope_theta)


class GraniteMoeHybridForCausalLM(HybridForCausalLM):
    """A Granite 4 hybrid, or a dense Granite model."""

    @staticmethod
    def make_decoder(config: ModelConfig, parallel: Parallel, layers: Iterable[DecoderLayer]) -> Decoder:
        return GraniteMoeHybridModel(config, parallel, layers)

    @staticmethod
    def make_layer(config: ModelConfig, number: int, parallel: Parallel) -> DecoderLayer:
        parts = config.parts(config.layer_types[number])
        mixer = Mamba2(config, parallel, number) if parts.mixer == MAMBA else Attention(config, parallel)
        experts = SparseMoe(config, parallel) if parts.has_experts else None
        return DecoderLayer(config, parallel, mixer, SharedMLP(config, parallel, parts.mlp_width), experts)

    def head(self, hidden_states: torch.Tensor, of_decode: bool = False) -> torch.Tensor:
        """Compute `HybridForCausalLM.head`."""
        logits = (of_decode and self.operators.decode_logits) or self.operators.logits
        part = logits(hidden_states, self.lm_head.weight, self.config.logits_scaling)
        return self.parallel.all_gather(part)
