"""The fields of a request's body that limit its text: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from granite4_neuron.errors import UserError
from granite4_neuron.generation.structured_outputs import GrammarConstraint, Grammars, Kind
from granite4_neuron.sandbox.limited_process import Stop
from granite4_neuron.serving.errors import RequestError

_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_FIELDS_BESIDE_SCHEMA = {"name", "description", "strict"}
_KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")
_WHITESPACE = "disable_any_whitespace"


@dataclass(frozen=True)
class Structure:
    """The structure that a text must follow.

    field: of the body, which asks for it.
    kind, value, disable_any_whitespace: as in `Grammars.constraint`.
    """

    field: str
    kind: Kind
    value: Any
    disable_any_whitespace: bool = True

    def constraint(self, grammars: Grammars, stop: Stop | None = None) -> GrammarConstraint:
        """Compile it.

        Raises:
            RequestError: 400, it does not compile; see `Grammars.constraint`.
            Stopped: `stop` was set.
        """
        try:
            return grammars.constraint(self.kind, self.value, stop, disable_any_whitespace=self.disable_any_whitespace)
        except UserError as error:
            raise RequestError(400, f"{self.field}: {error}", self.field) from None


def structure_of(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> Structure | None:
    """Return the structure that the two fields ask for; None for any text.

    Raises:
        RequestError: 400, a field is wrong, or both ask for something.
    """
    given = {name: each for name, each in (structured_outputs or {}).items() if each is not None}
    disable_any_whitespace = given.pop(_WHITESPACE, None)
    formatted = _of_response_format(response_format or {"type": "text"})
    # With a response_format it may have nothing but the option.
    says_nothing = structured_outputs is None or (not given and formatted and disable_any_whitespace is not None)
    structured = None if says_nothing else _of_structured_outputs(given)
    if formatted and structured:
        raise RequestError(400, "response_format and structured_outputs exclude each other; give one of them.")
    structure = formatted or structured
    if structure is None or disable_any_whitespace is None:
        return structure
    if not isinstance(disable_any_whitespace, bool) or structure.kind not in ("json", "structural_tag"):
        raise RequestError(
            400, f"structured_outputs: {_WHITESPACE} is true or false, and only for JSON.", "structured_outputs"
        )
    return replace(structure, disable_any_whitespace=disable_any_whitespace)


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


def _of_structured_outputs(given: Mapping[str, Any]) -> Structure:
    if given == {"json_object": True}:
        return Structure("structured_outputs", "json", _ANY_OBJECT)
    asked = [kind for kind in _KINDS if kind in given]
    if len(given) != 1 or not asked:
        raise RequestError(
            400,
            f"structured_outputs: it must have one of {', '.join(_KINDS)} and json_object: true; {_WHITESPACE} may be "
            "added.",
            "structured_outputs",
        )
    return Structure("structured_outputs", asked[0], given[asked[0]])
