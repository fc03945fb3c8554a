"""Where NxD Inference's command line and vLLM's plugin look for models."""

from __future__ import annotations

from neuronx_distributed_inference.utils.constants import MODEL_TYPES

from granite4_neuron.config import MODEL_TYPE
from granite4_neuron.neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM


def register_model() -> None:
    """Add the model to MODEL_TYPES, under the name that GraniteMoeHybridForCausalLM is looked up by."""
    MODEL_TYPES[MODEL_TYPE] = {"causal-lm": NeuronGraniteMoeHybridForCausalLM}
