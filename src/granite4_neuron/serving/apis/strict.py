"""The base of all parts of a request's body."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """An object of a body. It has no other fields, and a null field counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        # One that is not supported is enough for a refusal; an error for each of very many would take seconds.
        for name in [name for name in given if name not in cls.model_fields][1:]:
            del given[name]
        return given


class Conflict(ValueError):
    """Fields that contradict each other. Arguments: the field to name, and the message."""
