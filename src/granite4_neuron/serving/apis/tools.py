"""Tools in a request: their fields, how the chat template gets them, and the grammar of calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import from_json

from granite4_neuron.errors import UserError
from granite4_neuron.generation import tool_calls
from granite4_neuron.generation.answer_formats import AnswerFormat
from granite4_neuron.serving.apis.no_effect import ToolCallFieldsWithoutEffect, ToolFieldsWithoutEffect
from granite4_neuron.serving.apis.strict import Strict
from granite4_neuron.serving.apis.structured import Structure
from granite4_neuron.serving.errors import RequestError

MAX_TOOLS = 128
MAX_DOCUMENTS = 1024

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _arguments(value: Any) -> dict[str, Any]:
    try:
        arguments = from_json(value or "{}") if isinstance(value, str) else value
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError("it must be a text with an object in JSON.")
    return arguments


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(ToolFieldsWithoutEffect, Strict):
    type: Literal["function"]
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


class FunctionCall(Strict):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = Field({})


class ToolCall(ToolCallFieldsWithoutEffect, Strict):
    id: str
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
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}} if value == _reference(name):
            return ToolChoice("required", [name], is_call=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            names = [name for name in map(_referred, tools) if name is not None]
            if names and value == _allowed_tools(mode, names):
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
    grammar = tool_calls.calls_grammar(
        [tool.called() for tool in chosen],
        required=required,
        several=several and not choice.is_call,
        answer=None if answer is None else answer.value,
        special=special,
        disable_any_whitespace=answer is None or answer.disable_any_whitespace,
        rules=format.call_rules,
        ends_thought=ends_thought,
    )
    return Structure("tools", "lark", grammar)
