"""The `quantization_config` of a config.json: how quantized weights are stored."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from granite4_neuron.config.choices import INT4_GROUP, QUANTIZATIONS
from granite4_neuron.errors import UserError

COMPRESSED_TENSORS = "compressed-tensors"
_OURS = "granite4-neuron"
_PACKED = "pack-quantized"


@dataclass(frozen=True)
class WeightScheme:
    """A scheme of compressed-tensors: signed integers with scales.

    bits: bits per number, 4 or 8.
    group_size: the number of columns of a row that share a scale, a multiple of INT4_GROUP; None for all columns.
    is_packed: whether an int32 holds as many numbers as fit; otherwise an int8 holds one.
    """

    bits: int
    group_size: int | None
    is_packed: bool


@dataclass(frozen=True)
class StoredQuantization:
    """How the quantized weights of a checkpoint are stored.

    name: one of `choices.QUANTIZATIONS`, or COMPRESSED_TENSORS.
    schemes: for compressed-tensors, the schemes that weights have. The tensors show which weight has which.
    """

    name: str
    schemes: tuple[WeightScheme, ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether this package wrote them."""
        return self.name in QUANTIZATIONS

    @property
    def is_kept(self) -> bool:
        """Whether weights stay quantized in memory."""
        return self.is_native or bool(self.schemes)


def quantization_config(name: str) -> dict[str, str]:
    """Return the entry in config.json for weights that this package wrote, in one of `choices.QUANTIZATIONS`."""
    return {"quant_method": _OURS, "format": name}


def quantization_in(values: dict[str, Any]) -> StoredQuantization | None:
    """Return how the weights beside a config.json are quantized; None if they are not.

    Args:
        values: the file's content.

    Raises:
        UserError: they are quantized in a way that this package does not read.
    """
    about = values.get("quantization_config")
    if values.get("quantization") is not None:  # MLX repeats it under the other name
        raise not_read_quantized("MLX")
    if about is None:
        return None
    method = about.get("quant_method") if isinstance(about, dict) else about
    if method == COMPRESSED_TENSORS:
        return _compressed_tensors(about)
    if method != _OURS:
        raise not_read_quantized("a tool that config.json does not name" if method is None else reprlib.repr(method))
    format = about.get("format") if isinstance(about, dict) else None
    if format not in QUANTIZATIONS:
        raise UserError(
            f"the weights' quantization_config has the format {reprlib.repr(format)}, and must have one of "
            f"{', '.join(QUANTIZATIONS)}."
        )
    return StoredQuantization(format)


def not_read_quantized(tool: str) -> UserError:
    """Return the refusal of weights that this tool has quantized."""
    return UserError(
        f"the weights are quantized by {tool}, and only checkpoints that convert --quantize or {COMPRESSED_TENSORS} "
        "wrote are read quantized; take the model that this one was made from, and quantize it on loading."
    )


def _compressed_tensors(about: Any) -> StoredQuantization:
    groups = about.get("config_groups") if isinstance(about, dict) else None
    if not isinstance(groups, dict) or not groups or not all(map(_has_weights, groups.values())):
        raise _refusal("no config_groups that say how")
    for name in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
        if about.get(name):
            raise _refusal(f"a {name}")
    sparsity = about.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _refusal("a sparsity_config")
    schemes = [_scheme(group, group.get("format") or about.get("format")) for group in groups.values()]
    return StoredQuantization(COMPRESSED_TENSORS, tuple(dict.fromkeys(schemes)))


def _has_weights(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("weights"), dict)


def _scheme(group: dict[str, Any], format: Any) -> WeightScheme:
    weights = group["weights"]
    bits, strategy, size = (weights.get(name) for name in ("num_bits", "strategy", "group_size"))
    if (reason := _why_not(group, format)) is not None:
        raise _refusal(reason)
    is_packed = format == _PACKED
    if strategy == "channel" and (bits == 8 or (bits == 4 and is_packed)):
        return WeightScheme(bits, None, is_packed)
    is_size = isinstance(size, int) and size > 0 and size % INT4_GROUP == 0
    if strategy == "group" and bits == 4 and is_packed and is_size:
        return WeightScheme(bits, size, is_packed)
    about = f", group_size {reprlib.repr(size)}" if strategy == "group" else ""
    raise _refusal(f"{reprlib.repr(bits)} bits, strategy {reprlib.repr(strategy)}{about}, in {format}")


def _why_not(group: dict[str, Any], format: Any) -> str | None:
    """Return what of a group's quantization is not read, whatever its bits; None if there is nothing."""
    weights = group["weights"]
    if format not in (_PACKED, "int-quantized"):
        return f"the format {reprlib.repr(format)}"
    if any(group.get(name) is not None for name in ("input_activations", "output_activations")):
        return "quantized activations"
    if weights.get("type") != "int":
        return f"weights of type {reprlib.repr(weights.get('type'))}"
    if weights.get("symmetric") is not True:
        return "weights that are not symmetric"
    # Accepted methods reorder columns only while they quantize, and store them in the original order.
    if weights.get("actorder") not in (None, False, "weight", "static"):
        return f"columns in another order (actorder {reprlib.repr(weights['actorder'])})"
    return None


def _refusal(what: str) -> UserError:
    return UserError(
        f"the weights are quantized by {COMPRESSED_TENSORS} with {what}; only symmetric weights are read, of 8 "
        f"bits per channel (pack-quantized or int-quantized), or of 4 bits per channel or per group of {INT4_GROUP}, "
        f"{2 * INT4_GROUP}, {3 * INT4_GROUP}... columns (pack-quantized), without quantized activations."
    )
