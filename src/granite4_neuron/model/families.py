"""Makes the model of a config: the class of its family."""

from __future__ import annotations

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.modeling_nemotron_h import NemotronHForCausalLM
from granite4_neuron.model.parallel import Parallel

_CLASSES: dict[str, type[HybridForCausalLM]] = {
    each.__name__: each for each in (GraniteMoeHybridForCausalLM, NemotronHForCausalLM)
}


def model_of(config: ModelConfig, parallel: Parallel = Parallel()) -> HybridForCausalLM:  # noqa: B008
    """Make a model, or a rank's part of it, with uninitialised weights; arguments as for `HybridForCausalLM`."""
    return _CLASSES[config.architecture](config, parallel)
