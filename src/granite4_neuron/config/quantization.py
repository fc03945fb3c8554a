"""The `quantization_config` of a config.json: how quantized weights are stored."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from granite4_neuron.config.choices import INT4_GROUP, QUANTIZATIONS
from granite4_neuron.errors import UserError

COMPRESSED_TENSORS = "compressed-tensors"
MODELOPT = "modelopt"
_OURS = "granite4-neuron"
_PACKED = "pack-quantized"
# ModelOpt's algorithms whose weights are in FP8, NVFP4 or MXFP4.
_ALGORITHMS = (
    "FP8",
    "FP8_PB_WO",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "MXFP4",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_MXFP4_FP8",
    "W4A8_NVFP4_FP8",
)
_MIXED = "MIXED_PRECISION"
_BLOCK = (128, 128)  # of FP8 where a config says nothing else
# compressed-tensors' formats of floats: bits, strategies, group_size.
_FLOATS: Mapping[str, tuple[int, tuple[str, ...], int | None]] = {
    "float-quantized": (8, ("tensor", "channel", "block"), None),
    "naive-quantized": (8, ("tensor", "channel", "block"), None),
    "nvfp4-pack-quantized": (4, ("tensor_group",), 16),
    "mxfp4-pack-quantized": (4, ("group",), 32),
}


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

    name: one of `choices.QUANTIZATIONS`, or the name of another tool.
    schemes: for compressed-tensors, the schemes of integers that weights have. The tensors show which weight has which.
    blocks: the rows and columns that share a scale in FP8, if blocks do. The tensors show where.
    affine: for MLX, the bits and the columns that share a scale, by module; for others under "".
    """

    name: str
    schemes: tuple[WeightScheme, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    affine: Mapping[str, tuple[int, int]] = field(default_factory=dict)

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
    if (of_mlx := values.get("quantization")) is not None:  # MLX repeats it under the other name
        return _mlx(of_mlx)
    about = values.get("quantization_config")
    if about is None:
        return None
    if not isinstance(about, dict):
        about = {"quant_method": about}
    method = about.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise _not_read("a tool that config.json does not name" if method is None else reprlib.repr(method))
    return _READERS[method](about)


def modelopt_in(values: dict[str, Any]) -> StoredQuantization:
    """Return how weights are quantized by ModelOpt's own file beside config.json, with this content; raises like
    `quantization_in`.
    """
    about = values.get("quantization")
    return _modelopt(about if isinstance(about, dict) else {})


def _mlx(about: Any) -> StoredQuantization:
    if not isinstance(about, dict):
        raise _not_read("MLX")
    affine = {}
    for module, one in {"": about, **{name: one for name, one in about.items() if isinstance(one, dict)}}.items():
        mode, bits, columns = one.get("mode", "affine"), one.get("bits", 4), one.get("group_size", 64)
        if mode != "affine":
            raise _not_read(f"MLX in the mode {reprlib.repr(mode)}")
        if bits not in (4, 8) or not isinstance(columns, int) or columns <= 0:
            raise _not_read(f"MLX in {reprlib.repr(bits)} bits for groups of {reprlib.repr(columns)}")
        affine[module] = bits, columns
    return StoredQuantization("MLX", affine=affine)


def _ours(about: dict[str, Any]) -> StoredQuantization:
    format = about.get("format")
    if format not in QUANTIZATIONS:
        raise UserError(
            f"the weights' quantization_config has the format {reprlib.repr(format)}, and must have one of "
            f"{', '.join(QUANTIZATIONS)}."
        )
    return StoredQuantization(format)


def _fp8(about: dict[str, Any]) -> StoredQuantization:
    return StoredQuantization("fp8", blocks=(_block(about.get("weight_block_size")),))


def _block(size: Any) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    if size is None:
        return _BLOCK
    if isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size):
        return size[0], size[1]
    raise UserError(
        f"the weights' blocks have the size {reprlib.repr(size)}, and must have a number of rows and columns."
    )


