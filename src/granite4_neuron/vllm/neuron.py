"""Makes the model known to vLLM's NxD Inference plugin, which looks models up by a config's architecture."""

from __future__ import annotations

import importlib.util


def register() -> None:
    """Register the model; the entry point of the group vllm.general_plugins. Does nothing if NxD Inference is not
    installed.
    """
    if importlib.util.find_spec("neuronx_distributed_inference") is not None:
        from granite4_neuron.devices.neuron.nxdi.registration import register_model

        register_model()
