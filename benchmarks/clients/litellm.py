"""litellm: chats, completions, streams, its parameters and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.clients.common import MODEL, QUESTION, TOO_LONG


def run(url: str, _: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    import litellm

    litellm.suppress_debug_info = True
    chat = dict(model=f"openai/{MODEL}", api_base=url, messages=QUESTION, max_tokens=20)
    yield metadata.version("litellm")
    answer = litellm.completion(**chat, user="me", metadata={"run": "1"}, seed=1, n=1, stop=["\n\n"])
    text = answer.choices[0].message.content
    yield f"a chat: {text!r}"
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    streamed = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert streamed.choices[0].message.content == text and streamed.usage.completion_tokens == 20
    assert asyncio.run(litellm.acompletion(**chat)).choices[0].message.content == text
    yield "the same streamed, and asynchronously"
    whole = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=url, prompt="An assignment", max_tokens=8, best_of=1
    )
    yield f"a completion: {whole.choices[0].text!r}"
    try:
        litellm.completion(**{**chat, "messages": TOO_LONG})
    except litellm.ContextWindowExceededError as error:
        yield f"a chat that is too long: {type(error).__name__}"
    try:
        litellm.completion(**{**chat, "model": "openai/other"})
    except litellm.NotFoundError as error:
        yield f"another model: {type(error).__name__}"
