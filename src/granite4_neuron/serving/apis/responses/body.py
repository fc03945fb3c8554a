"""OpenAI's Responses API without stored state: its body, and how that becomes a chat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field

from granite4_neuron.config.json_files import finite
from granite4_neuron.engine.sampling_params import MAX_LOGPROBS
from granite4_neuron.errors import UserError
from granite4_neuron.serving.apis.chat.protocol import (
    ChatBody,
    Message,
    NewTokens,
    SamplingBody,
    StopStrings,
    refusing,
    role,
)
from granite4_neuron.serving.apis.history import History
from granite4_neuron.serving.apis.kinds import leaving_out, one_of_types, tag, tag_of, text_of_parts
from granite4_neuron.serving.apis.strict import Strict, without_nulls
from granite4_neuron.serving.apis.tools import Function, FunctionCall, Tool, ToolChoice
from granite4_neuron.serving.apis.unsupported import OF_RESPONSES

_LOGPROBS = "message.output_text.logprobs"
_CALL, _OUTPUT = "_call", "_call_output"
_STORES_NOTHING = "this server stores no responses"
_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)
_REFERENCE = f"{_STORES_NOTHING}, so that an item_reference refers to nothing; send the item itself (store: false)."


class MessageItem(Strict):
    type: Literal["message"]
    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(role)]
    content: Annotated[str, text_of_parts] = ""


class CallItem(FunctionCall):
    type: Literal["function_call"]
    call_id: str


class CustomCallItem(Strict):
    """A call of a tool whose argument is a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str = ""


class OutputItem(Strict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str, text_of_parts] = ""


class ReasoningItem(Strict):
    """Reasoning of the model. Summaries and encrypted reasoning are left out."""

    type: Literal["reasoning"]
    summary: list[Any] = Field([])
    content: list[Any] = Field([])
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        parts = (part.get("text") for part in self.content if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))


Item = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[CallItem, tag("function_call")]
    | Annotated[CustomCallItem, tag("custom_tool_call")]
    | Annotated[OutputItem, tag("function_call_output")]
    | Annotated[OutputItem, tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, tag("reasoning")],
    Discriminator(tag_of),
    one_of_types("item", _ITEMS, default="message", why={"item_reference": _REFERENCE}),
]


def _is_of_service(kind: str) -> bool:
    """Return whether items of a type are what a service's own tools left in a history."""
    return kind not in _ITEMS and (kind.endswith((_CALL, _OUTPUT)) or kind.startswith(("mcp_", "compaction")))


class FunctionTool(Function):
    type: Literal["function"] = "function"

    def described(self) -> dict[str, Any]:
        """Return it as the response repeats it."""
        return {"type": self.type, **self.model_dump(include=set(Function.model_fields))}

    def of_chat(self) -> Tool:
        function = Function(**self.model_dump(include=set(Function.model_fields)))
        return Tool(type=self.type, function=function)


def _format(value: Any) -> Any:
    _response_format(value)
    return value


def _response_format(value: Any) -> dict[str, Any]:
    """Return the chat's `response_format` for a `text.format`."""
    match value:
        case {"type": "text" | "json_object"}:
            return dict(value)
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    raise UserError(
        'it must be {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "name": ..., "schema": ...}, '
        "where description and strict may be added."
    )


def _tool_choice(value: Any) -> Any:
    _chosen(value)
    return value


def _chosen(value: Any) -> ToolChoice:
    """Return the chat's choice of tools for a `tool_choice`."""
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            if names := [name for name in map(_named, tools) if name is not None]:
                return ToolChoice(mode, list(dict.fromkeys(names)))
        case _:
            if (name := _named(value)) is not None:
                return ToolChoice("required", [name], is_call=True)
    raise UserError(
        'it must be "none", "auto", "required", {"type": "function", "name": ...}, or {"type": "allowed_tools", '
        '"mode": "auto", "tools": [{"type": "function", "name": ...}]}, where the mode may be required.'
    )


def _named(value: Any) -> str | None:
    match value:
        case {"type": "function", "name": str(name)}:
            return name
    return None


def _not_stored(value: Any) -> Any:
    raise UserError(f"{_STORES_NOTHING}; send the whole conversation as input.")


NotStored = Annotated[Any, BeforeValidator(_not_stored)]


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


# What the response repeats, in JSON that has only finite numbers.
Repeated = Annotated[Any, AfterValidator(finite)]


class TextConfig(Strict):
    format: Annotated[dict[str, Any], AfterValidator(finite), AfterValidator(_format)] = Field({"type": "text"})
    verbosity: Repeated = "medium"


class _Chat(ChatBody):
    names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }


class ResponsesBody(SamplingBody):
    """The body of /v1/responses. `stop` is vLLM's addition. The response repeats the fields at the end."""

    unsupported = OF_RESPONSES
    input: Annotated[list[Item], FailFast(), leaving_out("item", _is_of_service), BeforeValidator(_items)] = Field(
        min_length=1
    )
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], FailFast(), leaving_out("tool", lambda kind: kind != "function")] = Field([])
    tool_choice: Annotated[Repeated, AfterValidator(_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: NewTokens = Field(None, ge=1)
    text: TextConfig = TextConfig(format={"type": "text"})
    include: list[str] = Field([])  # most of them are what built-in tools and reasoning models add
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    stop: StopStrings = Field([])
    previous_response_id: NotStored = None
    conversation: NotStored = None
    reasoning: Annotated[dict[str, Any], AfterValidator(finite), AfterValidator(without_nulls)] = Field({})
    max_tool_calls: Repeated = None  # of built-in tools
    metadata: Repeated = None
    prompt_cache_key: Repeated = None
    safety_identifier: Repeated = None
    user: Repeated = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in self.include

    @cached_property
    def chat(self) -> ChatBody:
        """The chat that it asks for.

        Raises:
            RequestError: 400, fields contradict each other.
        """
        with refusing(_Chat.names):
            return _Chat(
                **self.sampling_options(),
                messages=self._messages(),
                tools=[tool.of_chat() for tool in self.tools],
                tool_choice=_chosen(self.tool_choice),
                parallel_tool_calls=self.parallel_tool_calls,
                reasoning_effort=self.reasoning.get("effort"),
                max_tokens=self.max_output_tokens,
                response_format=_response_format(self.text.format),
                logprobs=self.wants_logprobs,
                top_logprobs=self.top_logprobs if self.wants_logprobs else None,
                stop=self.stop,
            )

    def _messages(self) -> list[Message]:
        history = History()
        if self.instructions is not None:
            history.say("system", self.instructions)
        for item in self.input:
            if isinstance(item, MessageItem):
                history.say(item.role, item.content)
            elif isinstance(item, CallItem):
                history.call(item.call_id, item.name, item.arguments)
            elif isinstance(item, CustomCallItem):
                history.call(item.call_id, item.name, {"input": item.input})
            elif isinstance(item, OutputItem):
                history.answer(item.call_id, item.output)
            else:
                history.think(item.text)
        return history.messages()
