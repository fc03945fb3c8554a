"""OpenAI's own package: chats and responses."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from benchmarks.clients.common import CITIES, MODEL, QUESTION, TOO_LONG

if TYPE_CHECKING:
    from openai import OpenAI


class City(BaseModel):
    """The weather in a city."""

    city: Literal[CITIES]
    is_sunny: bool


def run(url: str, _: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    import openai

    client = openai.OpenAI(base_url=url, max_retries=0)
    yield f"{metadata.version('openai')}, model {client.models.retrieve(MODEL).id}"
    with client.chat.completions.stream(model=MODEL, messages=QUESTION) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    plain = client.chat.completions.create(
        model=MODEL, messages=QUESTION, user="me", store=False, metadata={"run": "1"}
    )
    assert answer.choices[0].message.content == plain.choices[0].message.content
    yield f"a chat, streamed and whole: {plain.choices[0].message.content!r}"
    assert plain._request_id
    yield from _responses(client)
    try:
        client.chat.completions.create(model=MODEL, messages=TOO_LONG)
    except openai.BadRequestError as error:
        yield f"a chat that is too long: {error.code}"


def _responses(client: OpenAI) -> Iterator[str]:
    import openai

    asked = dict(model=MODEL, input=QUESTION[0]["content"], instructions="be brief", max_output_tokens=20)
    whole = client.responses.create(**asked, store=False, metadata={"run": "1"})
    with client.responses.stream(**asked) as stream:
        *_, last = stream
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
    assert last.response.usage.input_tokens_details.cached_tokens > 0
    yield f"a response, whole and streamed: {whole.output_text!r}, {whole.incomplete_details.reason}"
    parsed = client.responses.parse(model=MODEL, input="Rome?", text_format=City).output_parsed
    yield f"a parsed response: {parsed!r}"
    asked = dict(
        model=MODEL, input="Rome?", tools=[openai.pydantic_function_tool(City)["function"] | {"type": "function"}]
    )
    with client.responses.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        [call] = stream.get_final_response().output
    said = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    talk = [{"role": "user", "content": "Rome?"}, said, result]
    answer = client.responses.create(**{**asked, "input": talk}, max_output_tokens=20)
    yield f"a call, {call.name}({call.arguments}), and what follows its result: {answer.output_text!r}"
    try:
        client.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
    except openai.BadRequestError as error:
        yield f"a stored response: {error.message}"
