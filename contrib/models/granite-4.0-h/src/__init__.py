from .modeling_granite4_hybrid import GraniteMoeHybridInferenceConfig, NeuronGraniteMoeHybridForCausalLM

__all__ = ["GraniteMoeHybridInferenceConfig", "NeuronGraniteMoeHybridForCausalLM"]
