"""openai-agents with its default model class, that of the Responses API: a loop of calls, a hand-off, and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from benchmarks.clients.common import CITIES, MODEL


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal[CITIES]
    is_sunny: bool


def run(url: str, _: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    import agents
    from openai import AsyncOpenAI

    agents.set_default_openai_client(AsyncOpenAI(base_url=url, max_retries=0), use_for_tracing=False)
    agents.set_tracing_disabled(True)
    yield metadata.version("openai-agents")
    yield from asyncio.run(_used())


async def _used() -> list[str]:
    from agents import Agent, ModelSettings, Runner, function_tool

    asked = []

    @function_tool
    def weather(city: Literal[CITIES]) -> str:
        """Look out of the window."""
        asked.append(city)
        return "sunny"

    # The first answer must be a call. Later ones may be, and a schema makes other answers end.
    must_call = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    common = dict(instructions="be brief", model=MODEL, model_settings=must_call, output_type=Weather)
    looking = Agent("Looking", tools=[weather], **common)
    whole = await Runner.run(looking, "Rome?")
    assert len(asked) == 1 and whole.context_wrapper.usage.requests == 2
    streamed = Runner.run_streamed(looking, "Rome?")
    async for _ in streamed.stream_events():
        pass
    assert len(asked) == 2 and streamed.final_output == whole.final_output
    lines = [f"a call of weather({asked[0]!r}), and what follows, whole and streamed: {whole.final_output!r}"]
    handed = await Runner.run(Agent("Front", handoffs=[looking], **common), "Rome?")
    assert handed.last_agent is looking and len(asked) == 3
    return [*lines, f"a hand-off to {handed.last_agent.name}, which calls the tool: {handed.final_output!r}"]
