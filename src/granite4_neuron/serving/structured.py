"""The fields of a request's body that limit its text: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from granite4_neuron.errors import UserError
from granite4_neuron.generation.structured_outputs import GrammarConstraint, Grammars, Kind
from granite4_neuron.sandbox.limited_process import Stop
from granite4_neuron.serving.errors import RequestError

_ANY_OBJECT = {"type": "object"}
_FIELDS_BESIDE_SCHEMA = {"name", "description", "strict"}
_KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True)
class Structure:
    """The structure that a text must follow.

    field: of the body, which asks for it.
    kind, value: as in `Grammars.constraint`.
    """

    field: str
    kind: Kind
    value: Any

    def constraint(self, grammars: Grammars, stop: Stop | None = None) -> GrammarConstraint:
        """Compile it.

        Raises:
            RequestError: 400, it does not compile; see `Grammars.constraint`.
            Stopped: `stop` was set.
        """
        try:
            return grammars.constraint(self.kind, self.value, stop)
        except UserError as error:
            raise RequestError(400, f"{self.field}: {error}", self.field) from None


def structure_of(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> Structure | None:
    """Return the structure that the two fields ask for; None for any text.

    Raises:
        RequestError: 400, a field is wrong, or both ask for something.
    """
    formats = [_of_response_format(response_format or {"type": "text"}), _of_structured_outputs(structured_outputs)]
    asked = [each for each in formats if each is not None]
    if len(asked) == 2:
        raise RequestError(400, "response_format and structured_outputs exclude each other; give one of them.")
    return asked[0] if asked else None


def _of_response_format(value: Mapping[str, Any]) -> Structure | None:
    field = "response_format"
    if value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return Structure(field, "json", _ANY_OBJECT)
    if value.get("type") == "structural_tag":
        return Structure(field, "structural_tag", value)
    match value:
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **others}, **more} if not more:
            if others.keys() <= _FIELDS_BESIDE_SCHEMA:
                return Structure(field, "json", schema)
    raise RequestError(
        400,
        f'{field}: it must be {{"type": "text"}}, {{"type": "json_object"}}, {{"type": "json_schema", '
        f'"json_schema": {{"name": ..., "schema": ...}}}}, where description and strict may be added, or a '
        "structural_tag.",
        field,
    )


def _of_structured_outputs(value: Mapping[str, Any] | None) -> Structure | None:
    if value is None:
        return None
    given = {name: each for name, each in value.items() if each is not None}
    if given == {"json_object": True}:
        return Structure("structured_outputs", "json", _ANY_OBJECT)
    asked = [kind for kind in _KINDS if kind in given]
    if len(given) != 1 or not asked:
        raise RequestError(
            400,
            f"structured_outputs: it must have one of {', '.join(_KINDS)} and json_object: true.",
            "structured_outputs",
        )
    return Structure("structured_outputs", asked[0], given[asked[0]])
