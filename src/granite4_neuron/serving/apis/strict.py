"""The base of all parts of a request's body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from granite4_neuron.serving.apis.unsupported import Check

_MOST_IGNORED = 32
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class Ignored:
    """Names of what a request has and what changes nothing here, as the context of its validation.

    names: the first of them. A name that is no short word is left out, because it may look like anything.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, name: str) -> None:
        if len(self.names) < _MOST_IGNORED and _NAME.fullmatch(name):
            self.names.add(name)


def ignore(info: ValidationInfo, name: str) -> None:
    """Note that a part of a body changes nothing, if somebody wants to know."""
    if isinstance(info.context, Ignored):
        info.context.add(name)


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of a body without its null fields, which count as absent."""
    return {name: value for name, value in values.items() if value is not None}


class Strict(BaseModel):
    """An object of a body. Its fields have exactly their types, and a null field counts as absent. Other fields are
    ignored, unless they would change the text.

    unsupported: checks of the fields that would, by their names.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, Check]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        known = {}
        for name, value in without_nulls(values).items():
            if name in cls.model_fields:
                known[name] = value
            elif name in cls.unsupported and (wrong := cls.unsupported[name](value)):
                raise Conflict(name, wrong)
            else:
                ignore(info, name)
        return known


class Conflict(ValueError):
    """Fields of an object that contradict each other, or one that is refused. Arguments: the field, and the message."""
