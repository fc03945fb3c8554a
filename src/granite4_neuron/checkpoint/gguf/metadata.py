"""The metadata of a model in a GGUF file, with checks of its types."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from granite4_neuron.checkpoint.gguf.file import GGUFFile
from granite4_neuron.config.checks import LARGEST
from granite4_neuron.errors import UserError


class Metadata:
    """The metadata of one architecture. Errors name the key."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self._architecture = file, architecture

    def key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        value = self.file.get(self.key(name))
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.file.path} lacks {self.key(name)}.")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        # One value for each layer, all of them the same.
        if isinstance(value, list) and len(set(map(repr, value))) == 1 and len(value) == self.get("block_count"):
            value = value[0]
        return self._checked(name, value, type(value) is int and value >= 0, "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        """Return the shortest decimal number with the same float32 value, which is the original config's number."""
        value = self.get(name, default)
        self._checked(name, value, type(value) in (int, float) and math.isfinite(value), "a number")
        # Not at the top: most commands read no GGUF file.
        import numpy

        return float(str(numpy.float32(value)))

    def first_number(self, *names: str) -> float:
        """Return the value of the first of these names that the file has."""
        return self.number(next((name for name in names if self.file.get(self.key(name)) is not None), names[-1]))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        return self._checked(name, value, isinstance(value, bool), "true or false")

    def layers(self) -> tuple[int, int]:
        """Return the number of layers, and of the layers after them that predict further tokens."""
        both, predicting = self.count("block_count"), self.count("nextn_predict_layers", 0)
        if both > LARGEST["num_hidden_layers"]:
            raise UserError(
                f"{self.file.path}: {self.key('block_count')} is {both}, and can be at most "
                f"{LARGEST['num_hidden_layers']:,}."
            )
        if predicting and predicting >= both:
            raise UserError(
                f"{self.file.path}: {self.key('nextn_predict_layers')} is {predicting}, and must be less than "
                f"{self.key('block_count')} ({both})."
            )
        return both - predicting, predicting

    def heads(self) -> int:
        """Return the number of attention heads."""
        heads = self.count("attention.head_count")
        if heads == 0:
            raise UserError(f"{self.file.path}: {self.key('attention.head_count')} is 0, and must be at least 1.")
        return heads

    def per_layer(self, name: str, default: int | None = None) -> list[int]:
        """Return a number for each layer, which the file has as a list or once; all that are not 0 must be equal."""
        layers, predicting = self.layers()
        value = self.get(name, default)
        values = value if isinstance(value, list) else [value] * (layers + predicting)
        is_right = all(type(each) is int and each >= 0 for each in values) and len(set(values) - {0}) <= 1
        if len(values) != layers + predicting or not values or not is_right:
            raise UserError(
                f"{self.file.path}: {self.key(name)} is {reprlib.repr(value)}, and must be a whole number or a list of "
                f"{layers + predicting}, each 0 or the same."
            )
        return values[:layers]

    def check_only(self, name: str, supported: Any) -> None:
        """Check that a value, if there is one, is the only one that is supported."""
        value = self.get(name, supported)
        if value != supported:
            raise UserError(
                f"{self.file.path}: {self.key(name)} is {reprlib.repr(value)}, which is not supported; it must be "
                f"{supported}."
            )

    def _checked(self, name: str, value: Any, is_right: bool, what: str) -> Any:
        if not is_right:
            raise UserError(f"{self.file.path}: {self.key(name)} is {reprlib.repr(value)}, and must be {what}.")
        return value
