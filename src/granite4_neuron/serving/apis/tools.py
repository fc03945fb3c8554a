"""Tools in a request: their fields, how the chat template gets them, and the grammar of calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, PlainValidator
from pydantic_core import from_json

from granite4_neuron.config.json_files import finite, strict_json
from granite4_neuron.errors import UserError
from granite4_neuron.generation import tool_calls
from granite4_neuron.generation.answer_formats import AnswerFormat
from granite4_neuron.generation.structured_outputs import CompiledGrammar, Grammars
from granite4_neuron.serving.apis.kinds import leaving_out
from granite4_neuron.serving.apis.strict import Strict
from granite4_neuron.serving.apis.structured import Structure
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.system.sandbox.grammar_process import GrammarTooCostly
from granite4_neuron.system.sandbox.limited_process import Stop

MAX_DOCUMENTS = 1024
_MOST_COSTLY = 3  # tools of a request whose schemas take too long
_TOO_COSTLY = str(GrammarTooCostly())
_LOGGER = logging.getLogger(__name__)

# Agents put the name of a tool's server before its own.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


def arguments_of(value: Any) -> dict[str, Any]:
    """Return the arguments of a call, which strict JSON can hold: those that are complete, of a text that is cut off,
    and none if it is no object in JSON.
    """
    try:
        arguments = _parsed(value or "{}") if isinstance(value, str) else finite(value)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {}


def _parsed(text: str) -> Any:
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return finite(from_json(text, allow_partial=True, allow_inf_nan=False))


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(finite)] = None
    strict: bool = False


class Tool(Strict):
    type: Literal["function"] = "function"
    function: Function

    def described(self) -> dict[str, Any]:
        """Return it as the chat template shows it to the model: what the client gave, without `strict`."""
        given = self.function
        parts = dict(name=given.name, description=given.description, parameters=given.parameters)
        return {"type": self.type, "function": {name: part for name, part in parts.items() if part is not None}}

    def called(self) -> tool_calls.Tool:
        """Return it with the schema of its arguments: an object, unless the schema refers to others."""
        parameters = self.function.parameters or {}
        is_elsewhere = parameters.keys() & {"$ref", "allOf", "anyOf", "oneOf"}
        return tool_calls.Tool(self.function.name, parameters if is_elsewhere else {"type": "object", **parameters})


# Of the types that the APIs have besides functions, services run most, and a group's functions have two names.
Tools = Annotated[list[Tool], FailFast(), leaving_out("tool", lambda kind: kind != "function")]


class FunctionCall(Strict):
    """An earlier call. A model may have invented the name."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(arguments_of)] = Field({})


class ToolCall(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def described(self) -> dict[str, Any]:
        """Return it as the chat template gets it."""
        return {"id": self.id, "type": self.type, "function": self.function.model_dump()}


@dataclass(frozen=True)
class ToolChoice:
    """The tools of a request that its answer may call.

    names: of those tools; None for all.
    is_call: whether the answer is exactly one call.
    """

    mode: Literal["none", "auto", "required"]
    names: Sequence[str] | None = None
    is_call: bool = False


def _tool_choice(value: Any) -> ToolChoice:
    match value:
        case ToolChoice():
            return value
        case ("none" | "auto" | "required" as mode) | {"type": "none" | "auto" | "required" as mode}:
            return ToolChoice(mode)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", [name], is_call=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            if names := [name for name in map(_referred, tools) if name is not None]:
                return ToolChoice(mode, list(dict.fromkeys(names)))
    raise UserError(
        f'it must be "none", "auto", "required", {json.dumps(_reference("..."))}, or '
        f"{json.dumps(_allowed_tools('auto', ['...']))}, where the mode may be required."
    )


def _reference(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _referred(tool: Any) -> str | None:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    return None


def _allowed_tools(mode: str, names: Sequence[str]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(map(_reference, names))}}


ToolChoiceField = Annotated[ToolChoice, PlainValidator(_tool_choice)]


def structure_of_calls(
    tools: Sequence[Tool],
    choice: ToolChoice,
    several: bool,
    answer: Structure | None,
    special: Collection[str],
    format: AnswerFormat,
    ends_thought: str | None = None,
) -> Structure | None:
    """Return the structure of an answer with tools; None for any text, in which calls may be malformed.

    Args:
        several: whether there may be several calls.
        answer: the structure of an answer that calls nothing.
        special, ends_thought: see `calls_grammar`.
        format: of the answer.

    A tool that is not strict, and whose schema cannot be a grammar, has any arguments.

    Raises:
        RequestError: 400, an answer without a call would have to follow a structure that is no JSON schema.
    """
    chosen = [tool for tool in tools if choice.names is None or tool.function.name in choice.names]
    required = choice.mode == "required"
    is_free = len(chosen) == len(tools) and not any(tool.function.strict for tool in chosen)
    if not required and answer is None and several and is_free:
        return None
    if not required and answer is not None and answer.kind != "json":
        raise RequestError(400, f"{answer.field}: with tools and tool_choice auto, it must be JSON.", answer.field)
    grammar = partial(
        tool_calls.calls_grammar,
        required=required,
        several=several and not choice.is_call,
        answer=None if answer is None else answer.value,
        special=special,
        disable_any_whitespace=answer is None or answer.disable_any_whitespace,
        rules=format.call_rules,
        marks=format.marks,
        ends_thought=ends_thought,
    )
    return _Calls("tools", "lark", tuple(chosen), grammar_of=grammar)


@dataclass(frozen=True)
class _Calls(Structure):
    """The structure of an answer that may call these tools, its `value`.

    grammar_of: makes the grammar of their calls.
    """

    grammar_of: Callable[[Sequence[tool_calls.Tool]], str] = field(kw_only=True)

    def compile(self, grammars: Grammars, stop: Stop | None = None) -> CompiledGrammar:
        """See `Structure.compile`."""
        try:
            return self._compile([tool.called() for tool in self.value], grammars, stop)
        except UserError as error:
            called = self._enforceable(grammars, stop)
            try:
                return self._compile(called, grammars, stop)
            except UserError:
                raise RequestError(400, f"tools: {error}", "tools") from None

    def _compile(self, tools: Sequence[tool_calls.Tool], grammars: Grammars, stop: Stop | None) -> CompiledGrammar:
        return grammars.compile("lark", self.grammar_of(tools), stop)

    def _enforceable(self, grammars: Grammars, stop: Stop | None) -> list[tool_calls.Tool]:
        """Return the tools so that their arguments can follow their schemas: free ones, where they need not.

        Raises:
            RequestError: 400, one must that cannot, or too many take too long, while other grammars wait.
        """
        found, costly = [], 0
        for tool in self.value:
            called = tool.called()
            fault = grammars.why_not(called.parameters, stop)
            costly += fault == _TOO_COSTLY
            if fault is not None and (tool.function.strict or costly > _MOST_COSTLY):
                about = f"the schema of the arguments of {called.name} cannot be used"
                way_out = "change it" if costly > _MOST_COSTLY else "change it, or give no strict"
                raise RequestError(400, f"tools: {about} ({fault}); {way_out}.", "tools")
            if fault is not None:
                _tell_of_free(called.name, fault)
                called = tool_calls.Tool(called.name, {"type": "object", "additionalProperties": True})
            found.append(called)
        return found


@lru_cache(maxsize=256)
def _tell_of_free(name: str, fault: str) -> None:
    """Say it in the log, once."""
    _LOGGER.warning("Calls of %s have any arguments, because its schema cannot be enforced (%s).", name, fault)
