"""What a matrix of weights may be: a tensor, or what a quantisation or a backend made of one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class CompactWeight(Protocol):
    """A matrix [rows, columns], or one of each expert, that is kept otherwise than as a tensor of that shape."""

    @property
    def shape(self) -> torch.Size:
        """[rows, columns] or [experts, rows, columns]."""

    @property
    def is_quantized(self) -> bool:
        """Whether it has fewer values to choose from than the dtype of activations."""

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix as a tensor, [..., rows, columns], rounded to dtype."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows, those of all experts counted through: [...] ids to [..., columns] in float32."""

    def expert(self, number: int) -> Weight:
        """One expert's matrix [rows, columns]."""


Weight = torch.Tensor | CompactWeight


class Format(ABC):
    """A quantisation: how a matrix is written with fewer bits, as `values` and `scales`.

    name: what options and configs call it.
    """

    name: str

    @abstractmethod
    def layout(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of values ("") and scales ("_scale") of a matrix [..., rows, columns]."""

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """The nearest that this format has to a matrix [..., rows, columns] of any floating dtype."""

    @abstractmethod
    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [..., rows, columns] that values and scales stand for, rounded to dtype."""


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
        values, scales = (
            tensor.view(number, *tensor.shape[len(self.shape) - 1 :])[ids_in_line]
            for tensor in (self.values, self.scales)
        )
        some = QuantizedWeight(self.format, values, scales, torch.Size([len(values), self.shape[-1]]))
        return some.dequantize(torch.float32).view(*ids.shape, -1)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """As `Format.layout` has them."""
        return {"": self.values, "_scale": self.scales}

    def moved_to(self, places: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """The same in other memory: tensors as `tensors` has them."""
        values, scales = (places[name].copy_(tensor) for name, tensor in self.tensors().items())
        return QuantizedWeight(self.format, values, scales, self.shape)

    def expert(self, number: int) -> QuantizedWeight:
        return QuantizedWeight(self.format, self.values[number], self.scales[number], self.shape[1:])


def quantize(weight: torch.Tensor, format: Format) -> QuantizedWeight:
    """As `Format.quantize`."""
    return format.quantize(weight)


def as_tensor(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix as plain torch multiplies by it: a tensor is itself, anything else is dequantized to dtype."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)


def is_quantized(weight: Weight) -> bool:
    """Whether it has fewer values to choose from than the dtype of activations."""
    return not isinstance(weight, torch.Tensor) and weight.is_quantized
