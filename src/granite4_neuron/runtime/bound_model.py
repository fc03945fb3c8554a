"""Facts about a runtime's model, shared by runtimes in this process."""

from __future__ import annotations

import torch

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM


class BoundModel:
    """The part of `Runtime` that follows from a model bound to its operators."""

    own_slots = 0
    model: GraniteMoeHybridForCausalLM

    @property
    def config(self) -> GraniteMoeHybridConfig:
        return self.model.config

    @property
    def max_length(self) -> int:
        """Of a sequence, in tokens."""
        return self.config.max_position_embeddings

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of the cache."""
        return self.model.dtype

    @property
    def is_quantized(self) -> bool:
        """Whether the large weights are int8 or int4."""
        return self.model.is_quantized

    @property
    def refusals(self) -> tuple[str, ...]:
        """A sentence for each faster way of computing that this runtime does not take."""
        return self.model.operators.refusals
