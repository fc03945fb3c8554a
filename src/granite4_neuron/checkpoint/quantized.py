"""Weights that a checkpoint stores quantized: find them, and read them without rounding them again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from granite4_neuron.checkpoint.checkpoint import StoredWeight
from granite4_neuron.checkpoint.stored_tensors import StoredTensors
from granite4_neuron.checkpoint.weight_plan import EXPERTS, formats_for, model_format, partner
from granite4_neuron.config.choices import INT4_GROUP
from granite4_neuron.config.quantization import StoredQuantization, WeightScheme
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.linear import Matrix
from granite4_neuron.ops import FORMATS, Format, QuantizedWeight
from granite4_neuron.ops.formats.int4 import FORMAT as INT4
from granite4_neuron.ops.formats.int4 import ZERO
from granite4_neuron.ops.formats.int8 import FORMAT as INT8
from granite4_neuron.ops.fp8 import FORMAT as FP8

if TYPE_CHECKING:
    from granite4_neuron.checkpoint.stored_tensors import Layout


class StoredFormat(Protocol):
    """A way to store a quantized weight as tensors."""

    @property
    def format(self) -> Format:
        """The weight's format in memory."""

    def layout(self, shape: torch.Size) -> Layout:
        """Its tensors, by the endings that their names add to the weight's name; the numbers come first."""

    def read(self, name: str, shape: torch.Size, stored: StoredTensors) -> QuantizedWeight:
        """Read the weight of this name, which has the tensors of `layout`."""


@dataclass(frozen=True)
class NativeFormat:
    """A weight as `checkpoint.saving.save_model` writes it: the values and scales of a `Format`."""

    format: Format

    def layout(self, shape: torch.Size) -> Layout:
        return self.format.layout(shape)

    def read(self, name: str, shape: torch.Size, stored: StoredTensors) -> QuantizedWeight:
        values, scales = (stored.read(f"{name}{ending}").contiguous() for ending in self.layout(shape))
        return QuantizedWeight(self.format, values, scales, shape)


