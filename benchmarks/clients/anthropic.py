"""Anthropic's own package: messages, streams, calls of tools, counts and errors."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.clients.common import CITIES, MODEL, QUESTION, TOO_LONG

WEATHER = {
    "name": "weather",
    "description": "Look out of the window.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def run(url: str, _: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), max_retries=0)
    yield metadata.version("anthropic")
    asked = dict(model=MODEL, max_tokens=20, system="be brief", messages=QUESTION)
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert whole.content[0].text == text == last.content[0].text and last.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model=MODEL, system="be brief", messages=QUESTION).input_tokens
    assert last.usage.cache_read_input_tokens > 0
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == counted
    yield f"a message, whole and streamed: {text!r}, of {counted} tokens, {last.usage.cache_read_input_tokens} cached"
    tools = dict(model=MODEL, max_tokens=200, tools=[WEATHER])
    question = {"role": "user", "content": "Rome?"}
    must_call = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**tools, messages=[question], tool_choice=must_call) as stream:
        answer = stream.get_final_message()
    [call] = answer.content
    assert answer.stop_reason == "tool_use" and call.input["city"] in CITIES
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    talk = [question, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**tools, "max_tokens": 20}, messages=talk)
    yield f"a call of weather({call.input}), and what follows: {after.content[0].text!r}"
    stopped = client.messages.create(**asked, stop_sequences=["s"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "s")
    yield f"a stop sequence: {stopped.content[0].text!r}"
    for wrong, kind in (({"messages": TOO_LONG}, anthropic.BadRequestError), ({"model": "x"}, anthropic.NotFoundError)):
        try:
            client.messages.create(**{**asked, **wrong})
        except kind as error:
            yield f"{' and '.join(wrong)}: {type(error).__name__}, {error.body['error']['type']}"
