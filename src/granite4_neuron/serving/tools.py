"""Tools in a request: their fields, how the chat template gets them, and the grammar of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from granite4_neuron.errors import UserError
from granite4_neuron.generation import tool_calls
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.serving.strict import Strict
from granite4_neuron.serving.structured import Structure

MAX_TOOLS = 128
MAX_DOCUMENTS = 1024

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _arguments(value: Any) -> dict[str, Any]:
    try:
        arguments = from_json(value) if isinstance(value, str) else None
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


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def described(self) -> dict[str, Any]:
        """Return it as the chat template shows it to the model: what the client gave, without `strict`."""
        given = self.function
        parts = dict(name=given.name, description=given.description, parameters=given.parameters)
        return {"type": self.type, "function": {name: part for name, part in parts.items() if part is not None}}


class FunctionCall(Strict):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def structure_of_calls(
    tools: Sequence[Tool], choice: ToolChoice, several: bool, answer: Structure | None, special: bool
) -> Structure | None:
    """Return what an answer with tools must follow; None for any text, in which calls may be malformed.

    Args:
        several: whether there may be several calls.
        answer: what the answer must follow if it calls nothing.
        special: see `calls_grammar`.

    Raises:
        RequestError: 400, the answer would have to follow something else than a JSON schema or be a call.
    """
    named = choice.function.name if isinstance(choice, NamedTool) else None
    chosen = [tool.function for tool in tools if named in (None, tool.function.name)]
    required = choice != "auto"
    if not required and answer is None and several and not any(function.strict for function in chosen):
        return None
    if not required and answer is not None and answer.kind != "json":
        raise RequestError(400, f"{answer.field}: with tools and tool_choice auto, it must be JSON.", answer.field)
    grammar = tool_calls.calls_grammar(
        [tool_calls.Tool(function.name, function.parameters or {"type": "object"}) for function in chosen],
        required=required,
        several=several and named is None,
        answer=None if answer is None else answer.value,
        special=special,
    )
    return Structure("tools", "lark", grammar)