def _modelopt(about: dict[str, Any]) -> StoredQuantization:
    algorithms = [about.get("quant_algo")]
    if algorithms == [_MIXED]:
        layers = about.get("quantized_layers")
        all_about = layers.values() if isinstance(layers, dict) else ()
        algorithms = [layer.get("quant_algo") if isinstance(layer, dict) else None for layer in all_about]
    for one in algorithms:
        if not isinstance(one, str) or one.upper() not in _ALGORITHMS:
            raise _not_read("NVIDIA's ModelOpt" + (f" in {reprlib.repr(one)}" if one is not None else ""))
    return StoredQuantization("ModelOpt", blocks=(_BLOCK,))


def _not_read(tool: str) -> UserError:
    """Return the refusal of weights that this tool has quantized."""
    return UserError(
        f"the weights are quantized by {tool}, and only those of convert --quantize, {COMPRESSED_TENSORS}, ModelOpt "
        "(FP8, NVFP4, MXFP4), MLX (4 and 8 bits) and the method fp8 are read; take the model that this one was made "
        "from, and quantize it on loading."
    )


def _compressed_tensors(about: dict[str, Any]) -> StoredQuantization:
    groups = about.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(map(_has_weights, groups.values())):
        raise _refusal("no config_groups that say how")
    for name in ("transform_config", "moe_sparsity_config"):
        if about.get(name):
            raise _refusal(f"a {name}")
    sparsity = about.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _refusal("a sparsity_config")
    schemes: dict[WeightScheme, None] = {}
    blocks: dict[tuple[int, int], None] = {}
    for group in groups.values():
        format = group.get("format") or about.get("format")
        if isinstance(format, str) and format in _FLOATS:
            _check_floats(group["weights"], format)
            blocks[_block(group["weights"].get("block_structure"))] = None
        else:
            schemes[_scheme(group, format)] = None
    return StoredQuantization(COMPRESSED_TENSORS, tuple(schemes), tuple(blocks))


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
    raise _other_numbers(weights, format)


def _check_floats(weights: dict[str, Any], format: str) -> None:
    """Check that weights in one of `_FLOATS` are as its encoding says."""
    bits, strategies, size = _FLOATS[format]
    if (reason := _why_not_type(weights, "float")) is not None:
        raise _refusal(reason)
    if weights.get("num_bits") != bits or weights.get("strategy") not in strategies:
        raise _other_numbers(weights, format)
    if size is not None and weights.get("group_size") != size:
        raise _other_numbers(weights, format)


def _other_numbers(weights: dict[str, Any], format: Any) -> UserError:
    bits, strategy, size = (reprlib.repr(weights.get(name)) for name in ("num_bits", "strategy", "group_size"))
    about = f", group_size {size}" if "group" in strategy else ""
    return _refusal(f"{bits} bits, strategy {strategy}{about}, in {format}")


def _why_not(group: dict[str, Any], format: Any) -> str | None:
    """Return what of a group's quantization is not read, whatever its bits; None if there is nothing."""
    weights = group["weights"]
    if format not in (_PACKED, "int-quantized"):
        return f"the format {reprlib.repr(format)}"
    if any(group.get(name) is not None for name in ("input_activations", "output_activations")):
        return "quantized activations"
    if (reason := _why_not_type(weights, "int")) is not None:
        return reason
    # Accepted methods reorder columns only while they quantize, and store them in the original order.
    if weights.get("actorder") not in (None, False, "weight", "static"):
        return f"columns in another order (actorder {reprlib.repr(weights['actorder'])})"
    return None


def _why_not_type(weights: dict[str, Any], type: str) -> str | None:
    if weights.get("type") != type:
        return f"weights of type {reprlib.repr(weights.get('type'))}"
    return None if weights.get("symmetric") is True else "weights that are not symmetric"


def _refusal(what: str) -> UserError:
    return UserError(
        f"the weights are quantized by {COMPRESSED_TENSORS} with {what}; only symmetric weights are read, of 8 "
        f"bits per channel (pack-quantized or int-quantized), or of 4 bits per channel or per group of {INT4_GROUP}, "
        f"{2 * INT4_GROUP}, {3 * INT4_GROUP}... columns (pack-quantized), without quantized activations, and floats ("
        f"{', '.join(_FLOATS)})."
    )


_READERS: Mapping[str, Callable[[dict[str, Any]], StoredQuantization]] = {
    _OURS: _ours,
    COMPRESSED_TENSORS: _compressed_tensors,
    MODELOPT: _modelopt,
    "fp8": _fp8,
}
