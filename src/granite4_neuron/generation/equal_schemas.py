"""Writes JSON schemas without keywords that llguidance does not take, where these say nothing more than the rest, or
where other keywords say the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from granite4_neuron.generation.schema_references import BY_NAME, VALUES, Schema, target_of

# Of a string; any other is a note for people, as JSON Schema has it.
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
_NOTES = {"title", "description", "examples", "default", "deprecated", "$comment"}

_TIME = r"(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_DATE = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_PICTURES = r"\p{Extended_Pictographic}\p{Regional_Indicator}\x{20E3}"
_PARTS_OF_PICTURES = r"\p{Extended_Pictographic}\p{Emoji_Component}"
# Patterns with look-around that zod and pydantic write, and what says the same without.
PATTERNS: Mapping[str, str] = {
    # zod's email, before its version 4.6
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    # zod's duration
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DATE}(?:T{_TIME})?|T{_TIME})$"
    ),
    # zod's emoji
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$": (
        rf"^[{_PARTS_OF_PICTURES}]*[{_PICTURES}][{_PARTS_OF_PICTURES}]*$"
    ),
    # pydantic's Decimal, in its versions 2.11 to 2.13
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}
_LENGTH_AHEAD = re.compile(r"\^\(\?=\.\{1,([0-9]{1,4})\}\\\.\?\$\)")
_FARTHEST = 10**18  # bound of a number; llguidance's are whole numbers of 64 bits


def equal_schema(schema: Schema) -> dict[str, Any]:
    """Return a schema for which the same values are valid, but for numbers beyond 10^18 where it has a bound there.

    Raises:
        RecursionError: the schema is nested too deep.
    """
    return {name: _of_keyword(name, value, schema) for name, value in _of_keywords(schema, schema).items()}


def _equal(part: Any, whole: Schema) -> Any:
    if isinstance(part, list):
        return [_equal(each, whole) for each in part]
    if not isinstance(part, Mapping):
        return part
    if part.get("not") in ({}, True) and isinstance(part.get("not"), (Mapping, bool)):
        return False
    return {name: _of_keyword(name, value, whole) for name, value in _of_keywords(part, whole).items()}


def _of_keyword(name: str, value: Any, whole: Schema) -> Any:
    if name in VALUES:
        return value
    if name in BY_NAME and isinstance(value, Mapping):
        return {key: _equal(each, whole) for key, each in value.items()}
    return _equal(value, whole)


def _of_keywords(part: Schema, whole: Schema) -> dict[str, Any]:
    """Return a part with other keywords of its own; the parts in it stay as they are."""
    equal = dict(part)
    _with_known_strings(equal)
    _with_near_bounds(equal)
    _without_names(equal, whole)
    _without_what_has_no_effect(equal)
    return equal


def _with_known_strings(equal: dict[str, Any]) -> None:
    """Leave out formats that are notes for people, and write patterns as grammars take them."""
    named = equal.get("format")
    if isinstance(named, str) and named not in _FORMATS:
        del equal["format"]
        if named.startswith("uuid"):  # of one version
            equal["format"] = "uuid"
    if isinstance(equal.get("pattern"), str):
        _with_length(equal)
        equal["pattern"] = PATTERNS.get(equal["pattern"], equal["pattern"])


def _without_what_has_no_effect(equal: dict[str, Any]) -> None:
    if "uniqueItems" in equal and (not equal["uniqueItems"] or _has_one_item(equal)):
        del equal["uniqueItems"]
    if equal.get("unevaluatedProperties") in (False, True, {}):  # objects are closed, see `closed_objects`
        del equal["unevaluatedProperties"]
    if "contains" not in equal:
        equal.pop("minContains", None)
        equal.pop("maxContains", None)
    if "if" not in equal or not equal.keys() & {"then", "else"}:
        for name in ("if", "then", "else"):
            equal.pop(name, None)
    for name in ("dependentRequired", "dependentSchemas"):
        if equal.get(name) == {}:
            del equal[name]


def _with_length(part: dict[str, Any]) -> None:
    """Say the most characters of a text, which a look-ahead of zod's hostname says, by `maxLength`. A text that ends
    with a dot might have one more.
    """
    ahead = _LENGTH_AHEAD.match(part["pattern"])
    if ahead:
        part["pattern"] = f"^{part['pattern'][ahead.end() :]}"
        given, most = part.get("maxLength"), int(ahead[1])
        part["maxLength"] = min(given, most) if isinstance(given, int) else most


def _with_near_bounds(part: dict[str, Any]) -> None:
    """Remove bounds of numbers that all have, and bring those nearer that llguidance does not take."""
    for name, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        bound = part.get(name)
        if isinstance(bound, (int, float)) and sign * bound > _FARTHEST:
            part[name] = sign * _FARTHEST
            if sign * bound >= sys.float_info.max:
                del part[name]


def _without_names(part: dict[str, Any], whole: Schema) -> None:
    """Remove `propertyNames`, or say the same by other keywords, if there are such."""
    said = _said_of_names(part.get("propertyNames"), whole)
    others = part.get("additionalProperties", {})
    if said is None:
        return
    instead: dict[str, Any] = {}
    if not said:
        pass  # all names may be there
    elif (allowed := _listed(said)) is not None and "patternProperties" not in part:
        known = part.get("properties", {})
        instead = {"properties": {name: known.get(name, others) for name in allowed}, "additionalProperties": False}
    elif said.keys() == {"pattern"} and not part.keys() & {"properties", "patternProperties"}:
        instead = {"patternProperties": {said["pattern"]: others}, "additionalProperties": False}
    else:
        return
    del part["propertyNames"]
    part.update(instead)


def _said_of_names(names: Any, whole: Schema) -> dict[str, Any] | None:
    """Return what a schema of names says of strings, without what limits none; None if it is not about strings."""
    if isinstance(names, Mapping):
        names = target_of(names.get("$ref"), whole) or names
    if names is True:
        return {}
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return None
    said = {name: value for name, value in names.items() if name not in _NOTES and name != "type"}
    if said.get("format") not in _FORMATS or "pattern" in said:
        said.pop("format", None)
    return said


def _listed(said: Schema) -> list[str] | None:
    """Return the only names that there may be, if that is all that a schema says; None otherwise."""
    if said.keys() not in ({"enum"}, {"const"}):
        return None
    allowed = said.get("enum", [said.get("const")])
    return allowed if isinstance(allowed, list) and all(isinstance(name, str) for name in allowed) else None


def _has_one_item(part: Schema) -> bool:
    most = part.get("maxItems")
    return isinstance(most, int) and most <= 1
