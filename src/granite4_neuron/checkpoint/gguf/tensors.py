"""The weights of a GGUF file, by published name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from granite4_neuron.checkpoint.gguf.config import predicting_layers
from granite4_neuron.checkpoint.gguf.file import GGUFFile
from granite4_neuron.checkpoint.gguf.names import from_gguf, gguf_names, to_gguf
from granite4_neuron.config import ModelConfig
from granite4_neuron.errors import UserError, listed
from granite4_neuron.model.parameters import parameters

if TYPE_CHECKING:
    import numpy

FLOAT_TYPES = ("F32", "F16", "BF16")
_LEGACY, _K_QUANTS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"), ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TYPES = (*FLOAT_TYPES, *_LEGACY, *_K_QUANTS, "IQ4_NL", "IQ4_XS", "MXFP4")


class GGUFTensors:
    """The weights of a GGUF file. Each is read separately.

    left_out: the number of tensors that the model does not have, by their purpose.

    Raises:
        UserError: the tensors are not a model's with this config, or have types that are not supported; the message
            lists them.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self.path = file.path
        self._file, self._config = file, config
        self._shapes = {name: one.shape for name, one in parameters(self._config).items()}
        self._expected = {
            stored: tuple(tensor.shape)
            for name, shape in self._shapes.items()
            for stored, tensor in zip(
                self._parts(name), to_gguf(name, torch.empty(shape, device="meta"), self._config), strict=True
            )
        }
        layers = config.num_hidden_layers
        predicting = {f"blk.{layers + number}" for number in range(predicting_layers(file))}
        self._left_out = {name for name in file.tensors if ".".join(name.split(".")[:2]) in predicting}
        self.left_out = {"multi-token prediction": len(self._left_out)} if self._left_out else {}
        self._check()

    def types(self, names: Iterable[str]) -> set[str]:
        """Return the types of the tensors that store these parameters."""
        return {self._file.tensors[one].type for name in names for one in gguf_names(name, self._config)}

    def names(self) -> list[str]:
        """Return the published names of all parameters."""
        return list(self._shapes)

    def read(self, name: str) -> torch.Tensor:
        """Read a parameter, in float32 and with the values that ggml gives it."""
        return self._joined(name, self._file.dequantized)

    def raw(self, name: str) -> torch.Tensor:
        """Read the bytes of a matrix, [..., rows, bytes of a row]."""
        return self._joined(name, lambda part: self._file.raw(part).copy())

    def first_rows(self, name: str, rows: int) -> torch.Tensor:
        """Read the bytes of the first rows of each part of a matrix, [..., rows, bytes of a row]."""
        return torch.cat([torch.from_numpy(self._file.raw(one)[..., :rows, :].copy()) for one in self._parts(name)], -2)

    def _parts(self, name: str) -> tuple[str, ...]:
        return gguf_names(name, self._config)

    def _joined(self, name: str, read: Callable[[str], numpy.ndarray]) -> torch.Tensor:
        # Restore the shapes: ggml leaves out outer axes of size one.
        parts = [torch.from_numpy(read(one)).reshape(*self._expected[one][:-1], -1) for one in self._parts(name)]
        return from_gguf(name, parts, self._shapes[name], self._config)

    def _check(self) -> None:
        expected = self._expected
        there = {name: one for name, one in self._file.tensors.items() if name not in self._left_out}
        wrong = {
            "missing": sorted(expected.keys() - there.keys()),
            "not of this model": sorted(there.keys() - expected.keys()),
            "of another shape": [
                f"{name} is {list(there[name].shape)} instead of {list(shape)}"
                for name, shape in expected.items()
                if name in there and _kept_axes(there[name].shape) != _kept_axes(shape)
            ],
        }
        faults = [f"{what}: {listed(names)}" for what, names in wrong.items() if names]
        if faults:
            raise UserError(f"the tensors in {self.path} do not fit its metadata; {'; '.join(faults)}.")
        strange = [f"{name} is {one.type}" for name, one in there.items() if one.type not in TYPES]
        if strange:
            raise UserError(
                f"{self.path} has tensors of types that are not supported: {listed(strange)}; supported are "
                f"{', '.join(TYPES)}."
            )


def _kept_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return _kept_axes(shape[1:]) if shape[:1] == (1,) else shape
