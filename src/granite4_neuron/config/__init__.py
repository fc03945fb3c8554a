"""Describes a model: one dataclass for each family of models, read from a Hugging Face ``config.json``.

The rest of the package knows only their base class, `ModelConfig`, and does not ask for the family.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from granite4_neuron.config.aliases import ATTENTION, MAMBA
from granite4_neuron.config.dense import DENSE_MODEL_TYPE
from granite4_neuron.config.granite_moe_hybrid import ARCHITECTURE, MODEL_TYPE, GraniteMoeHybridConfig
from granite4_neuron.config.json_files import read_object
from granite4_neuron.config.model_config import EXPERT_NUMBER, LayerParts, ModelConfig, RankDimensions
from granite4_neuron.config.nemotron_h import NEMOTRON_MODEL_TYPE, NemotronHConfig
from granite4_neuron.config.published import published_values
from granite4_neuron.errors import UserError

__all__ = [
    "ARCHITECTURE",
    "ATTENTION",
    "EXPERT_NUMBER",
    "FAMILIES",
    "MAMBA",
    "MODEL_TYPE",
    "GraniteMoeHybridConfig",
    "LayerParts",
    "ModelConfig",
    "NemotronHConfig",
    "RankDimensions",
    "config_from_dict",
    "config_from_file",
    "published_config",
]

# The class of each model_type that is read, and a description of its models.
_READ: dict[str, tuple[type[ModelConfig], str]] = {
    MODEL_TYPE: (GraniteMoeHybridConfig, "Granite 4"),
    DENSE_MODEL_TYPE: (GraniteMoeHybridConfig, "dense Granite models"),
    NEMOTRON_MODEL_TYPE: (NemotronHConfig, "Nemotron 3"),
}
# The families' classes by their own model_type.
FAMILIES: dict[str, type[ModelConfig]] = {family.model_type: family for family, _ in _READ.values()}


def config_from_dict(values: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Build a config from the content of a ``config.json``, by its model_type; unknown keys are ignored.

    Args:
        values: the parsed JSON object, in the spelling of transformers 4.57 or 5.x.
        source: what to call the file in an error.

    Raises:
        UserError: this package does not run such a model, or a field is missing, of the wrong type, or contradicts
            another.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READ:
        *first, last = (f"{known!r} ({what})" for known, (_, what) in _READ.items())
        raise UserError(
            f"{source}: model_type is {reprlib.repr(model_type)}, and must be {', '.join(first)} or {last}."
        )
    return _READ[model_type][0].from_dict(values, source)


def config_from_file(path: str | Path) -> ModelConfig:
    """Read a ``config.json``.

    Raises:
        UserError: see `config_from_dict`; also when the file is missing or is not JSON.
    """
    return config_from_dict(read_object(Path(path)), source=str(path))


def published_config(name: str) -> ModelConfig:
    """Return the dimensions of a published checkpoint, such as ``granite-4.0-h-350m`` or ``h-350m``.

    Raises:
        UserError: there is no such checkpoint; the message lists them.
    """
    return config_from_dict(published_values(name), source=name)
