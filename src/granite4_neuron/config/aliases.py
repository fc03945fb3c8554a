"""Spellings of config.json by its writers: transformers 4.57, transformers 5.x, and the published files."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from granite4_neuron.errors import UserError

MAMBA = "mamba"
ATTENTION = "attention"

_LAYER_TYPE_SPELLINGS = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
}


def one_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Rename and unwrap fields that transformers 5.x spells differently from 4.57, or 4.57 from published files."""
    values = dict(values)
    if values.get("layer_types") is None:
        values["layer_types"] = values.get("layers_block_type")
    if values.get("torch_dtype") is None:
        values["torch_dtype"] = values.get("dtype")
    if values.get("mamba_d_head") == "auto":
        values["mamba_d_head"] = None
    if isinstance(values.get("torch_dtype"), str):
        values["torch_dtype"] = values["torch_dtype"].removeprefix("torch.")
    if values.get("layer_types") is not None and not isinstance(values["layer_types"], tuple):
        values["layer_types"] = layer_types_in(values["layer_types"], "layer_types")
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    if values.get("position_embedding_type") == "rope":
        values["rope_theta"] = _rope_theta(values)
    return values


def layer_types_in(spelled: Any, name: str, more: Mapping[str, str] = {}) -> tuple[str, ...]:
    """Read a list of layer types.

    Args:
        name: the list's name in config.json.
        more: spellings of types besides MAMBA and ATTENTION.

    Raises:
        UserError: it is not a list of known types.
    """
    if not isinstance(spelled, list) or not all(isinstance(one, str) for one in spelled):
        raise UserError(f"{name} is {reprlib.repr(spelled)}, and must be a list with one name per layer.")
    known = {**_LAYER_TYPE_SPELLINGS, **more}
    unknown = sorted({one for one in spelled if one not in known})
    if unknown:
        raise UserError(f"{name} has unknown names ({', '.join(unknown)}); known are {', '.join(known)}.")
    return tuple(known[one] for one in spelled)


def time_step_limit_in(spelled: Any) -> tuple[float, float]:
    """Read a pair of numbers, of which the second may be infinity; raise UserError if it is another value."""
    if not isinstance(spelled, (list, tuple)) or len(spelled) != 2:
        raise UserError(f"time_step_limit is {reprlib.repr(spelled)}, and must be a pair of numbers.")
    # JSON has no infinity: transformers 5.x writes {"__float__": "Infinity"}.
    plain = [bound["__float__"] if isinstance(bound, dict) and "__float__" in bound else bound for bound in spelled]
    try:
        lower, upper = (float(bound) for bound in plain)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"time_step_limit is {reprlib.repr(spelled)}, and must be a pair of numbers.") from None
    return lower, upper


def _rope_theta(values: dict[str, Any]) -> Any:
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"the rope parameters are {reprlib.repr(parameters)}, and must be an object.")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type != "default" or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"the rope parameters {reprlib.repr(parameters)} are not supported; rope_type must be 'default'."
        )
    return parameters.get("rope_theta", values.get("rope_theta"))
