"""Fields of a body that change no text. Clients send them, so they are accepted."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator

from granite4_neuron.errors import UserError


def only(*allowed: Any) -> BeforeValidator:
    """Return the validator of a field that may be one of these values, which say what the server does anyway."""

    def check(value: Any) -> Any:
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            raise UserError(f"this server supports only {' or '.join(map(json.dumps, allowed))}.")
        return value

    return BeforeValidator(check)


class FieldsWithoutEffect(BaseModel):
    """Fields of both kinds of requests: OpenAI's, vLLM's and llama-server's."""

    # For the operator of a service.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    # The prefix cache changes no text, and is there anyway.
    cache_prompt: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Of one server: a slot, and the id that the header x-request-id has here.
    id_slot: int | None = None
    request_id: str | None = None
    store: Annotated[Any, only(False)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1)] = None  # of a beam search
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    return_tokens_as_token_ids: Annotated[Any, only(False)] = None
    truncation_side: Annotated[Any, only("left")] = None
    # Samplers of llama-server, switched off.
    typical_p: Annotated[Any, only(1)] = None
    dynatemp_range: Annotated[Any, only(0)] = None
    xtc_probability: Annotated[Any, only(0)] = None
    dry_multiplier: Annotated[Any, only(0)] = None
    mirostat: Annotated[Any, only(0)] = None
    repeat_penalty: Annotated[Any, only(1)] = None


class ChatFieldsWithoutEffect(FieldsWithoutEffect):
    """Fields of chats."""

    # Thoughts are not of different lengths, and are always shown. But none switches them off; so do "disabled" and none
    # in the fields `thinking` and `reasoning` of the other APIs.
    reasoning_effort: Annotated[Any, only("none", "minimal", "low", "medium", "high", "xhigh")] = None
    include_reasoning: bool | None = None
    reasoning_format: str | None = None
    modalities: Annotated[Any, only(["text"])] = None
    verbosity: Annotated[Any, only("medium")] = None
    echo: Annotated[Any, only(False)] = None
    add_special_tokens: Annotated[Any, only(False)] = None


# Fields that messages of a history have from other servers' answers. The family's templates write none of them.


class MessageFieldsWithoutEffect(BaseModel):
    """Fields of messages."""

    name: str | None = None
    annotations: list[Any] | None = None  # OpenAI's: the sources of an answer
    cache_control: dict[str, Any] | None = None  # Anthropic's


class ToolCallFieldsWithoutEffect(BaseModel):
    """Fields of the calls in a message."""

    index: int | None = None  # of a stream


class ToolFieldsWithoutEffect(BaseModel):
    """Fields of tools."""

    cache_control: dict[str, Any] | None = None


# Fields of the parts of a message's content.
PART_FIELDS_WITHOUT_EFFECT = frozenset({"cache_control"})


class ResponsesFieldsWithoutEffect(FieldsWithoutEffect):
    """Fields of the Responses API."""

    store: bool | None = None  # nothing is stored, as the response says
    background: Annotated[Any, only(False)] = None
    truncation: Annotated[Any, only("disabled")] = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # of built-in tools
    prompt_cache_options: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None


class TextConfigFieldsWithoutEffect(BaseModel):
    """Fields of `text`."""

    verbosity: Annotated[Any, only("medium")] = None


class ItemFieldsWithoutEffect(BaseModel):
    """Fields of items."""

    id: str | None = None
    status: str | None = None
    phase: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class FunctionFieldsWithoutEffect(BaseModel):
    """Fields of functions."""

    allowed_callers: Annotated[Any, only(["direct"])] = None
    defer_loading: Annotated[Any, only(False)] = None
    output_schema: dict[str, Any] | None = None


# Fields of parts of items.
CONTENT_FIELDS_WITHOUT_EFFECT = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})


class MessagesFieldsWithoutEffect(BaseModel):
    """Fields of Anthropic's Messages API."""

    cache_control: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    speed: Annotated[Any, only("standard")] = None
    thinking: dict[str, Any] | None = None
    user_profile_id: str | None = None


class OutputConfigFieldsWithoutEffect(BaseModel):
    """Fields of `output_config`."""

    effort: str | None = None


class CustomToolFieldsWithoutEffect(ToolFieldsWithoutEffect):
    """Fields of tools."""

    allowed_callers: Annotated[Any, only(["direct"])] = None
    defer_loading: Annotated[Any, only(False)] = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class BlockFieldsWithoutEffect(BaseModel):
    """Fields of blocks."""

    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None
    caller: dict[str, Any] | None = None


class ResultFieldsWithoutEffect(BaseModel):
    """Fields of results of tools."""

    is_error: bool | None = None  # the templates have no place for it; the result says it


# Fields of texts in a system prompt or in a result.
BLOCK_FIELDS_WITHOUT_EFFECT = frozenset(BlockFieldsWithoutEffect.model_fields)


class CompletionFieldsWithoutEffect(FieldsWithoutEffect):
    """Fields of completions."""

    suffix: Annotated[Any, only("")] = None
