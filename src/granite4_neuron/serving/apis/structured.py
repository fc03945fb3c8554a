"""The fields of a request's body that limit its text: OpenAI's response_format, vLLM's structured_outputs, and
llama-server's json_schema and grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from granite4_neuron.errors import UserError
from granite4_neuron.generation.structured_outputs import CompiledGrammar, Grammars, Kind
from granite4_neuron.serving.apis.strict import without_nulls
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.system.sandbox.limited_process import Stop

_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")
_WHITESPACE = "disable_any_whitespace"


@dataclass(frozen=True)
class Structure:
    """The structure that a text must follow.

    field: of the body, which asks for it.
    kind, value, disable_any_whitespace, ends_thought: as in `Grammars.compile`.
    """

    field: str
    kind: Kind
    value: Any
    disable_any_whitespace: bool = True
    ends_thought: str | None = None

    def compile(self, grammars: Grammars, stop: Stop | None = None) -> CompiledGrammar:
        """Compile it.

        Raises:
            RequestError: 400, it does not compile; see `Grammars.compile`.
            Stopped: `stop` was set.
        """
        try:
            return grammars.compile(
                self.kind,
                self.value,
                stop,
                disable_any_whitespace=self.disable_any_whitespace,
                ends_thought=self.ends_thought,
            )
        except UserError as error:
            raise RequestError(400, f"{self.field}: {error}", self.field) from None


def structure_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    json_schema: Mapping[str, Any] | None = None,
    grammar: str | None = None,
) -> Structure | None:
    """Return the structure that the fields ask for; None for any text.

    Raises:
        RequestError: 400, a field is wrong, or several ask for something.
    """
    given = without_nulls(structured_outputs or {})
    disable_any_whitespace = given.pop(_WHITESPACE, None)
    formats = [
        _of_response_format(response_format or {"type": "text"}),
        None if json_schema is None else Structure("json_schema", "json", json_schema),
        Structure("grammar", "grammar", grammar) if grammar else None,
    ]
    asked = [each for each in formats if each is not None]
    # Beside another field it may have nothing but the option.
    if structured_outputs is not None and (given or not asked or disable_any_whitespace is None):
        asked.append(_of_structured_outputs(given))
    if len(asked) > 1:
        fields = " and ".join(each.field for each in asked)
        raise RequestError(400, f"{fields} exclude each other; give one of them.")
    if not asked:
        return None
    return asked[0] if disable_any_whitespace is None else _with_whitespace(asked[0], disable_any_whitespace)


def _with_whitespace(structure: Structure, disable_any_whitespace: Any) -> Structure:
    if not isinstance(disable_any_whitespace, bool) or structure.kind not in ("json", "structural_tag"):
        raise RequestError(
            400, f"structured_outputs: {_WHITESPACE} is true or false, and only for JSON.", "structured_outputs"
        )
    return replace(structure, disable_any_whitespace=disable_any_whitespace)


def _of_response_format(value: Mapping[str, Any]) -> Structure | None:
    field = "response_format"
    match value := without_nulls(value):
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict(schema)}:  # llama-server's
            return Structure(field, "json", schema)
        case {"type": "json_object"}:
            return Structure(field, "json", _ANY_OBJECT)
        case {"type": "structural_tag"}:
            return Structure(field, "structural_tag", value)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Structure(field, "json", schema)
    raise RequestError(
        400,
        f'{field}: it must be {{"type": "text"}}, {{"type": "json_object"}}, {{"type": "json_schema", '
        f'"json_schema": {{"name": ..., "schema": ...}}}}, or a structural_tag.',
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
