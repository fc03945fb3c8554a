"""Reads configs of GraniteForCausalLM, IBM's dense models: Granite 3.x, 4.1 and 4.2.

Such a model is a Granite 4 with attention in all layers, with rotary positions and without experts.
"""

from __future__ import annotations

import reprlib
from typing import Any

from granite4_neuron.config.aliases import ATTENTION
from granite4_neuron.config.checks import LARGEST
from granite4_neuron.errors import UserError

DENSE_MODEL_TYPE = "granite"


def as_hybrid(values: dict[str, Any]) -> dict[str, Any]:
    """Return the content of its config.json in the fields of GraniteMoeHybridForCausalLM.

    Raises:
        UserError: the MLPs have biases.
    """
    if values.get("mlp_bias"):
        raise UserError(f"mlp_bias is {reprlib.repr(values['mlp_bias'])}, and must be false: MLPs have no biases here.")
    layers = values.get("num_hidden_layers")
    layer_types = None
    if isinstance(layers, (int, float)) and 0 <= layers <= LARGEST["num_hidden_layers"]:
        layer_types = [ATTENTION] * int(layers)
    return {
        **values,
        "layer_types": layer_types,
        "position_embedding_type": "rope",
        "shared_intermediate_size": values.get("intermediate_size"),
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 1,  # no layer uses it; transformers divides by it
    }
