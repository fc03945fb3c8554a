"""Granite 4.0 hybrids as a model of NxD Inference. Only this package imports NxD Inference, which must be installed.

config = GraniteMoeHybridInferenceConfig(MoENeuronConfig(...), load_config=load_pretrained_config(path))
model = NeuronGraniteMoeHybridForCausalLM(path, config)
model.compile(compiled_path)
model.load(compiled_path)
HuggingFaceGenerationAdapter(model).generate(input_ids, attention_mask=attention_mask, max_new_tokens=20)
"""

from granite4_neuron.devices.neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM
from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.devices.neuron.nxdi.runtime import NeuronRuntime

__all__ = ["GraniteMoeHybridInferenceConfig", "NeuronGraniteMoeHybridForCausalLM", "NeuronRuntime"]
