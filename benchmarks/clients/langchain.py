"""langchain-openai: chats, streams, batches, log-probabilities and completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.clients.common import MODEL, QUESTION, TOO_LONG


def run(url: str, _: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI, OpenAI

    options = dict(model=MODEL, base_url=url, max_retries=0, temperature=0, max_tokens=20)
    chat = ChatOpenAI(**options, stream_usage=True)
    yield f"langchain-openai {metadata.version('langchain-openai')}"
    text = chat.invoke(QUESTION).content
    parts = list(chat.stream(QUESTION))
    assert "".join(part.content for part in parts) == text
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 20
    assert asyncio.run(chat.ainvoke(QUESTION)).content == text
    yield f"a chat, whole, streamed and asynchronously: {text!r}"
    talk = [SystemMessage("be brief"), HumanMessage(QUESTION[0]["content"], name="me")]
    assert len({answer.content for answer in chat.batch([talk] * 4)}) == 1
    yield "a batch of chats with a system message and names"
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]
    assert len(logprobs["content"]) == 20
    yield "log-probabilities"
    completed = OpenAI(**options).invoke("An assignment statement")
    yield f"a completion: {completed!r}"
    try:
        chat.invoke(TOO_LONG)
    except ContextOverflowError as error:
        yield f"a chat that is too long: {type(error).__name__}"