@dataclass(frozen=True)
class CompressedFormat:
    """A weight as compressed-tensors writes it.

    Numbers are not changed. Nor are scales, which are repeated if a group is longer than `INT4_GROUP`; but scales of
    int4 that are stored in float32 or float16 are rounded to bfloat16, by 0.4 % at most.
    """

    scheme: WeightScheme

    @property
    def format(self) -> Format:
        return INT4 if self.scheme.bits == 4 else INT8

    def layout(self, shape: torch.Size) -> Layout:
        *rows, columns = shape
        groups = 1 if self.scheme.group_size is None else -(-columns // self.scheme.group_size)
        scales = {"_scale": (torch.Size([*rows, groups]), None)}
        if not self.scheme.is_packed:
            return {"": (shape, torch.int8), **scales}
        words = math.ceil(columns * self.scheme.bits / 32)
        about_shape = torch.Size([len(shape)]), torch.int64
        return {"_packed": (torch.Size([*rows, words]), torch.int32), **scales, "_shape": about_shape}

    def read(self, name: str, shape: torch.Size, stored: StoredTensors) -> QuantizedWeight:
        """
        Raises:
            UserError: the weight had another shape when it was packed.
        """
        tensors = {ending: stored.read(f"{name}{ending}") for ending in self.layout(shape)}
        if self.scheme.is_packed and tensors["_shape"].tolist() != list(shape):
            raise UserError(
                f"the weights in {stored.folder} do not fit its config.json; {name}_shape says "
                f"{tensors['_shape'].tolist()} instead of {list(shape)}."
            )
        columns, scales = shape[-1], tensors["_scale"]
        if self.format is INT8:
            numbers = _unpacked_int8(tensors["_packed"], columns) if self.scheme.is_packed else tensors[""].contiguous()
            return QuantizedWeight(INT8, numbers, scales[..., 0].float(), shape)
        groups = math.ceil(columns / INT4_GROUP)
        repeats = groups if self.scheme.group_size is None else min(groups, self.scheme.group_size // INT4_GROUP)
        scales = scales.bfloat16().repeat_interleave(repeats, dim=-1)[..., :groups].contiguous()
        return QuantizedWeight(INT4, _whole_groups(tensors["_packed"], columns), scales, shape)


def quantized_weights(
    stored: StoredTensors, model: HybridForCausalLM, quantization: StoredQuantization | None
) -> dict[str, StoredFormat]:
    """Find the weights that are stored quantized, by name. Their tensors show which weights these are and in which
    format.

    Args:
        model: without weights.
        quantization: from the config; None for no quantized weights.

    Raises:
        UserError: they are in other formats than the config says, or a layer's experts are in two formats.
    """
    if quantization is None:
        return {}
    choices: list[StoredFormat] = []
    if quantization.is_native:
        choices += map(NativeFormat, FORMATS.values())
    else:
        choices += map(CompressedFormat, quantization.schemes)
    # Two formats may have the same tensors, so the one that the config implies is tried first.
    implied = formats_for(model, quantization.name) if quantization.is_native else {}
    found = {}
    for name, shape in _matrix_shapes(model).items():
        first = [NativeFormat(implied[name])] if name in implied else []
        if (stored_format := _stored_format(name, shape, [*first, *choices], stored)) is not None:
            found[name] = stored_format
    formats = {name: each.format for name, each in found.items()}
    if quantization.is_native and (not found or model_format(formats).name != quantization.name):
        raise UserError(
            f"the weights in {stored.folder} do not fit its config.json, which says that they are {quantization.name}."
        )
    _check_experts(formats, stored)
    return found


def weights_in_fp8(stored: StoredTensors, model: HybridForCausalLM) -> dict[str, StoredWeight]:
    """Find the weights that may stay in FP8, by name.

    Args:
        model: without weights.
    """

    def read(name: str, shape: torch.Size) -> QuantizedWeight:
        return QuantizedWeight(FP8, *stored.read_fp8(name), shape)

    found = {name for name in formats_for(model, INT4.name) if stored.may_stay_in_fp8(name)}
    return {name: StoredWeight(FP8, partial(read, name)) for name in found if partner(name) in found}


def _unpacked_int8(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack four numbers from each int32, in the layout of `ops.int8`: [..., columns] in int8.

    The first column is in the lowest bits; the code for 0 is 128.
    """
    return packed.contiguous().view(torch.uint8).bitwise_xor(0x80).view(torch.int8)[..., :columns].contiguous()


def _whole_groups(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Turn eight numbers in each int32 into the layout of `ops.int4`: the same bytes, and zeros up to the end of a
    group.
    """
    values = packed.contiguous().view(torch.uint8)[..., : math.ceil(columns / 2)]
    if columns % 2:
        values = values.clone()
        values[..., -1] = values[..., -1] & 15 | ZERO << 4
    return functional.pad(values, (0, -columns % INT4_GROUP // 2), value=ZERO | ZERO << 4)


def _matrix_shapes(model: HybridForCausalLM) -> dict[str, torch.Size]:
    """Return shapes by the names of the weights; a tied head is included."""
    return {f"{name}.weight": one.weight.shape for name, one in model.named_modules() if isinstance(one, Matrix)}


def _stored_format(
    name: str, shape: torch.Size, choices: Sequence[StoredFormat], stored: StoredTensors
) -> StoredFormat | None:
    """Return the format that all tensors fit. If there is none, return one that the numbers fit, whose layout shows the
    fault.
    """
    with_these_numbers = []
    for choice in choices:
        fits = [stored.has(f"{name}{ending}", *about) for ending, about in choice.layout(shape).items()]
        if all(fits):
            return choice
        if fits[0]:
            with_these_numbers.append(choice)
    return with_these_numbers[0] if with_these_numbers else None


def _check_experts(formats: Mapping[str, Format], stored: StoredTensors) -> None:
    """Check that the two matrices of experts have one format: no kernel takes two."""
    for name, format in formats.items():
        if formats.get(partner(name)) is not format:
            layer, _, _ = name.partition(EXPERTS)
            raise UserError(
                f"the weights in {stored.folder} have two formats in the experts of {layer}; both matrices must have "
                "the same one."
            )
