"""The bodies of requests: the supported fields of OpenAI's API, and a few of vLLM's.

Unknown fields are ignored, but for those in `unsupported`. A null field counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from granite4_neuron.engine.sampling_params import MAX_LOGPROBS, SAMPLING_OPTIONS, is_whole
from granite4_neuron.errors import UserError
from granite4_neuron.generation import tool_calls
from granite4_neuron.serving.apis.kinds import is_tag, text_of_parts
from granite4_neuron.serving.apis.strict import Conflict, Ignored, Strict
from granite4_neuron.serving.apis.tools import MAX_DOCUMENTS, Tool, ToolCall, ToolChoice, ToolChoiceField, Tools
from granite4_neuron.serving.apis.unsupported import OF_CHAT_MESSAGES, OF_CHATS, OF_COMPLETIONS
from granite4_neuron.serving.errors import RequestError

MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 128
MAX_STOP_LENGTH = 1000  # characters
MAX_BAD_WORDS = 128
MAX_SALT_LENGTH = 1024  # characters
MAX_PARTS = 2**16  # lists, objects, names and texts of a body

AS_MANY_AS_FIT = -1  # llama-server's word for no limit of new tokens
ALL_THAT_FIT = -1  # vLLM's word for as many of a prompt's tokens as fit

TextOrTokens = str | list[int]


def _for_minus_one(meaning: int | None) -> BeforeValidator:
    """Return a validator that reads -1 as what other servers mean by it."""
    return BeforeValidator(lambda value: meaning if is_whole(value) and value == -1 else value)


NewTokens = Annotated[int | None, _for_minus_one(None)]


def _truncation(value: Any) -> Any:
    if is_whole(value) and (value < ALL_THAT_FIT or value == 0):
        raise UserError(f"it must be a number of tokens of at least 1, or {ALL_THAT_FIT} for as many as fit.")
    return value


BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    is_right = (
        isinstance(texts, list)
        and len(texts) <= MAX_STOP_STRINGS
        and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in texts)
    )
    if not is_right:
        raise UserError(
            f"it must be a string or a list of up to {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_LENGTH} characters."
        )
    return texts


StopStrings = Annotated[list[str], BeforeValidator(_stop)]


def _prompts(value: Any) -> list[TextOrTokens]:
    several = value if isinstance(value, list) and not _is_prompt(value) else [value]
    if not several or not all(map(_is_prompt, several)):
        raise UserError("it must be a string, token ids, or a non-empty list of either.")
    return several


def _is_prompt(value: Any) -> bool:
    is_tokens = isinstance(value, list) and all(map(is_whole, value))
    return bool(value) and (isinstance(value, str) or is_tokens)


# Other names of roles: OpenAI's newer and older ones, and two of agents.
_ROLES = {"developer": "system", "function": "tool", "ctx": "user", "msg": "user"}


def role(value: Any) -> Any:
    """Return the role that another name of it means."""
    return _ROLES.get(value, value) if isinstance(value, str) else value


def _thought(value: Any) -> str | None:
    return value if isinstance(value, str) else None  # other servers have objects there


Thought = Annotated[str | None, BeforeValidator(_thought)]


def _logit_bias(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES or not all(map(_is_token_id, value)):
        raise UserError(f"it must be an object of numbers by token id, {MAX_BIASES} at most.")
    biases = {int(name): bias for name, bias in value.items()}
    for token, bias in biases.items():  # one by one, so that the message names the wrong one
        SAMPLING_OPTIONS["logit_bias"].check("logit_bias", {token: bias})
    return biases


def _is_token_id(name: str | int) -> bool:
    return isinstance(name, int) or (name.isascii() and name.isdecimal() and len(name) < 20)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(Strict):
    unsupported = OF_CHAT_MESSAGES
    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(role)]
    content: Annotated[str, text_of_parts] = ""
    tool_calls: Annotated[list[ToolCall], FailFast()] = Field([])
    tool_call_id: str | None = None
    reasoning_content: Thought = None  # llama-server's, and vLLM's older name
    reasoning: Thought = None  # vLLM's

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if "content" not in self.model_fields_set and self.role in ("system", "user"):
            raise UserError(f"a message of the role {self.role} must have a content.")
        if self.tool_calls and self.role != "assistant":
            raise UserError("only an assistant's message may have tool_calls.")
        return self

    def described(self) -> dict[str, Any]:
        """Return it as the chat template gets it."""
        more = {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        calls = {"tool_calls": [call.described() for call in self.tool_calls]} if self.tool_calls else {}
        thought = self.reasoning_content or self.reasoning
        thoughts = {"reasoning_content": thought} if thought and self.role == "assistant" else {}
        return {"role": self.role, "content": self.content, **thoughts, **calls, **more}


class ConversationBody(Strict):
    """A conversation, and how it becomes a prompt.

    names: of fields in the body that the client sent, by their names here, where they differ.
    """

    names: ClassVar[Mapping[str, str]] = {}
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    tools: Tools = Field([])
    documents: Annotated[list[dict[str, Any]], FailFast()] = Field([], max_length=MAX_DOCUMENTS)
    chat_template_kwargs: dict[str, Any] = Field({})
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> ConversationBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise Conflict(
                "continue_final_message", "it goes on with the last message, and add_generation_prompt with a new one."
            )
        return self

    def called(self, field: str) -> str:
        """Return what the client calls a field."""
        return self.names.get(field, field)

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the chat template gets."""
        return self.tools

    @property
    def must_be_shown(self) -> list[str]:
        """Which of tools and documents the body has; a chat template that does not show them would ignore them."""
        return [name for name in ("tools", "documents") if getattr(self, name)]

    def template_variables(self) -> dict[str, Any]:
        """Return what the chat template gets, as arguments of `ConversationEncoder.encode`."""
        begins_answer = self.add_generation_prompt
        return dict(
            messages=[message.described() for message in self.messages],
            tools=[tool.described() for tool in self.shown_tools] or None,
            documents=self.documents or None,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=not self.continue_final_message if begins_answer is None else begins_answer,
            continue_final_message=self.continue_final_message,
        )


