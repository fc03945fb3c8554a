"""Checks that a config describes a model that can be built."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from granite4_neuron.config.aliases import ATTENTION, MAMBA
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.config.model_config import ModelConfig

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


def check(config: ModelConfig, dtypes: Sequence[str]) -> None:
    """Check that a config of any family describes a model that can be built, in one of these dtypes.

    Raises:
        UserError: it does not; the message names the field, its value, and the right values.
    """
    require_positive(config, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    _check_magnitudes(config)
    called = config.json_name
    require(
        len(config.layer_types) == config.num_hidden_layers,
        f"{called('layer_types')} names {len(config.layer_types)} layers, but num_hidden_layers is "
        f"{config.num_hidden_layers}",
    )
    require_one_of(config, "torch_dtype", dtypes)
    experts = config.num_local_experts
    require(experts >= 0, f"{called('num_local_experts')} is {experts}, and must be 0 (a dense model) or more")
    for name in ("logits_scaling", "rms_norm_eps", "max_position_embeddings"):
        require(getattr(config, name) > 0, f"{called(name)} is {getattr(config, name)}, and must be above 0")
    all_parts = [config.parts(kind) for kind in dict.fromkeys(config.layer_types)]
    mixers = {one.mixer for one in all_parts}
    if MAMBA in mixers:
        require_positive(config, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups")
    config.check_family()
    if any(one.has_experts for one in all_parts):
        _check_experts(config)
    if ATTENTION in mixers:
        _check_attention(config)
    if MAMBA in mixers:
        _check_mamba(config)


def require(condition: bool, message: str) -> None:
    """Raise a UserError unless the condition holds. The message has no full stop at its end."""
    if not condition:
        raise UserError(message + ".")


def require_positive(config: ModelConfig, *names: str) -> None:
    """Check that fields are 1 or more."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{config.json_name(name)} is {value}, and must be at least 1")


def require_one_of(config: ModelConfig, name: str, choices: Sequence[str | None]) -> None:
    """Check that a field has one of these values."""
    value, known = getattr(config, name), ", ".join("null" if one is None else one for one in choices)
    require(value in choices, f"{config.json_name(name)} is {reprlib.repr(value)}, and must be one of: {known}")


def _check_magnitudes(config: ModelConfig) -> None:
    """Refuse numbers for which reading a model would take minutes, or sizes would not fit in 64 bits."""
    for name, most in LARGEST.items():
        value = getattr(config, name, 0)  # some belong to one family only
        require(value <= most, f"{config.json_name(name)} is {reprlib.repr(value)}, and can be at most {most:,}")


def _check_experts(config: ModelConfig) -> None:
    experts, chosen, called = config.num_local_experts, config.num_experts_per_tok, config.json_name
    require(
        1 <= chosen <= experts,
        f"{called('num_experts_per_tok')} is {chosen}, and must be between 1 and {called('num_local_experts')} "
        f"({experts})",
    )
    require_positive(config, "intermediate_size")


def _check_attention(config: ModelConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        f"num_attention_heads ({heads}) is not divisible by num_key_value_heads ({kv_heads})",
    )


def _check_mamba(config: ModelConfig) -> None:
    called = config.json_name
    require(config.mamba_d_conv >= 2, f"{called('mamba_d_conv')} is {config.mamba_d_conv}, and must be at least 2")
    require(
        config.mamba_n_heads % config.mamba_n_groups == 0,
        f"{called('mamba_n_heads')} ({config.mamba_n_heads}) is not divisible by {called('mamba_n_groups')} "
        f"({config.mamba_n_groups})",
    )
    lower, upper = config.time_step_limit
    require(0.0 <= lower < upper, f"time_step_limit is [{lower}, {upper}], and must satisfy 0 <= lower < upper")
