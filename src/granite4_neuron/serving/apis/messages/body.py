"""Anthropic's Messages API: its bodies, and how they become a chat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field, model_validator

from granite4_neuron.errors import UserError
from granite4_neuron.serving.apis.chat.protocol import ChatBody, ModelBody, SamplingBody, StopStrings, refusing, role
from granite4_neuron.serving.apis.history import History
from granite4_neuron.serving.apis.kinds import leaving_out, one_of_types, tag, tag_of, text_of_parts
from granite4_neuron.serving.apis.strict import Conflict, Strict
from granite4_neuron.serving.apis.tools import Function, Name, Tool, ToolChoice, arguments_of
from granite4_neuron.serving.apis.unsupported import OF_MESSAGES

Text = Annotated[str, text_of_parts]


_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class TextBlock(Strict):
    type: Literal["text"]
    text: str


class UseBlock(Strict):
    """A call of the model, which may have invented the name."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], BeforeValidator(arguments_of)] = Field({})


class ResultBlock(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""


class ThinkingBlock(Strict):
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
    one_of_types("block", _BLOCKS),
]


def _is_of_service(kind: str) -> bool:
    """Return whether blocks of a type are what a service's own tools left in a history."""
    return kind not in _BLOCKS and kind.endswith(("_tool_use", "_tool_result"))


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Turn(Strict):
    role: Annotated[Literal["user", "assistant", "system"], BeforeValidator(role)]
    content: Annotated[list[Block], FailFast(), leaving_out("block", _is_of_service), BeforeValidator(_blocks)] = Field(
        []
    )

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


class CustomTool(Strict):
    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False

    def of_chat(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


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
        case {"type": "json_schema", "schema": dict()}:
            return value
    raise UserError('it must be {"type": "json_schema", "schema": ...}.')


class OutputConfig(Strict):
    format: Annotated[dict[str, Any] | None, AfterValidator(_format)] = None
    effort: Any = None


class _Chat(ChatBody):
    names: ClassVar[Mapping[str, str]] = {"response_format": "output_config.format"}


class PromptBody(ModelBody):
    """The body of /v1/messages/count_tokens: a conversation that the model is to answer."""

    unsupported = OF_MESSAGES
    messages: Annotated[list[Turn], FailFast()] = Field(min_length=1)
    system: Text | None = None
    tools: Annotated[list[CustomTool], FailFast(), leaving_out("tool", lambda kind: kind != "custom")] = Field([])
    tool_choice: Choice = Choice()
    output_config: OutputConfig = OutputConfig()
    thinking: dict[str, Any] = Field({})

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
        schema, thinking = self.output_config.format, self.thinking.get("type")
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
                reasoning_effort="none" if thinking == "disabled" else self.output_config.effort,
                chat_template_kwargs={"thinking": True} if thinking in ("enabled", "adaptive") else {},
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
