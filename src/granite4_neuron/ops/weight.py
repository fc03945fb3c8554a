"""A matrix of weights: a tensor, or a quantized or packed matrix in its place; and the interface of a quantisation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch


class CompactWeight(Protocol):
    """A matrix [rows, columns], or one of each expert, that is not a tensor of that shape."""

    @property
    def shape(self) -> torch.Size:
        """[rows, columns] or [experts, rows, columns]."""

    @property
    def format(self) -> Format | None:
        """The quantisation; None if values are in the activations' dtype."""

    @property
    def is_quantized(self) -> bool:
        """Whether it has fewer bits than the activations."""

    @property
    def num_bytes(self) -> int:
        """The size in memory."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return its memory as tensors by name."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix as a tensor, [..., rows, columns], rounded to dtype."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows, numbered through all experts: [...] ids to [..., columns] in float32."""

    def expert(self, number: int) -> Weight:
        """Return one expert's matrix [rows, columns]."""


Weight = torch.Tensor | CompactWeight


class Format(ABC):
    """A quantisation: how a matrix is written with fewer bits, as `values` and `scales`.

    A module of `ops.formats` has the only instance of a subclass as FORMAT. Plain torch multiplies by what `dequantize`
    returns. The fused kernels have a header for it in devices/cpu/kernels/formats.

    quantizes_tied_embedding: whether a tied head and the embedding stay one matrix, in the format `head`. Otherwise the
        embedding is not quantized, and the head has values of its own.
    lossless_dtype: the dtype whose numbers it represents exactly, if it `holds` them; None if it rounds.
    """

    quantizes_tied_embedding: ClassVar[bool] = False
    lossless_dtype: ClassVar[torch.dtype | None] = None

    @property
    def name(self) -> str:
        """The name in options and configs, which is the module's."""
        return type(self).__module__.rpartition(".")[-1]

    @property
    def head(self) -> Format:
        """The format of the head of a model that is quantized in this one."""
        return self

    @abstractmethod
    def layout(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and dtype of values ("") and scales ("_scale") of a matrix [..., rows, columns].

        Both shapes begin with [..., rows].
        """

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Round a matrix [..., rows, columns] of any floating dtype to the values of this format.

        If a row has numbers that are not finite, its scales are not finite either, unless the format represents such
        numbers.
        """

    def holds(self, weight: QuantizedWeight) -> bool:
        """Return whether a weight quantized in this format has exactly the numbers that it was made from."""
        return True

    def fault(self, weight: QuantizedWeight) -> str | None:
        """Return the fault of a stored weight on the CPU that makes its numbers undefined or different between
        implementations; None if there is none.
        """
        return None if weight.scales.isfinite().all() else "scales that are not finite (NaN or infinity)"

    @abstractmethod
    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [..., rows, columns] that values and scales stand for, rounded to dtype."""

    def num_bytes(self, shape: torch.Size) -> int:
        """Return the size of values and scales of a matrix [..., rows, columns]."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.layout(shape).values())


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix, or one of each expert, in a `Format`; values and scales are contiguous and as its `layout` says.

    shape: [rows, columns] or [experts, rows, columns].
    """

    format: Format
    values: torch.Tensor
    scales: torch.Tensor
    shape: torch.Size

    is_quantized = True

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.format.dequantize(self, dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        number, ids_in_line = math.prod(self.shape[:-1]), ids.flatten()
        # torch 2.9 takes no rows of float8 on a CPU.
        is_float8 = self.values.dtype == torch.float8_e4m3fn
        values, scales = (
            tensor.view(number, *tensor.shape[len(self.shape) - 1 :])[ids_in_line]
            for tensor in (self.values.view(torch.uint8) if is_float8 else self.values, self.scales)
        )
        values = values.view(self.values.dtype)
        some = QuantizedWeight(self.format, values, scales, torch.Size([len(values), self.shape[-1]]))
        return some.dequantize(torch.float32).view(*ids.shape, -1)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return values and scales under the names of `Format.layout`."""
        return {"": self.values, "_scale": self.scales}

    def moved_to(self, places: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Copy it into other memory, given as tensors under the names of `tensors`."""
        values, scales = (places[name].copy_(tensor) for name, tensor in self.tensors().items())
        return QuantizedWeight(self.format, values, scales, self.shape)

    def to(self, device: torch.device) -> QuantizedWeight:
        """Copy it to a device, unless it is there."""
        return QuantizedWeight(self.format, self.values.to(device), self.scales.to(device), self.shape)

    def expert(self, number: int) -> QuantizedWeight:
        return QuantizedWeight(self.format, self.values[number], self.scales[number], self.shape[1:])


def quantize(weight: torch.Tensor, format: Format) -> QuantizedWeight:
    """Call `Format.quantize`; the plain `ops.operators.Quantize`."""
    return format.quantize(weight)


def values_at_a_time(device: torch.device, in_cache: int) -> int:
    """Return how many values to quantize at a time: on a CPU what its cache holds; elsewhere many, in few launches."""
    return in_cache if device.type == "cpu" else 2**24


def as_tensor(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as it is, and dequantize anything else to dtype, for products in plain torch."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)


def format_of(weight: Weight) -> Format | None:
    """Return the format of a matrix; None if it is not quantized."""
    return None if isinstance(weight, torch.Tensor) else weight.format


def is_quantized(weight: Weight) -> bool:
    """Return whether a matrix has fewer bits than the activations."""
    return not isinstance(weight, torch.Tensor) and weight.is_quantized
