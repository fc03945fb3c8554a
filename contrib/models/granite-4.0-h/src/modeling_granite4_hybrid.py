"""Granite 4.0 hybrids for NxD Inference. The code is the package granite4_neuron, which must be installed."""

from granite4_neuron.neuron.nxdi import GraniteMoeHybridInferenceConfig, NeuronGraniteMoeHybridForCausalLM

__all__ = ["GraniteMoeHybridInferenceConfig", "NeuronGraniteMoeHybridForCausalLM"]
