"""The answers of OpenAI's Responses API: a list of output items, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from granite4_neuron.engine import Output, Request, TokenLogprob
from granite4_neuron.serving.apis.blocks import Begin, Block, Blocks, Change, Delta, End
from granite4_neuron.serving.apis.chat.answers import Answer, Event, TokenTexts
from granite4_neuron.serving.apis.identity import new_id, now
from granite4_neuron.serving.apis.responses.body import ResponsesBody
from granite4_neuron.serving.errors import RequestError


class ResponsesAnswer(Answer):
    """The response of /v1/responses, which is one sequence."""

    def __init__(self, texts: TokenTexts, model: str, requests: Sequence[Request], body: ResponsesBody):
        super().__init__(texts, model, requests)
        [request] = requests
        self._body = body
        self._blocks = Blocks(texts.answer_stream(request, body.chat.tools_to_call))
        self._id = f"resp_{new_id()}"
        self._created = now()
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        [outputs] = self._outputs
        for _ in self._blocks.add(outputs):
            pass
        return self._ended()

    def events(self, index: int, outputs: Sequence[Output]) -> Iterator[Event]:
        if len(outputs) == len(self._outputs[index]):
            yield from self._begun()
        for change in self._blocks.add(outputs):
            yield from self._of_text(change) if change.block.tool is None else self._of_call(change)

    def last_events(self) -> Iterator[Event]:
        response = self._ended()
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: RequestError) -> Iterator[Event]:
        if not self._num_events:
            yield from self._begun()  # OpenAI's client reads nothing before it
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        yield self._event(
            "response.failed", response=self._response("failed", error={"code": code, "message": error.message})
        )

    def _begun(self) -> Iterator[Event]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def _of_text(self, change: Change) -> Iterator[Event]:
        """Yield the events of a text or a thought."""
        block = change.block
        kind = _kind(block)
        place = {"item_id": _item_id(block), "output_index": block.index, "content_index": 0}
        match change:
            case Begin():
                yield self._item_event("added", block, {**self._item(block), "content": []})
                yield self._event("response.content_part.added", **place, part=self._part(block))
            case Delta():
                logprobs = {} if block.is_thought else {"logprobs": self._logprobs(change.logprobs)}
                yield self._event(f"response.{kind}.delta", **place, delta=change.text, **logprobs)
            case End():
                part = self._part(block)
                said = {name: part[name] for name in ("text", "logprobs") if name in part}
                yield self._event(f"response.{kind}.done", **place, **said)
                yield self._event("response.content_part.done", **place, part=part)
                yield self._item_event("done", block, self._item(block))

    def _of_call(self, change: Change) -> Iterator[Event]:
        block = change.block
        place = {"item_id": _item_id(block), "output_index": block.index}
        match change:
            case Begin():
                yield self._item_event("added", block, self._item(block))
            case Delta():
                yield self._event("response.function_call_arguments.delta", **place, delta=change.text)
            case End():
                said = {"name": block.tool, "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **place, **said)
                yield self._item_event("done", block, self._item(block))

    def _item_event(self, what: str, block: Block, item: Mapping[str, Any]) -> Event:
        return self._event(f"response.output_item.{what}", output_index=block.index, item=item)

    def _event(self, kind: str, **data: Any) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return Event({"type": kind, "sequence_number": number, **data}, kind)

    def _ended(self) -> dict[str, Any]:
        """Return the response with its usage, once the sequence has ended."""
        counted = self.usage()
        usage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._blocks.thought_tokens},
            "total_tokens": counted["total_tokens"],
        }
        if self.finish_reasons() == ["length"]:
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=usage)
        return self._response("completed", completed_at=now(), usage=usage)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(map(self._item, self._blocks.found)),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.text.format, "verbosity": body.text.verbosity},
            "tool_choice": body.tool_choice,
            "tools": [tool.described() for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **more,
        }

    def _item(self, block: Block) -> dict[str, Any]:
        status = "incomplete" if block.is_cut else "completed" if block.has_ended else "in_progress"
        head = {"id": _item_id(block), "status": status}
        if block.is_thought:
            return {**head, "type": "reasoning", "summary": [], "content": [self._part(block)]}
        if block.tool is None:
            return {**head, "type": "message", "role": "assistant", "content": [self._part(block)]}
        call = {"call_id": f"call_{block.id[:24]}", "name": block.tool, "arguments": block.text}
        return {**head, "type": "function_call", **call}

    def _part(self, block: Block) -> dict[str, Any]:
        part = {"type": _kind(block), "text": block.text}
        return part if block.is_thought else {**part, "annotations": [], "logprobs": self._logprobs(block.logprobs)}

    def _logprobs(self, reports: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {
                **self._token(report.token, report.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in report.top],
            }
            for report in reports
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "bytes": self._texts.bytes(token) or [], "logprob": logprob}


def _kind(block: Block) -> str:
    return "reasoning_text" if block.is_thought else "output_text"


def _item_id(block: Block) -> str:
    return f"{'rs' if block.is_thought else 'msg' if block.tool is None else 'fc'}_{block.id}"
