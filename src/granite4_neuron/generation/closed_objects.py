"""Closes the objects of JSON schemas, so that they have the named members only. By JSON Schema itself an object may
have others too, and a small model then adds members for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from granite4_neuron.generation.schema_references import BY_NAME, DEFINITIONS, VALUES, Schema, target_of

_SAME_VALUE = ("allOf", "anyOf", "oneOf")  # lists of schemas for the value that the schema itself describes
_OF_OBJECTS = {"properties", "required", "patternProperties", "minProperties", "maxProperties"}
# Of all objects together, each with the members of those to which it refers: these can be far more than a schema names.
_MOST_MEMBERS = 2**16
_OPENING = {"additionalProperties", "unevaluatedProperties", "propertyNames", "const", "enum"}


class TooManyMembers(ValueError):
    """A schema's objects have too many members. Its message says how many, without a subject and a full stop."""


def close_objects(schema: Schema) -> dict[str, Any]:
    """Return a schema whose objects have no members but those in `properties` and `required`, and those that
    `patternProperties` allows.

    With `additionalProperties` an object is as it says. It also stays open where `minProperties` asks for more members
    than are named. Where several schemas are for one object, as in `allOf`, it may have the members of all.

    Raises:
        RecursionError: the schema is nested too deep.
        TooManyMembers: its objects have more than 65,536 together.
    """
    return _Closing(schema).run()


class _Members(NamedTuple):
    """The members that a part of a schema allows in its value.

    names: those that it names.
    is_open: whether there may be others, or they are already closed.
    is_object: whether it speaks of objects at all.
    """

    names: set[str]
    is_open: bool
    is_object: bool


class _Closing:
    """Parts of the schema are known by their ids: they are those of the schema that is given, and never copies."""

    def __init__(self, schema: Schema):
        self._schema = schema
        self._members: dict[int, _Members] = {}
        self._definitions = _mapping(schema.get("$defs"))
        self._names: dict[int, str] = {}  # of the definitions that are added, by the part
        self._added: dict[str, Any] = {}
        self._num_members = 0
        self._prefix = "open"
        while any(name.startswith(self._prefix) for name in self._definitions):
            self._prefix += "-"

    def run(self) -> dict[str, Any]:
        closed = self._closed(self._schema)
        return {**closed, "$defs": {**closed.get("$defs", {}), **self._added}} if self._added else closed

    def _closed(self, part: Any) -> Any:
        """Return a part that alone describes its value."""
        if isinstance(part, list):
            return [self._closed(each) for each in part]
        if not isinstance(part, Mapping):
            return part
        own, others = _own_members(part), _num_others(part)
        if others == 1 and not own.names and not own.is_open:
            return self._rebuilt(part, self._closed)  # each of the others is closed by itself
        closed = self._opened(part) if others else self._rebuilt(part, self._closed)
        members = self._all_members(part)
        if members.is_open or not members.is_object:
            return closed
        self._count(members.names)
        known = closed.get("properties", {})
        unknown: Schema = {name: {} for name in sorted(members.names - known.keys())}
        return {**closed, "properties": {**known, **unknown}, "additionalProperties": False}

    def _opened(self, part: Any) -> Any:
        """Return a part that describes its value together with others."""
        if not isinstance(part, Mapping):
            return part
        opened = self._rebuilt(part, self._opened)
        target = target_of(part.get("$ref"), self._schema)
        return opened if target is None else {**opened, "$ref": f"#/$defs/{self._definition(target)}"}

    def _definition(self, part: Schema) -> str:
        """Return the name of the definition that is a part's open form."""
        if id(part) not in self._names:
            name = self._names[id(part)] = f"{self._prefix}{len(self._names)}"
            self._added[name] = self._opened({key: each for key, each in part.items() if key not in DEFINITIONS})
        return self._names[id(part)]

    def _rebuilt(self, part: Schema, form: Callable[[Any], Any]) -> dict[str, Any]:
        """Return a copy of a part, with `form` of each schema for the same value and with all other schemas closed."""
        rebuilt = {}
        for name, value in part.items():
            if name in VALUES:
                rebuilt[name] = value
            elif name in _SAME_VALUE and isinstance(value, list):
                rebuilt[name] = [form(each) for each in value]
            elif name in BY_NAME and isinstance(value, Mapping):
                rebuilt[name] = {key: self._closed(each) for key, each in value.items()}
            else:
                rebuilt[name] = self._closed(value)
        return rebuilt

    def _count(self, names: set[str]) -> None:
        self._num_members += len(names)
        if self._num_members > _MOST_MEMBERS:
            raise TooManyMembers(
                f"objects with more than {_MOST_MEMBERS:,} members together, those of references included"
            )

    def _all_members(self, part: Schema) -> _Members:
        """Return the members that a part allows, together with the parts that describe the same value."""
        known = self._members.get(id(part))
        if known is not None:
            return known
        own = self._members[id(part)] = _own_members(part)
        target = target_of(part.get("$ref"), self._schema)
        others = [self._all_members(each) for each in (target, *_others(part)) if isinstance(each, Mapping)]
        for each in others:
            self._count(each.names)
        self._members[id(part)] = members = _Members(
            own.names.union(*(each.names for each in others)),
            own.is_open or any(each.is_open for each in others) or ("$ref" in part and target is None),
            own.is_object or any(each.is_object for each in others),
        )
        return members


def _own_members(part: Schema) -> _Members:
    """Return the members that a part alone allows."""
    patterns = _mapping(part.get("patternProperties"))
    required = part.get("required", [])
    named = set(_mapping(part.get("properties")))
    is_valid = isinstance(required, list) and all(isinstance(name, str) for name in required)
    names = named | set(required if is_valid else ())
    least = part.get("minProperties", 0)
    is_open = bool(part.keys() & _OPENING) or not is_valid or not isinstance(part.get("properties", {}), Mapping)
    if patterns:
        is_open = is_open or names > named or _num_others(part) > 0
    else:
        is_open = is_open or (isinstance(least, int) and least > len(names))
    types = part.get("type")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    return _Members(names, is_open, is_object or bool(part.keys() & _OF_OBJECTS))


def _schemas(part: Schema, name: str) -> list[Any]:
    value = part.get(name)
    return value if isinstance(value, list) else []


def _others(part: Schema) -> Iterator[Any]:
    """Yield the schemas within a part that describe the same value."""
    for name in _SAME_VALUE:
        yield from _schemas(part, name)


def _num_others(part: Schema) -> int:
    """Return how many schemas describe the same value as the part itself; alternatives count as one."""
    return sum(name in part for name in ("$ref", "anyOf", "oneOf")) + len(_schemas(part, "allOf"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
