"""IBM Granite 4.0 hybrid: every layer is Mamba or attention, and then the shared MLP and experts."""

from __future__ import annotations

from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.model.attention import Attention
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.moe import SharedMLP, SparseMoe
from granite4_neuron.model.parallel import Parallel


class GraniteMoeHybridForCausalLM(HybridForCausalLM):
    """A Granite 4 hybrid, or a dense Granite model."""

    @staticmethod
    def make_layer(config: ModelConfig, number: int, parallel: Parallel) -> DecoderLayer:
        """Implement `HybridForCausalLM.make_layer`."""
        parts = config.parts(config.layer_types[number])
        mixer = Mamba2(config, parallel, number) if parts.mixer == MAMBA else Attention(config, parallel)
        experts = SparseMoe(config, parallel) if parts.has_experts else None
        return DecoderLayer(config, parallel, mixer, SharedMLP(config, parallel, parts.mlp_width), experts)
