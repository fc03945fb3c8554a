"""Turns the engine's outputs into responses, whole or as events: those of OpenAI's completions and chats."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from granite4_neuron.engine import Output, PromptReport, Request, TokenLogprob
from granite4_neuron.generation.answer_formats import AnswerStream, answer_format
from granite4_neuron.generation.tool_calls import Tool
from granite4_neuron.serving.apis.chat.additions import Additions
from granite4_neuron.serving.apis.chat.protocol import ChatBody, CompletionBody, GenerationBody
from granite4_neuron.serving.apis.chat.tool_answers import CallsOfAnswer
from granite4_neuron.serving.apis.identity import new_id, now
from granite4_neuron.serving.errors import RequestError, to_json
from granite4_neuron.serving.text_times import TextTimes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # by their spelling in a vocabulary
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # and in another kind of vocabulary


class TokenTexts:
    """The text of single tokens.

    format: of answers.
    max_length: the most tokens of a text with its prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_length: int):
        self.max_length = max_length
        self._tokenizer = tokenizer.backend_tokenizer
        self.format = answer_format(tokenizer)
        self.text = functools.cache(self._text)

    def answer_stream(self, request: Request, tools: Sequence[Tool] | None) -> AnswerStream:
        """Return what finds the pieces of an answer to a chat; see `AnswerFormat.stream`."""
        return self.format.stream(tools, self.format.is_thinking_after(request.tokens, self._tokenizer))

    def _text(self, token: int) -> str:
        """Return the token's text; of one that is no whole characters its bytes with escapes, as OpenAI has them."""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if text and _REPLACEMENT not in text:
            return text
        if found := self.bytes(token):
            return "".join(f"\\x{byte:02x}" for byte in found)
        return self._tokenizer.id_to_token(token) or f"token_id:{token}"

    def texts(self, tokens: Sequence[int]) -> str:
        """Return the text of several tokens together."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def names(self, tokens: Sequence[int]) -> list[str | None]:
        """Return the spelling of each token in the vocabulary; None for one that it does not have."""
        return [self._tokenizer.id_to_token(token) for token in tokens]

    def bytes(self, token: int) -> list[int] | None:
        """Return the token's text in UTF-8, which may be a part of a character; None if it is unknown."""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return list(text.encode())
        spelled = self._tokenizer.id_to_token(token) or ""
        if byte := _FALLBACK.fullmatch(spelled):
            return [int(byte[1], 16)]
        found = [_BYTES.get(character) for character in spelled]
        return None if None in found else [byte for byte in found if byte is not None]


@dataclass(frozen=True)
class Event:
    """A server-sent event.

    data: a string as it is, or what becomes JSON.
    name: None for none.
    """

    data: str | Mapping[str, Any]
    name: str | None = None

    def __str__(self) -> str:
        return self.text(to_json)

    def text(self, encode: Callable[[object], str]) -> str:
        """Return what is sent."""
        name = "" if self.name is None else f"event: {self.name}\n"
        return f"{name}data: {self.data if isinstance(self.data, str) else encode(self.data)}\n\n"


