"""Says which part of a JSON schema is the cause why it cannot be a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from granite4_neuron.generation.schema_references import DEFINITIONS, Schema, target_of

MOST_TRIALS = 64
_LOOK_AROUND = re.compile(r"\(\?(=|!|<=|<!)")


def place_of_fault(schema: Schema, error: str, error_alone: Callable[[Schema], str | None]) -> str:
    """Return what is wrong with a schema, after the names of the members that lead to the smallest part that is wrong.

    Args:
        error: llguidance's, of the whole schema.
        error_alone: returns its error of a part, with the definitions of the whole; None if there is none. It is called
            up to `MOST_TRIALS` times.
    """
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    path: list[str] = []
    part, trials = schema, 0
    while True:
        for name, child in _children(part, schema):
            trials += 1
            if trials > MOST_TRIALS:
                break
            if error_alone({**definitions, **child}) == error:
                part, path = child, [*path, *name]
                break
        else:
            break
        if trials > MOST_TRIALS:
            break
    said = _in_words(part, error)
    return f"{'.'.join(path)}: {said}" if path else said


def _children(part: Schema, whole: Schema) -> Iterator[tuple[list[str], Schema]]:
    """Yield the parts within a part, each with what names it."""
    target = target_of(part.get("$ref"), whole)
    if target is not None:
        yield [], target
    for keyword, value in part.items():
        if keyword in DEFINITIONS:
            continue
        if keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
            yield from (([str(name)], each) for name, each in value.items() if isinstance(each, Mapping))
        elif isinstance(value, Mapping):
            yield [], value
        elif isinstance(value, list):
            yield from (([], each) for each in value if isinstance(each, Mapping))


def _in_words(part: Schema, error: str) -> str:
    """Return an error in words that say what a client can change."""
    if error.startswith("regex parse error"):
        pattern = part.get("pattern")
        if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
            return "its pattern has look-around, which is not supported"
        return "its pattern is no regular expression in Rust's syntax"
    if "oneOf" in error:
        return "its oneOf has alternatives that one value may match together; anyOf is supported"
    if match := re.search(r"Unimplemented keys: \[(.*)\]", error):
        return f"{match[1].replace(chr(34), '')} is not supported"
    return error.rstrip(".")