class ModelBody(Strict):
    """A body that may name the model."""

    model: str | None = None


class SamplingBody(ModelBody):
    """The fields of all requests for texts. The sampling options among them have the names of `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, _for_minus_one(0)] = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] = Field({})
    seed: Annotated[int | None, _for_minus_one(None)] = None
    stop_token_ids: Annotated[list[int], FailFast()] = Field([], max_length=MAX_STOP_TOKENS)
    min_tokens: int | None = None
    ignore_eos: bool = False
    stream: bool = False

    # Biases have been checked, and a chat's logprobs is a boolean.
    @field_validator(*(SAMPLING_OPTIONS.keys() - {"logit_bias", "logprobs"}), check_fields=False)
    @classmethod
    def _check_sampling_option(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None  # it validates fields
        if value is not None:
            SAMPLING_OPTIONS[info.field_name].check(info.field_name, value)
        return value

    def sampling_options(self) -> dict[str, Any]:
        """Return what is given of these fields, as arguments of another body."""
        return self.model_dump(include=set(SamplingBody.model_fields), exclude_unset=True)


class GenerationBody(SamplingBody):
    """The fields of completions and chats."""

    max_tokens: NewTokens = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: StopStrings = Field([])
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    truncate_prompt_tokens: Annotated[int | None, BeforeValidator(_truncation)] = None
    priority: int = 0
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_LENGTH)
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    timings_per_token: bool = False
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True)
    bad_words: Annotated[list[BadWord], FailFast()] = Field([], max_length=MAX_BAD_WORDS)
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _what_only_a_stream_has(self) -> GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise Conflict("prompt_logprobs", "it is not for stream: true.")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of top tokens to find for each token of the prompt; None for no log-probabilities of these."""
        return self.prompt_logprobs

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every event of the stream has the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class CompletionBody(GenerationBody):
    """The body of /v1/completions.

    add_special_tokens: whether the tokenizer adds its special tokens to a text.
    split_special_tokens: whether the spelling of a control token in a text is ordinary text.
    """

    unsupported = OF_COMPLETIONS
    prompt: Annotated[list[TextOrTokens], BeforeValidator(_prompts)]
    max_tokens: int | None = Field(None, ge=AS_MANY_AS_FIT)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    add_special_tokens: bool = True
    split_special_tokens: bool = False

    @model_validator(mode="after")
    def _something_is_asked_for(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise Conflict("best_of", "it must be equal to n: this server returns all texts that it generates.")
        if self.max_tokens == 0 and not self.echo:
            raise Conflict("max_tokens", "it may be 0 only with echo: true.")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """The number of top tokens to report with each token; None for no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """See `GenerationBody.num_prompt_logprobs`. An echo has those of the prompt too."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs


class ChatBody(ConversationBody, GenerationBody):
    """The body of /v1/chat/completions, and what the bodies of other APIs' chats are turned into.

    reasoning_effort: for templates that know it; see `template_variables`. Thoughts are always shown.
    """

    unsupported = OF_CHATS
    reasoning_effort: Any = None
    tool_choice: ToolChoiceField = ToolChoice("auto")
    parallel_tool_calls: bool = True
    max_completion_tokens: NewTokens = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _fit_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise Conflict("top_logprobs", "it is only for logprobs: true.")
        self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise Conflict("tools", "each must have a name of its own.")
        if self.tool_choice.mode == "required" and not names:
            raise Conflict("tool_choice", "it needs tools that are functions; this server has none of its own.")
        for name in self.tool_choice.names or ():
            if name not in names:
                raise Conflict("tool_choice", f"there is no tool {name} in tools.")

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may have calls of tools."""
        return bool(self.tools) and self.tool_choice.mode != "none"

    @property
    def tools_to_call(self) -> list[tool_calls.Tool] | None:
        """The tools that the answer may call; None if it may not call any."""
        return [tool.called() for tool in self.tools] if self.may_call_tools else None

    @property
    def shown_tools(self) -> list[Tool]:
        """See `ConversationBody.shown_tools`."""
        return self.tools if self.may_call_tools else []

    def template_variables(self) -> dict[str, Any]:
        """See `ConversationBody.template_variables`. Some templates have other names for efforts: `enable_thinking`
        switches thoughts off, and `thinking`, which is Granite 3's, switches them on.
        """
        variables = super().template_variables()
        if self.reasoning_effort == "none":
            variables["chat_template_kwargs"] = {"enable_thinking": False, **self.chat_template_kwargs}
        elif isinstance(self.reasoning_effort, str):
            known = {"reasoning_effort": self.reasoning_effort, "thinking": True}
            variables["chat_template_kwargs"] = {**known, **self.chat_template_kwargs}
        return variables

    @property
    def must_be_shown(self) -> list[str]:
        """See `ConversationBody.must_be_shown`. A grammar enforces required calls."""
        is_free = self.tool_choice.mode == "auto"
        return [name for name in super().must_be_shown if name != "tools" or is_free]

    @property
    def num_logprobs(self) -> int | None:
        """See `CompletionBody.num_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(ConversationBody, ModelBody):
    """The body of /tokenize, as vLLM's: a text, with `CompletionBody`'s options, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field([], min_length=1)
    add_special_tokens: bool | None = None
    split_special_tokens: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> TokenizeBody:
        if (self.prompt is None) != bool(self.messages):
            raise Conflict("prompt", "give either a prompt or messages.")
        if self.messages and self.add_special_tokens:
            raise Conflict("add_special_tokens", "it is only for a prompt.")
        return self


class DetokenizeBody(ModelBody):
    """The body of /detokenize, as vLLM's."""

    tokens: Annotated[list[int], FailFast()]


class MarkdownBody(Strict):
    """The body of /page/markdown, which is for the page only."""

    text: str


AnyBody = TypeVar("AnyBody", bound=Strict)
Body = TypeVar("Body", bound=ModelBody)


def parse(kind: type[AnyBody], body: bytes, max_token_ids: int, ignored: Ignored | None = None) -> AnyBody:
    """Parse the body of a request.

    Args:
        max_token_ids: how many token ids it may have.
        ignored: gets the names of what changes nothing.

    Raises:
        RequestError: 400, the body is not JSON or has too many parts, or a field is wrong or not supported; the message
            names it.
    """
    _check_parts(body, max_token_ids)
    with refusing():
        return kind.model_validate_json(body, context=ignored)


@contextmanager
def refusing(names: Mapping[str, str] = {}) -> Iterator[None]:
    """Turn the error of a body that is wrong into its refusal.

    Args:
        names: of the body's fields, where the client calls them otherwise.

    Raises:
        RequestError: 400, a field is wrong or not supported; the message names it.
    """
    try:
        yield
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)[0], names) from None


def _check_parts(body: bytes, max_token_ids: int) -> None:
    """Refuse very many parts before they are parsed, because the parser lets no other thread run; and what the parser
    takes, but is not JSON.

    Raises:
        RequestError: 400, there are too many, or the body is not JSON.
    """
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")  # all quotes that are left begin or end a text
    parts = body.count(b'"') // 2
    if parts <= MAX_PARTS:
        body = b"".join(body.split(b'"')[::2])  # the parts outside of texts
        parts += body.count(b"[") + body.count(b"{")
        if b"N" in body or b"I" in body:
            raise RequestError(400, "the body is not JSON (NaN and Infinity are not in JSON).")
    if parts > MAX_PARTS or body.count(b",") > MAX_PARTS + max_token_ids:
        raise RequestError(
            400, f"the body has over {MAX_PARTS} lists, objects, names and texts, or over {max_token_ids} token ids."
        )


def _refusal(error: ErrorDetails, names: Mapping[str, str]) -> RequestError:
    shown = [place for place in error["loc"] if not is_tag(place)]
    reason = error.get("ctx", {}).get("error")
    message = error["msg"].rstrip(".") + "."
    if isinstance(reason, Conflict):
        shown, message = [*shown, reason.args[0]], reason.args[1]
    elif isinstance(reason, UserError):
        message = str(reason)
    first, *rest = map(str, shown or [""])
    field = ".".join([names.get(first, first), *rest]) or None
    if field is None:
        return RequestError(400, f"the body is not a request in JSON ({message.rstrip('.')}).")
    if message.startswith(f"{field} is "):
        return RequestError(400, message, field)
    return RequestError(400, f"{field}: {message[0].lower()}{message[1:]}", field)
