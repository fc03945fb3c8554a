"""pydantic-ai with the Responses API and with Anthropic's: a loop of calls, output of a type, and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from benchmarks.clients.common import CITIES, MODEL, QUESTION


class Weather(BaseModel, extra="forbid"):
    """The weather in a city."""

    city: Literal[CITIES]
    is_sunny: bool


def run(url: str, _: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    yield metadata.version("pydantic-ai-slim")
    responses = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="none"))
    for model in (responses, messages):
        for line in asyncio.run(_used(model)):
            yield f"{type(model).__name__}: {line}"


async def _used(model: object) -> list[str]:
    from pydantic_ai import Agent, ModelSettings, NativeOutput
    from pydantic_ai.capabilities import PrepareOutputTools
    from pydantic_ai.models.anthropic import AnthropicModel

    lines = []
    settings = ModelSettings(max_tokens=20, temperature=0)
    plain = Agent(model, system_prompt="be brief", model_settings=settings)
    text = (await plain.run(QUESTION[0]["content"])).output
    async with plain.run_stream(QUESTION[0]["content"]) as stream:
        assert await stream.get_output() == text
    lines.append(f"a text, whole and streamed: {text!r}")
    asked = []
    # The output is a call of a tool too. That tool comes after the first step, so that the model calls the other first.
    settings = ModelSettings(max_tokens=300, temperature=0, parallel_tool_calls=False)
    later = PrepareOutputTools(lambda context, tools: tools if context.run_step > 1 else [])
    calling = Agent(model, output_type=Weather, model_settings=settings, capabilities=[later])

    @calling.tool_plain
    def look(city: Literal[CITIES]) -> str:
        """Look out of the window."""
        asked.append(city)
        return "sunny"

    output = (await calling.run("Rome?")).output
    assert len(asked) == 1
    async with calling.run_stream("Rome?") as stream:
        assert await stream.get_output() == output and len(asked) == 2
    lines.append(f"a call of look({asked[0]!r}), and the output {output!r}, whole and streamed")
    if not isinstance(model, AnthropicModel):  # the package has this for Anthropic's own models only
        native = Agent(model, output_type=NativeOutput(Weather), model_settings=ModelSettings(max_tokens=300))
        lines.append(f"an output by its schema: {(await native.run('Rome?')).output!r}")
    return lines
