"""Checks of a config's fields, and the largest values that they may have."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Protocol

from granite4_neuron.errors import UserError

# Far beyond any existing model.
LARGEST = {
    "num_hidden_layers": 2**12,
    "num_local_experts": 2**12,
    "mamba_n_groups": 2**12,
    "mamba_d_conv": 2**12,
    "mamba_expand": 2**12,
    "n_group": 2**12,
    "max_position_embeddings": 2**40,
} | dict.fromkeys(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "shared_intermediate_size",
        "mlp_intermediate_size",
        "moe_latent_size",
        "head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_intermediate_size",
    ),
    2**22,
)


class Described(Protocol):
    """A config, whose fields have other names in some config.json."""

    def json_name(self, field: str) -> str:
        """Return the name of a field in config.json."""


def require(condition: bool, message: str) -> None:
    """Raise a UserError unless the condition holds. The message has no full stop at its end."""
    if not condition:
        raise UserError(message + ".")


def require_positive(config: Described, *names: str) -> None:
    """Check that fields are 1 or more."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{config.json_name(name)} is {value}, and must be at least 1")


def require_one_of(config: Described, name: str, choices: Sequence[str | None]) -> None:
    """Check that a field has one of these values."""
    value, known = getattr(config, name), ", ".join("null" if one is None else one for one in choices)
    require(value in choices, f"{config.json_name(name)} is {reprlib.repr(value)}, and must be one of: {known}")
