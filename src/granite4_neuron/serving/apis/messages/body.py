"""Anthropic's Messages API: its bodies, and how they become a chat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field, model_validator

from granite4_neuron.errors import UserError
from granite4_neuron.serving.apis.chat.protocol import (
    MAX_MESSAGES,
    ChatBody,
    ModelBody,
    SamplingBody,
    StopStrings,
    refusing,
)
from granite4_neuron.serving.apis.history import History
from granite4_neuron.serving.apis.kinds import only, tag, tag_of, text_of
from granite4_neuron.serving.apis.no_effect import (
    BLOCK_FIELDS_WITHOUT_EFFECT,
    BlockFieldsWithoutEffect,
    CustomToolFieldsWithoutEffect,
    MessagesFieldsWithoutEffect,
    OutputConfigFieldsWithoutEffect,
    ResultFieldsWithoutEffect,
)
from granite4_neuron.serving.apis.strict import Conflict, Strict
from granite4_neuron.serving.apis.tools import MAX_TOOLS, Function, Name, Tool, ToolChoice

Text = Annotated[str, text_of({"text": "text"}, BLOCK_FIELDS_WITHOUT_EFFECT)]


class TextBlock(BlockFieldsWithoutEffect, Strict):
    type: Literal["text"]
    text: str


class UseBlock(BlockFieldsWithoutEffect, Strict):
    """A call of the model."""

    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]


class ResultBlock(ResultFieldsWithoutEffect, BlockFieldsWithoutEffect, Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""


class ThinkingBlock(BlockFieldsWithoutEffect, Strict):
    """Reasoning of the model. Encrypted reasoning is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


Block = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[UseBlock, tag("tool_use")]
    | Annotated[ResultBlock, tag("tool_result")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[ThinkingBlock, tag("redacted_thinking")],
    Discriminator(tag_of),
    only("block", ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")),
]


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], FailFast(), BeforeValidator(_blocks)]

    @model_validator(mode="after")
    def _fits_its_role(self) -> Turn:
        if self.calls and self.role != "assistant":
            raise UserError("only a message of the assistant may have blocks of the type tool_use.")
        if self.role != "user" and any(isinstance(block, ResultBlock) for block in self.content):
            raise UserError("only a message of the user may have blocks of the type tool_result.")
        return self

    @property
    def calls(self) -> bool:
        """Whether it calls tools."""
        return any(isinstance(block, UseBlock) for block in self.content)

    def add_to(self, history: History) -> None:
        """Add its messages to those of a chat."""
        shown = [block for block in self.content if not isinstance(block, ThinkingBlock)]
        for block in self.content:
            if isinstance(block, ThinkingBlock):
                history.think(block.thinking or "")
        if not shown:
            history.say(self.role, "")
        for _, group in groupby(shown, type):
            blocks = list(group)
            if isinstance(blocks[0], TextBlock):
                history.say(self.role, "".join(block.text for block in blocks if isinstance(block, TextBlock)))
            for block in blocks:
                if isinstance(block, UseBlock):
                    history.call(block.id, block.name, block.input)
                elif isinstance(block, ResultBlock):
                    history.answer(block.tool_use_id, block.content)


class CustomTool(CustomToolFieldsWithoutEffect, Strict):
    type: Literal["custom"]
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False

    def of_chat(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


AnyTool = Annotated[CustomTool, only("tool", ("custom",), default="custom")]


class Choice(Strict):
    """A choice of tools."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_a_name(self) -> Choice:
        if (self.name is not None) != (self.type == "tool"):
            raise UserError('a choice of the type "tool", and no other, must have a name.')
        return self

    def of_chat(self) -> ToolChoice:
        if self.name is not None:
            return ToolChoice("required", [self.name], is_call=True)
        return ToolChoice("none" if self.type == "none" else "required" if self.type == "any" else "auto")


def _format(value: Any) -> Any:
    match value:
        case {"type": "json_schema", "schema": dict(), **more} if not more:
            return value
    raise UserError('it must be {"type": "json_schema", "schema": ...}.')


class OutputConfig(OutputConfigFieldsWithoutEffect, Strict):
    format: Annotated[dict[str, Any] | None, AfterValidator(_format)] = None


class _Chat(ChatBody):
    names: ClassVar[Mapping[str, str]] = {"response_format": "output_config.format"}


class PromptBody(MessagesFieldsWithoutEffect, ModelBody):
    """The body of /v1/messages/count_tokens: a conversation that the model is to answer."""

    messages: Annotated[list[Turn], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Text | None = None
    tools: Annotated[list[AnyTool], FailFast()] = Field([], max_length=MAX_TOOLS)
    tool_choice: Choice = Choice()
    output_config: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _can_go_on(self) -> PromptBody:
        if self.messages[-1].role == "assistant" and self.messages[-1].calls:
            raise Conflict("messages", "the last one calls tools; their results must follow.")
        return self

    @cached_property
    def chat(self) -> ChatBody:
        """The chat that it asks for. It goes on with a last message of the assistant, and otherwise answers.

        Raises:
            RequestError: 400, fields contradict each other.
        """
        schema = self.output_config.format
        history = History()
        with refusing(_Chat.names):
            if self.system is not None:
                history.say("system", self.system)
            for turn in self.messages:
                turn.add_to(history)
            return _Chat(
                messages=history.messages(),
                tools=[tool.of_chat() for tool in self.tools],
                tool_choice=self.tool_choice.of_chat(),
                parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
                reasoning_effort="none" if (self.thinking or {}).get("type") == "disabled" else None,
                continue_final_message=self.messages[-1].role == "assistant",
                response_format=schema and {"type": "json_schema", "json_schema": {"schema": schema["schema"]}},
                **self._options(),
            )

    def _options(self) -> dict[str, Any]:
        """Return further fields of the chat."""
        return {}


class MessagesBody(PromptBody, SamplingBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopStrings = Field([])

    def _options(self) -> dict[str, Any]:
        return {**self.sampling_options(), "max_tokens": self.max_tokens, "stop": self.stop_sequences}
