"""The answers of Anthropic's Messages API: a list of blocks, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from granite4_neuron.engine import Output, Request
from granite4_neuron.serving.apis.blocks import Begin, Block, Blocks, Change, Delta
from granite4_neuron.serving.apis.chat.answers import Answer, Event, TokenTexts
from granite4_neuron.serving.apis.identity import new_id
from granite4_neuron.serving.apis.messages.body import MessagesBody
from granite4_neuron.serving.apis.tools import arguments_of
from granite4_neuron.serving.errors import RequestError


class MessagesAnswer(Answer):
    """The response of /v1/messages, which is one sequence."""

    def __init__(self, texts: TokenTexts, model: str, requests: Sequence[Request], body: MessagesBody):
        super().__init__(texts, model, requests)
        [request] = requests
        self._blocks = Blocks(texts.answer_stream(request, body.chat.tools_to_call))
        longest = len(request.tokens) + request.max_tokens
        self._is_cut = request.max_tokens < body.max_tokens and longest == texts.max_length
        self._id = f"msg_{new_id()}"

    pause = 'event: ping\ndata: {"type": "ping"}\n\n'

    def whole(self) -> dict[str, Any]:
        [outputs] = self._outputs
        for _ in self._blocks.add(outputs):
            pass
        return {**self._begun(), "content": list(map(_whole, self._blocks.found)), **self._stop()}

    def events(self, index: int, outputs: Sequence[Output]) -> Iterator[Event]:
        if len(outputs) == len(self._outputs[index]):
            yield _event("message_start", message=self._begun())
        for change in self._blocks.add(outputs):
            yield _of_change(change)

    def last_events(self) -> Iterator[Event]:
        yield _event("message_delta", delta=self._stop(), usage=self._usage_object())
        yield _event("message_stop")

    def failure(self, error: RequestError) -> Iterator[Event]:
        yield Event(error.body_of_messages, "error")

    def _begun(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage_object(),
        }

    def _usage_object(self) -> dict[str, Any]:
        counted = self.usage()
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counted["completion_tokens"],
            "service_tier": "standard",
        }

    def _stop(self) -> dict[str, Any]:
        [[*_, last]] = self._outputs
        if last.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._is_cut else "max_tokens"
        elif last.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._blocks.have_call else "end_turn"
        return {"stop_reason": reason, "stop_sequence": last.stop_string}


def _whole(block: Block) -> dict[str, Any]:
    """Return a block of a whole answer. The input of a call has the arguments that are complete, and is empty if they
    are not JSON. A stream sends them as the model wrote them.
    """
    if block.is_thought:
        return {**_begun(block), "thinking": block.text}
    if block.tool is None:
        return {**_begun(block), "text": block.text}
    return {**_begun(block), "input": arguments_of(block.text)}  # as Anthropic's client reads a stream


def _begun(block: Block) -> dict[str, Any]:
    if block.is_thought:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.tool is None:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": f"toolu_{block.id[:24]}", "name": block.tool, "input": {}}


def _of_change(change: Change) -> Event:
    index = change.block.index
    if isinstance(change, Begin):
        return _event("content_block_start", index=index, content_block=_begun(change.block))
    if isinstance(change, Delta):
        kind, field = _delta(change.block)
        return _event("content_block_delta", index=index, delta={"type": kind, field: change.text})
    return _event("content_block_stop", index=index)


def _delta(block: Block) -> tuple[str, str]:
    """Return the type of a block's deltas, and their field."""
    if block.is_thought:
        return "thinking_delta", "thinking"
    return ("text_delta", "text") if block.tool is None else ("input_json_delta", "partial_json")


def _event(kind: str, **data: Any) -> Event:
    return Event({"type": kind, **data}, kind)
