"""OpenAI's own package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.clients.common import MODEL, QUESTION, TOO_LONG


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
    try:
        client.chat.completions.create(model=MODEL, messages=TOO_LONG)
    except openai.BadRequestError as error:
        yield f"a chat that is too long: {error.code}"