class Answer(ABC):
    """The response to one request, whole or as a stream of events, from the outputs of its sequences.

    Attributes:
        pause: what a stream says in which nothing happens for a while.
        times: of each sequence that has begun, if whoever runs them notes them here.

    Args:
        texts: the text of the model's tokens.
        model: the model's name.
        requests: the sequences, `choices` for each prompt.
        choices: number of choices per prompt.
    """

    pause = ":\n\n"  # a comment

    def __init__(self, texts: TokenTexts, model: str, requests: Sequence[Request], choices: int = 1):
        self._texts = texts
        self._model = model
        self._requests = requests
        self.choices = choices
        self.times: dict[int, TextTimes] = {}
        self._outputs: list[list[Output]] = [[] for _ in requests]

    def add(self, index: int, outputs: Sequence[Output]) -> None:
        """Add new outputs of a sequence."""
        self._outputs[index] += outputs

    @abstractmethod
    def whole(self) -> Mapping[str, Any]:
        """Return the whole response, once all sequences have ended."""

    @abstractmethod
    def events(self, index: int, outputs: Sequence[Output]) -> Iterator[Event]:
        """Yield the events for new outputs of a sequence, which have been added."""

    @abstractmethod
    def last_events(self) -> Iterator[Event]:
        """Yield the events behind all others."""

    @abstractmethod
    def failure(self, error: RequestError) -> Iterator[Event]:
        """Yield the events behind all others of a stream that fails; its headers have been sent."""

    def usage(self) -> dict[str, Any]:
        """Return the usage in the form of OpenAI's completions; a prompt counts once for all its choices."""
        return self._usage(range(0, len(self._requests), self.choices), range(len(self._requests)))

    def finish_reasons(self) -> list[str | None]:
        """Return each sequence's finish reason; None for one that has not ended."""
        return [outputs[-1].finish_reason if outputs else None for outputs in self._outputs]

    def _usage(self, prompts: Sequence[int], texts: Sequence[int]) -> dict[str, Any]:
        prompt_tokens = sum(len(self._requests[index].tokens) for index in prompts)
        completion_tokens = sum(self._new_tokens(self._outputs[index]) for index in texts)
        reports = [outputs[0].prompt for outputs in map(self._outputs.__getitem__, prompts) if outputs]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(report.cached_tokens for report in reports if report is not None)
            },
        }

    def _new_tokens(self, outputs: Sequence[Output]) -> int:
        return len(outputs)


