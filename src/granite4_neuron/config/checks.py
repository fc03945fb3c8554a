"""Checks that a config describes a model that can be built."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from granite4_neuron.config.aliases import ATTENTION, MAMBA
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.config import GraniteMoeHybridConfig

# Far beyond any existing model.
LARGEST = {
    "num_hidden_layers": 2**12,
    "num_local_experts": 2**12,
    "mamba_n_groups": 2**12,
    "mamba_d_conv": 2**12,
    "mamba_expand": 2**12,
    "max_position_embeddings": 2**40,
} | dict.fromkeys(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "shared_intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_intermediate_size",
    ),
    2**22,
)


def check(config: GraniteMoeHybridConfig, dtypes: Sequence[str]) -> None:
    """Check that a config describes a model that can be built, of one of these dtypes.

    Raises:
        UserError: it does not; the message names the field, its value, and what it must be.
    """
    for name in (
        "vocab_size",
        "hidden_size",
        "shared_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        _require(getattr(config, name) > 0, f"{name} is {getattr(config, name)}, and must be at least 1")
    _check_magnitudes(config)
    _require(
        len(config.layer_types) == config.num_hidden_layers,
        f"layer_types names {len(config.layer_types)} layers, but num_hidden_layers is {config.num_hidden_layers}",
    )
    for name, choices in (
        ("hidden_act", ("silu",)),
        ("position_embedding_type", ("rope", "nope", None)),
        ("torch_dtype", dtypes),
    ):
        value, known = getattr(config, name), ", ".join("null" if one is None else one for one in choices)
        _require(value in choices, f"{name} is {reprlib.repr(value)}, and must be one of: {known}")
    for name in ("logits_scaling", "rms_norm_eps", "max_position_embeddings"):
        _require(getattr(config, name) > 0, f"{name} is {getattr(config, name)}, and must be above 0")
    _check_experts(config)
    if ATTENTION in config.layer_types:
        _check_attention(config)
    if MAMBA in config.layer_types:
        _check_mamba(config)


def _check_magnitudes(config: GraniteMoeHybridConfig) -> None:
    """Refuse numbers with which reading a model would take minutes, or its sizes would not fit in 64 bits."""
    for name, most in LARGEST.items():
        value = getattr(config, name)
        _require(value <= most, f"{name} is {reprlib.repr(value)}, and can be at most {most:,}")


def _check_experts(config: GraniteMoeHybridConfig) -> None:
    experts, chosen = config.num_local_experts, config.num_experts_per_tok
    _require(experts >= 0, f"num_local_experts is {experts}, and must be 0 (a dense model) or more")
    if experts:
        _require(
            1 <= chosen <= experts,
            f"num_experts_per_tok is {chosen}, and must be between 1 and num_local_experts ({experts})",
        )
        _require(
            config.intermediate_size > 0, f"intermediate_size is {config.intermediate_size}, and must be at least 1"
        )


def _check_attention(config: GraniteMoeHybridConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    _require(
        heads > 0 and config.hidden_size % heads == 0,
        f"hidden_size ({config.hidden_size}) is not divisible by num_attention_heads ({heads})",
    )
    _require(
        kv_heads > 0 and heads % kv_heads == 0,
        f"num_attention_heads ({heads}) is not divisible by num_key_value_heads ({kv_heads})",
    )
    if config.uses_rope:
        _require(config.head_dim % 2 == 0, f"the head width {config.head_dim} is odd, and rope needs an even one")
        _require(config.rope_theta > 0, f"rope_theta is {config.rope_theta}, and must be above 0")


def _check_mamba(config: GraniteMoeHybridConfig) -> None:
    for name in ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_expand"):
        _require(getattr(config, name) > 0, f"{name} is {getattr(config, name)}, and must be at least 1")
    _require(config.mamba_d_conv >= 2, f"mamba_d_conv is {config.mamba_d_conv}, and must be at least 2")
    _require(
        config.mamba_n_heads * config.mamba_d_head == config.mamba_intermediate_size,
        f"mamba_n_heads * mamba_d_head ({config.mamba_n_heads} * {config.mamba_d_head}) must equal "
        f"mamba_expand * hidden_size ({config.mamba_expand} * {config.hidden_size})",
    )
    _require(
        config.mamba_n_heads % config.mamba_n_groups == 0,
        f"mamba_n_heads ({config.mamba_n_heads}) is not divisible by mamba_n_groups ({config.mamba_n_groups})",
    )
    lower, upper = config.time_step_limit
    _require(0.0 <= lower < upper, f"time_step_limit is [{lower}, {upper}], and must satisfy 0 <= lower < upper")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message + ".")
