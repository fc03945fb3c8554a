"""Replaces vLLM's own classes and functions."""

from __future__ import annotations

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models import ModelRegistry

from granite4_neuron.config import ARCHITECTURE, NemotronHConfig
from granite4_neuron.vllm.cpu import acceptance, configs, sampling, state_copies
from granite4_neuron.vllm.cpu.mixer import Granite4MambaMixer2
from granite4_neuron.vllm.cpu.model import Granite4ForCausalLM
from granite4_neuron.vllm.cpu.nemotron import Nemotron3ForCausalLM

_MODELS = {ARCHITECTURE: Granite4ForCausalLM, NemotronHConfig.architecture: Nemotron3ForCausalLM}


def taken_by() -> str | None:
    """Return the class that another plugin has registered for MambaMixer2, if any."""
    registered = op_registry_oot.get(MambaMixer2.__name__)
    if registered in (None, Granite4MambaMixer2):
        return None
    return f"{registered.__module__}.{registered.__qualname__}"


def register_all() -> None:
    """Replace vLLM's classes and functions; a second call does nothing.

    The mixer keeps a state after each token of a verify step and checkpoints for the prefix cache, respects the limits
    of the step size, and has its recurrent state in float32. The models run their layers in fused kernels on packed
    matrices; over several ranks, and for Nemotron 3, only the mixer is this package's. The functions copy states
    between blocks, which vLLM has for Triton only, and correct the temperatures of sampled drafts and the numbers of
    accepted tokens.
    """
    if MambaMixer2.__name__ in op_registry_oot:
        return
    MambaMixer2.register_oot(Granite4MambaMixer2, name=MambaMixer2.__name__)
    for architecture, model in _MODELS.items():
        ModelRegistry.models.pop(architecture, None)  # it would be replaced with a warning
        ModelRegistry.register_model(architecture, model)
    state_copies.register()
    sampling.register()
    acceptance.register()
    configs.call_with_each(configs.accept)