class Choices(Answer):
    """The response of OpenAI's completions or chats: a list of choices, each a sequence."""

    _id_prefix: str
    _kind: str
    _chunk_kind: str
    _has_several_prompts: bool

    def __init__(self, texts: TokenTexts, model: str, requests: Sequence[Request], body: GenerationBody):
        super().__init__(texts, model, requests, body.n)
        self._options = body
        self._additions = Additions(texts.text, requests, body, self.times)
        self._head = {"id": f"{self._id_prefix}-{new_id()}", "created": now(), "model": model}

    def whole(self) -> dict[str, Any]:
        choices = [{"index": index, **self._all(index, outputs)} for index, outputs in enumerate(self._outputs)]
        for choice, outputs in zip(choices, self._outputs, strict=True):
            choice["finish_reason"] = self._finish_reason(choice, outputs)
            choice |= self._additions.of_tokens(outputs[: self._new_tokens(outputs)])
        whole = {**self._head, "object": self._kind, "choices": choices, "usage": self.usage()}
        for choice, outputs in zip(choices, self._outputs, strict=True):
            self._add_prompt(whole, choice, outputs)
        return whole | self._additions.timings(dict(enumerate(self._outputs)))

    def events(self, index: int, outputs: Sequence[Output]) -> Iterator[Event]:
        is_first = len(outputs) == len(self._outputs[index])
        choice = {"index": index, **self._delta(index, outputs, is_first)}
        choice["finish_reason"] = self._finish_reason(choice, outputs)
        is_last = choice["finish_reason"] is not None
        choice |= self._additions.of_tokens(outputs[: self._new_tokens(outputs)])
        chunk = {**self._head, "object": self._chunk_kind, "choices": [choice]}
        chunk |= self._additions.of_event(index, self._outputs[index], is_last)
        if is_first:
            self._add_prompt(chunk, choice, outputs)
        if self._options.wants_usage:
            # That of one sequence, as vLLM's.
            chunk["usage"] = self._usage([index], [index]) if self._options.wants_continuous_usage else None
        yield Event(chunk)

    def last_events(self) -> Iterator[Event]:
        if self._options.wants_usage:
            last = {**self._head, "object": self._chunk_kind, "choices": [], "usage": self.usage()}
            yield Event(last | self._additions.timings(dict(enumerate(self._outputs))))
        yield Event("[DONE]")

    def failure(self, error: RequestError) -> Iterator[Event]:
        yield Event(error.body)

    def _add_prompt(self, answer: dict[str, Any], choice: dict[str, Any], outputs: Sequence[Output]) -> None:
        """Add the requested fields about a choice's prompt: to the choice, or to the answer if all choices have one
        prompt.
        """
        found = self._additions.of_prompt(choice["index"], outputs[0])
        (choice if self._has_several_prompts else answer).update(found)

    def _finish_reason(self, choice: Mapping[str, Any], outputs: Sequence[Output]) -> str | None:
        return outputs[-1].finish_reason

    @abstractmethod
    def _delta(self, index: int, outputs: Sequence[Output], is_first: bool) -> dict[str, Any]:
        """Return the part of a choice for new outputs."""

    @abstractmethod
    def _all(self, index: int, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the whole choice."""


class CompletionAnswer(Choices):
    """The response of /v1/completions."""

    _id_prefix, _kind, _chunk_kind = "cmpl", "text_completion", "text_completion"
    _has_several_prompts = True

    def __init__(self, texts: TokenTexts, model: str, requests: Sequence[Request], body: CompletionBody):
        super().__init__(texts, model, requests, body)
        self._echo = body.echo
        self._prompt_only = body.max_tokens == 0
        self._offsets = [0] * len(requests)  # where each choice's next token begins, in characters

    def _new_tokens(self, outputs: Sequence[Output]) -> int:
        return 0 if self._prompt_only else len(outputs)

    def _all(self, index: int, outputs: Sequence[Output]) -> dict[str, Any]:
        return self._delta(index, outputs, True)

    def _delta(self, index: int, outputs: Sequence[Output], is_first: bool) -> dict[str, Any]:
        request, echoes = self._requests[index], self._echo and is_first
        shown = [] if self._prompt_only else outputs
        text = self._texts.texts(request.tokens) if echoes else ""
        text += "".join(output.text for output in shown)
        if request.logprobs is None:
            return {"text": text, "logprobs": None}
        new = [output.logprob for output in shown if output.logprob is not None]
        return {"text": text, "logprobs": self._logprobs(index, new, outputs[0].prompt if echoes else None)}

    def _logprobs(self, index: int, new: Sequence[TokenLogprob], prompt: PromptReport | None) -> dict[str, Any]:
        """Return the log-probabilities of the new tokens, after those of the prompt if it is echoed; its first token
        has none.
        """
        reports = [*(prompt.logprobs if prompt else ()), *new]
        first = [self._requests[index].tokens[0]] if prompt else []
        tokens = [self._texts.text(token) for token in (*first, *(report.token for report in reports))]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        unknown = [None] * len(first)
        return {
            "tokens": tokens,
            "token_logprobs": [*unknown, *(report.logprob for report in reports)],
            "top_logprobs": [*unknown, *map(self._top, reports)],
            "text_offset": offsets,
        }

    def _top(self, report: TokenLogprob) -> dict[str, float]:
        """Return the top tokens, always with the token itself. Of tokens with the same text, only the likeliest is
        included.
        """
        pairs = sorted({(report.token, report.logprob), *report.top}, key=lambda pair: pair[1])
        return {self._texts.text(token): logprob for token, logprob in pairs}


class ChatAnswer(Choices):
    """The response of /v1/chat/completions."""

    _id_prefix, _kind, _chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _has_several_prompts = False

    def __init__(self, texts: TokenTexts, model: str, requests: Sequence[Request], body: ChatBody):
        super().__init__(texts, model, requests, body)
        self._calls = [CallsOfAnswer(texts.answer_stream(request, body.tools_to_call)) for request in requests]

    def _all(self, index: int, outputs: Sequence[Output]) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", **self._calls[index].message(outputs)},
            "logprobs": self._logprobs(index, outputs),
        }

    def _delta(self, index: int, outputs: Sequence[Output], is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {
            "delta": {**role, **self._calls[index].delta(outputs)},
            "logprobs": self._logprobs(index, outputs),
        }

    def _finish_reason(self, choice: Mapping[str, Any], outputs: Sequence[Output]) -> str | None:
        reason = outputs[-1].finish_reason
        return "tool_calls" if reason == "stop" and self._calls[choice["index"]].number else reason

    def _logprobs(self, index: int, outputs: Sequence[Output]) -> dict[str, Any] | None:
        if self._requests[index].logprobs is None:
            return None
        content = []
        for report in (output.logprob for output in outputs if output.logprob is not None):
            top = [self._described(token, logprob) for token, logprob in report.top]
            content.append({**self._described(report.token, report.logprob), "top_logprobs": top})
        return {"content": content}

    def _described(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": self._texts.bytes(token)}
