"""Objects of a body that come in several types, named by their field `type`: items, blocks, tools, parts of a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from pydantic import BeforeValidator, Tag, ValidationInfo

from granite4_neuron.errors import UserError
from granite4_neuron.serving.apis.strict import ignore, without_nulls

_MARK = "\N{NULL}"  # begins pydantic's tags for the types, so that they differ from names of fields
# Types of parts, each with its field that has the text.
_TEXTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Thoughts among the parts of other servers' answers.
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"})
_MEDIA = ("image", "audio", "video", "file", "document")


def tag(kind: str) -> Tag:
    """Return pydantic's tag for objects of a type, one of several that a field may have."""
    return Tag(_MARK + kind)


def tag_of(value: Any) -> str:
    """Return the tag of an object that `one_of_types` has let pass."""
    return _MARK + str(value["type"])


def is_tag(part: str | int) -> bool:
    """Return whether a part of the place of an error is a tag; the others are names of fields, and numbers."""
    return isinstance(part, str) and part.startswith(_MARK)


def one_of_types(
    what: str, kinds: Collection[str], default: str | None = None, why: Mapping[str, str] = {}
) -> BeforeValidator:
    """Return the validator of an object that must have one of these types.

    Args:
        what: the word for such objects.
        default: the type of one that has none.
        why: messages for others, by their type.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise UserError("it must be an object.")
        value = {"type": default, **without_nulls(value)}
        kind = value["type"]
        if kind in kinds:
            return value
        known = why.get(kind) if isinstance(kind, str) else None
        raise UserError(known or _unknown(what, kind, kinds))

    return BeforeValidator(check)


def leaving_out(what: str, is_other: Callable[[str], bool]) -> BeforeValidator:
    """Return the validator of a list without the objects of some types, which are ignored: those that only a service
    can use, or has made.

    Args:
        what: the word for such objects.
        is_other: whether a type is one of those.
    """

    def check(values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, list):
            return values
        kept = []
        for value in values:
            kind = value.get("type") if isinstance(value, dict) else None
            if isinstance(kind, str) and is_other(kind):
                ignore(info, f"{what}:{kind}")
            else:
                kept.append(value)
        return kept

    return BeforeValidator(check)


def _text_of_parts(value: Any, info: ValidationInfo) -> str:
    def text(part: Any) -> str:
        if isinstance(part, str):
            return part
        given = {"type": "text", **without_nulls(part)} if isinstance(part, dict) else {"type": None}
        kind = given["type"]
        if isinstance(kind, str) and kind in _THOUGHTS:
            ignore(info, f"part:{kind}")
            return ""
        name = _TEXTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise UserError(_unknown("part", kind, _TEXTS))
        for other in given.keys() - {"type", name}:
            ignore(info, other)
        if not isinstance(given.get(name), str):
            raise UserError(f"a part of the type {kind} must have a {name}, which is a string.")
        return str(given[name])

    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError("it must be a string or a list of parts.")
    return "".join(map(text, value))


# The validator of a content: a string, or a list of parts, whose strings it joins.
text_of_parts = BeforeValidator(_text_of_parts)


def _unknown(what: str, kind: Any, kinds: Iterable[str]) -> str:
    said = f"this server supports no {what} of the type {json.dumps(kind)}"
    if isinstance(kind, str) and any(each in kind for each in _MEDIA):
        return f"{said}, because its models read text only."
    return f"{said}, but {', '.join(kinds)}."
