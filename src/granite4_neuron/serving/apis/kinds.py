"""Objects of a body that come in several types, named by their field `type`: items, blocks, tools, parts of a text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import BeforeValidator, Tag

from granite4_neuron.errors import UserError

_MARK = "\N{NULL}"  # begins pydantic's tags for the types, so that they differ from names of fields


def tag(kind: str) -> Tag:
    """Return pydantic's tag for objects of a type, one of several that a field may have."""
    return Tag(_MARK + kind)


def tag_of(value: Any) -> str:
    """Return the tag of an object that `only` has let pass."""
    return _MARK + str(value["type"])


def is_tag(part: str | int) -> bool:
    """Return whether a part of the place of an error is a tag; the others are names of fields, and numbers."""
    return isinstance(part, str) and part.startswith(_MARK)


def only(what: str, kinds: Collection[str], default: str | None = None, why: Mapping[str, str] = {}) -> BeforeValidator:
    """Return the validator of an object that must have one of these types.

    Args:
        what: the word for such objects.
        default: the type of one that has none.
        why: messages for others, by their type.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise UserError("it must be an object.")
        value = {"type": default, **value} if value.get("type") is None else value
        kind = value["type"]
        if kind in kinds:
            return value
        known = why.get(kind) if isinstance(kind, str) else None
        raise UserError(known or _unknown(what, kind, kinds))

    return BeforeValidator(check)


def text_of(kinds: Mapping[str, str], without_effect: Collection[str] = ()) -> BeforeValidator:
    """Return the validator of a content: a text, or a list of parts, whose texts it joins.

    Args:
        kinds: the types of parts, each with its field that has the text.
        without_effect: further fields that parts may have.
    """

    def text(part: Any) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        name = kinds.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise UserError(_unknown("part", kind, kinds))
        given = {each for each, value in part.items() if value is not None}
        if more := given - {"type", name, *without_effect}:
            raise UserError(f"{min(more)} is a field of a part that this server does not support; leave it out.")
        if not isinstance(part.get(name), str):
            raise UserError(f"a part of the type {kind} must have a {name}, which is a text.")
        return str(part[name])

    def check(value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise UserError("it must be a text, or a list of parts.")
        return "".join(map(text, value))

    return BeforeValidator(check)


def _unknown(what: str, kind: Any, kinds: Iterable[str]) -> str:
    return f"this server supports no {what} of the type {json.dumps(kind)}, but {', '.join(kinds)}."
