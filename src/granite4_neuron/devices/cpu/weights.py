"""Matrices of weights in tiles for the fused kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from granite4_neuron.devices.cpu.build import formats, kernel, load_format
from granite4_neuron.errors import UserError
from granite4_neuron.ops.weight import Format, QuantizedWeight, Weight
from granite4_neuron.system.large_memory import LargeMemory

_PLAIN = "plain"


class PackedWeight:
    """A matrix, or one of each expert, in tiles; see devices/cpu/kernels/weight.h.

    packed: the kernels' argument, bytes.
    """

    def __init__(self, shape: torch.Size, format: Format | None, packed: torch.Tensor):
        self.shape, self.format, self.packed = shape, format, packed

    @property
    def is_quantized(self) -> bool:
        return self.format is not None

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"packed": self.packed}

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.rows(torch.arange(math.prod(self.shape[:-1]))).view(self.shape).to(dtype)

    def expert(self, number: int) -> torch.Tensor:
        """Return one expert's matrix [rows, columns] in float32."""
        _, rows, _ = self.shape
        return self.rows(torch.arange(number * rows, (number + 1) * rows))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows, numbered through all experts: [...] ids to [..., columns] in float32."""
        return kernel("weight_rows")(self.packed, ids)


def quantize(weight: torch.Tensor, format: Format) -> QuantizedWeight:
    if format.name not in formats():
        return format.quantize(weight)
    values, scales = (torch.empty(shape, dtype=dtype) for shape, dtype in format.layout(weight.shape).values())
    kernel("quantize")(weight.detach().reshape(-1, weight.shape[-1]).contiguous(), format.name, values, scales)
    return QuantizedWeight(format, values, scales, weight.shape)


class Pack:
    """The fused kernels' `ops.operators.Pack`: puts quantized matrices and tensors of activations' dtype into tiles.

    Raises:
        UserError: the kernels do not have the format.
    """

    def __call__(self, weight: Weight, dtype: torch.dtype, out: torch.Tensor | None = None) -> PackedWeight:
        if isinstance(weight, PackedWeight):
            return weight
        if isinstance(weight, torch.Tensor):
            format, values, scales = None, weight.detach(), None
        else:
            assert isinstance(weight, QuantizedWeight)  # there is no other compact weight
            format, values, scales = weight.format, weight.values, weight.scales.float()
        if out is None:
            about = torch.Size([self.num_bytes(weight.shape, dtype, format)]), torch.uint8
            out = LargeMemory([about]).empty(*about)
        kernel("pack")(values, scales, _name(format), dtype, weight.shape, out)
        return self.packed(weight.shape, format, out)

    def packed(self, shape: torch.Size, format: Format | None, out: torch.Tensor) -> PackedWeight:
        return PackedWeight(shape, format, out)

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype, format: Format | None = None) -> int:
        return kernel("packed_bytes")(shape, _name(format), dtype)


def _name(format: Format | None) -> str:
    if format is None:
        return _PLAIN
    if format.name not in formats():
        raise UserError(
            f"the fused kernels have no format {format.name}; choose plain torch for it (--cpu-kernels torch)."
        )
    load_format(format.name)
    return format.name


pack = Pack()
