"""Encodings: how other tools store a matrix as several tensors, numbers of a few bits and their scales. They are read
into float32. Importing this package does not import torch.

The names of an encoding's tensors begin like the weight's, and end as its `tensors` says. The dtypes of all of them
tell encodings apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from granite4_neuron.checkpoint.encodings.fp4 import MXFP4, NVFP4
from granite4_neuron.checkpoint.encodings.fp8 import FP8
from granite4_neuron.checkpoint.encodings.mlx import Affine, Convolution
from granite4_neuron.config.quantization import StoredQuantization

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

# Where ModelOpt says "weight", compressed-tensors says "weight_packed", and it divides by the scale of the matrix.
_FP4 = (
    NVFP4("weight", "weight_scale_2", divides=False),
    NVFP4("weight_packed", "weight_global_scale", divides=True),
    MXFP4("weight"),
    MXFP4("weight_packed"),
)
# Scales of what this package does not quantize, by the endings of their names.
_UNUSED = {
    "input_scale": "activations",
    "input_global_scale": "activations",
    "output_scale": "activations",
    "k_scale": "the KV cache",
    "v_scale": "the KV cache",
}


class Encoding(Protocol):
    """An encoding of a matrix [..., rows, columns]."""

    @property
    def name(self) -> str:
        """Its name for users."""

    @property
    def tensors(self) -> Mapping[str, Sequence[str]]:
        """Its tensors' dtypes, by the endings of their names; the numbers come first."""

    def shape(self, shapes: Mapping[str, Shape]) -> Shape | None:
        """Return the matrix's shape, given its tensors'; None if they do not fit one another. The numbers have at least
        two axes.
        """

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the matrix in float32."""


def encodings(module: str, quantization: StoredQuantization | None, is_mlx: bool) -> Sequence[Encoding]:
    """Return the encodings that the weight of a module may have.

    Args:
        is_mlx: whether MLX wrote the file.
    """
    if is_mlx:
        layout = (Convolution(),) if module.endswith(".conv1d") else ()
        affine = {} if quantization is None else quantization.affine
        return (*layout, Affine(*affine.get(module, affine[""]))) if affine else layout
    if quantization is None or quantization.is_native:
        return ()
    blocks = quantization.blocks
    return FP8("weight_scale", blocks), FP8("weight_scale_inv", blocks), *_FP4


def unused_purpose(name: str, quantization: StoredQuantization | None) -> str | None:
    """Return what a scale is for that no weight has; None for any other tensor."""
    is_foreign = quantization is not None and not quantization.is_native
    return _UNUSED.get(name.rpartition(".")[2]) if is_foreign else None
