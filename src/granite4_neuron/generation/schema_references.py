"""Keywords of JSON schemas, and references in them
(https://json-schema.org/draft/2020-12/json-schema-core#section-8.2.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
BY_NAME = ("properties", "patternProperties", *DEFINITIONS)  # whose values are objects of schemas by name
VALUES = {"const", "enum", "default", "examples"}  # whose values are not schemas


def has_endless_reference(schema: Schema) -> bool:
    """Return whether following references from some part of a schema leads back to it without a choice, as in
    {"$ref": "#"}: no value could ever be found to be valid.

    A reference below a property or an item is not followed: a tree refers to itself and may be finite. References that
    lead out of the schema are not followed.
    """
    parts = list(_parts(schema))
    waits: dict[int, list[int]] = {}  # from a part to the alternatives, by number, of which it is one
    owners: list[int] = []  # by that number, the part that needs one of the alternatives
    needs = {id(part): 0 for part in parts}
    for part in parts:
        for alternatives in _needed(part, schema):
            if any(id(each) not in needs for each in alternatives):
                continue
            needs[id(part)] += 1
            for each in alternatives:
                waits.setdefault(id(each), []).append(len(owners))
            owners.append(id(part))
    met: set[int] = set()
    ready = [part for part, number in needs.items() if not number]
    ended = len(ready)
    while ready:
        for number in waits.get(ready.pop(), ()):
            if number in met:
                continue
            met.add(number)
            needs[owners[number]] -= 1
            if not needs[owners[number]]:
                ready.append(owners[number])
                ended += 1
    return ended < len(needs)


def _parts(schema: Schema) -> Iterator[Schema]:
    """Yield all objects of a schema, itself included."""
    left: list[Any] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            yield value
            left += [each for name, each in value.items() if name not in VALUES]
        elif isinstance(value, list):
            left += value


def _needed(part: Schema, schema: Schema) -> Iterator[Sequence[Schema]]:
    """Yield lists of parts: for the same value, one of each list is to be followed as well."""
    target = target_of(part.get("$ref"), schema)
    if target is not None:
        yield [target]
    for each in _schemas(part.get("allOf")):
        yield [each]
    for name in ("anyOf", "oneOf"):
        alternatives = _schemas(part.get(name))
        if alternatives and len(alternatives) == len(part[name]):  # true and false are schemas without references
            yield alternatives


def _schemas(value: Any) -> Sequence[Schema]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def target_of(reference: Any, schema: Schema) -> Schema | None:
    """Return the part to which a reference leads by a JSON pointer; None for others."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    value: Any = schema
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value if isinstance(value, Mapping) else None
