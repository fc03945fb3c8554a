"""Registers the model in the tables of NxD Inference's command line and of vLLM's plugin."""

from __future__ import annotations

from collections.abc import MutableMapping

from neuronx_distributed_inference.utils.constants import MODEL_TYPES

from granite4_neuron.config import MODEL_TYPE
from granite4_neuron.devices.neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM


def register_model(model_types: MutableMapping[str, dict[str, type]] = MODEL_TYPES) -> None:
    """Add the model to a table of NxD Inference, under the name by which GraniteMoeHybridForCausalLM is looked up."""
    model_types[MODEL_TYPE] = {"causal-lm": NeuronGraniteMoeHybridForCausalLM}


def run_inference_demo() -> None:
    """Run NxD Inference's inference_demo with this process's options, and with this model among its types.

    inference_demo has its own table of models. It is imported only here, because the import seeds the process's random
    numbers.

    Raises:
        UserError: the options ask for something that the model does not support.
    """
    from neuronx_distributed_inference import inference_demo

    register_model(inference_demo.MODEL_TYPES)
    inference_demo.main()
