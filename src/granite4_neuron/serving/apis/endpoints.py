"""The requests for texts: the body of each path, how sequences are made of it, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from granite4_neuron.engine import Request
from granite4_neuron.serving.apis.chat.answers import Answer, ChatAnswer, CompletionAnswer, TokenTexts
from granite4_neuron.serving.apis.chat.protocol import ChatBody, CompletionBody, SamplingBody
from granite4_neuron.serving.apis.messages.answer import MessagesAnswer
from granite4_neuron.serving.apis.messages.body import MessagesBody
from granite4_neuron.serving.apis.responses.answer import ResponsesAnswer
from granite4_neuron.serving.apis.responses.body import ResponsesBody
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.serving.sequences import Prepared, RequestBuilder

Asked = TypeVar("Asked", bound=SamplingBody)


@dataclass(frozen=True)
class API(Generic[Asked]):
    """One kind of request.

    body: the class of its body.
    requests: makes sequences of a body; raises what `RequestBuilder.completion_requests` raises.
    answer: makes the answer, from the texts of tokens, the model's name, the sequences and the body.
    """

    body: type[Asked]
    requests: Callable[[RequestBuilder, Asked], Prepared]
    answer: Callable[[TokenTexts, str, Sequence[Request], Asked], Answer]


COMPLETIONS = API(CompletionBody, lambda maker, body: maker.completion_requests(body), CompletionAnswer)
CHAT = API(ChatBody, lambda maker, body: maker.chat_requests(body), ChatAnswer)
RESPONSES = API(ResponsesBody, lambda maker, body: maker.chat_requests(body.chat), ResponsesAnswer)
MESSAGES = API(MessagesBody, lambda maker, body: maker.chat_requests(body.chat), MessagesAnswer)
BY_PATH: Mapping[str, API] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Check the model that a request names; None for the first.

    Raises:
        RequestError: 404, there is no such model.
    """
    if name not in (None, *names):
        there_is = f"this is {names[0]}" if len(names) == 1 else f"there are {', '.join(names)}"
        message = f"there is no model {name}; {there_is}."
        raise RequestError(404, message, "model", code="model_not_found")
