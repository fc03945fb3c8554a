"""The forms of a batch's lines: OpenAI's, with a request's body, and a row with a prompt. Each has its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from granite4_neuron.errors import UserError
from granite4_neuron.serving.apis.endpoints import API, BY_PATH, CHAT, COMPLETIONS
from granite4_neuron.serving.apis.identity import new_id
from granite4_neuron.serving.batch.lines import Line
from granite4_neuron.serving.errors import RequestError

TEXT = "generated_text"


@dataclass(frozen=True)
class Prompts:
    """How rows with a prompt become requests.

    options: fields of their bodies, such as `max_tokens`.
    is_chat: whether a prompt is a user's message.
    system: the system message of that conversation.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False
    system: str | None = None


class Form(ABC):
    """A line as its form has it.

    name: what tells it from other lines, if it is known.
    """

    name: Any

    @abstractmethod
    def request(self) -> tuple[API, Mapping[str, Any]]:
        """Return the kind of request and its body.

        Raises:
            RequestError, UserError: something of the line is invalid.
        """

    @abstractmethod
    def success(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result for an answer of the API."""

    @abstractmethod
    def failure(self, error: RequestError) -> dict[str, Any]:
        """Return the result for an error."""


class OpenAIForm(Form):
    """A line of OpenAI's Batch API; also anything that is no request at all, so that it has a result."""

    def __init__(self, value: Mapping[str, Any], wrong: UserError | None = None):
        self._value = value
        self._wrong = wrong
        self.name = value.get("custom_id")

    def request(self) -> tuple[API, Mapping[str, Any]]:
        if self._wrong is not None:
            raise self._wrong
        value = self._value
        for key, kind, what in (("custom_id", str, "a string"), ("url", str, "a string"), ("body", dict, "an object")):
            if not isinstance(value.get(key), kind):
                raise RequestError(400, f"the line must have a {key}, which is {what}, or a prompt.", key)
        if value.get("method", "POST") != "POST":
            raise RequestError(400, "method: it must be POST.", "method")
        if value["url"] not in BY_PATH:
            raise RequestError(400, f"url: it must be one of {', '.join(BY_PATH)}.", "url")
        return BY_PATH[value["url"]], value["body"]

    def success(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        return self._result(200, answer)

    def failure(self, error: RequestError) -> dict[str, Any]:
        return self._result(error.status, error.body)

    def _result(self, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": f"req_{new_id()}", "body": body}
        return {"id": f"batch_req_{new_id()}", "custom_id": self.name, "response": response, "error": None}


class PromptForm(Form):
    """A row with a prompt. Its other columns are kept; one that has the name of a result's own begins with "input_"."""

    def __init__(self, value: Mapping[str, Any], prompts: Prompts):
        self._value = value
        self._prompts = prompts
        self.name = value["prompt"]

    def request(self) -> tuple[API, Mapping[str, Any]]:
        if not isinstance(self.name, str):
            raise RequestError(400, "prompt: it must be a string.", "prompt")
        if not self._prompts.is_chat:
            return COMPLETIONS, {**self._prompts.options, "prompt": self.name}
        messages = [{"role": "user", "content": self.name}]
        if self._prompts.system is not None:
            messages.insert(0, {"role": "system", "content": self._prompts.system})
        return CHAT, {**self._prompts.options, "messages": messages}

    def success(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        [choice] = answer["choices"]
        text = choice["message"]["content"] if self._prompts.is_chat else choice["text"]
        return self._result(text, choice["finish_reason"], None)

    def failure(self, error: RequestError) -> dict[str, Any]:
        return self._result("", "error", error.message)

    def _result(self, text: str, reason: str, error: str | None) -> dict[str, Any]:
        own = {TEXT: text, "finish_reason": reason, "error": error}
        kept = dict(self._value)
        for name in own.keys() & kept.keys():  # of an input that is the output of another batch, for example
            other = f"input_{name}"
            while other in kept:
                other = f"input_{other}"
            kept[other] = kept.pop(name)
        return {**kept, **own}


def form_of(line: Line, prompts: Prompts) -> Form:
    """Return a line in its form."""
    try:
        value = line.value()
    except UserError as error:
        return OpenAIForm({}, error)
    return PromptForm(value, prompts) if "prompt" in value and "body" not in value else OpenAIForm(value)
