"""langchain-anthropic: chats, streams, calls of tools and structured output."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from benchmarks.clients.common import CITIES, MODEL, QUESTION, TOO_LONG


class Weather(BaseModel, extra="forbid"):
    """The weather in a city."""

    city: Literal[CITIES]
    is_sunny: bool


def run(url: str, _: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    from langchain_anthropic import ChatAnthropic
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    chat = ChatAnthropic(model=MODEL, base_url=url.removesuffix("/v1"), max_retries=0, temperature=0, max_tokens=20)
    yield metadata.version("langchain-anthropic")
    talk = [SystemMessage("be brief"), HumanMessage(QUESTION[0]["content"])]
    whole = chat.invoke(talk)
    parts = list(chat.stream(talk))
    total = sum(parts[1:], parts[0])
    assert total.text == whole.text and total.usage_metadata["output_tokens"] == 20
    assert total.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
    yield f"a chat, whole and streamed: {whole.text!r}"
    calling = ChatAnthropic(model=MODEL, base_url=url.removesuffix("/v1"), max_retries=0, max_tokens=200)
    bound = calling.bind_tools([Weather])
    forced = calling.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    answer = forced.invoke("Rome?")
    pieces = list(forced.stream("Rome?"))
    [call] = answer.tool_calls
    assert sum(pieces[1:], pieces[0]).tool_calls[0]["args"] == call["args"]
    after = bound.invoke([HumanMessage("Rome?"), answer, ToolMessage("sunny", tool_call_id=call["id"])])
    yield f"a call, {call['name']}({call['args']}), and {len(after.text)} characters that follow its result"
    yield f"structured output: {calling.with_structured_output(Weather).invoke('Rome?')!r}"
    by_schema = calling.with_structured_output(Weather, method="json_schema").invoke("Rome?")
    yield f"structured output by its schema: {by_schema!r}"
    try:
        chat.invoke(TOO_LONG)
    except ContextOverflowError as error:
        yield f"a chat that is too long: {type(error).__name__}"
