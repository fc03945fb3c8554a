"""Packages that ask for structured answers: instructor, smolagents, dspy, haystack, llama-index, autogen and langgraph.

Each forces a call of a tool or gives a schema, greedily and at temperature 1. Every answer ends by itself and is valid.
"""

import asyncio
import importlib.util
import json
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from benchmarks.clients.common import MODEL, QUESTION

PACKAGES = ("instructor", "smolagents", "dspy", "haystack", "llama_index", "autogen_ext", "langgraph")

_MOST_TOKENS = 800
_MOST_OF_CALLS = 3000  # tokens for several calls
_WAYS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2})
_TEXT = QUESTION[0]["content"]


class Answer(BaseModel):
    """An answer about a statement of Python."""

    statement: Literal["assert", "import", "return"]
    is_simple: bool
    number_of_words: int = Field(ge=0, le=99)
    words: list[Literal["one", "two"]] = Field(max_length=3)


def now(zone: Literal["UTC", "local"]) -> str:
    """Return the time.

    Args:
        zone: of the time.
    """
    return f"noon, {zone}"


def run(url: str, _: Path) -> Iterator[str]:
    """Run the clients that are installed; yield a line for each thing that they did."""
    clients = _instructor, _smolagents, _dspy, _haystack, _llama_index, _autogen, _langgraph
    for package, client in zip(PACKAGES, clients, strict=True):
        if importlib.util.find_spec(package) is not None:
            yield from client(url)


def _instructor(url: str) -> Iterator[str]:
    import anthropic
    import instructor
    import openai

    def of_openai(mode: instructor.Mode) -> instructor.Instructor:
        return instructor.from_openai(openai.OpenAI(base_url=url, max_retries=0), mode=mode)

    def of_anthropic(mode: instructor.Mode) -> instructor.Instructor:
        client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), max_retries=0)
        return instructor.from_anthropic(client, mode=mode)

    schema = Answer.model_json_schema()
    format_of_openai = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    # Fields that a mode needs in addition. Where it gives the schema in the prompt only, the request gives it too,
    # because the bundled model does not follow prompts. Where a call is optional, it is made mandatory.
    needed: dict[Any, dict[str, dict[str, Any]]] = {
        of_openai: {
            "TOOLS": {},
            "TOOLS_STRICT": {},
            "FUNCTIONS": {},
            "RESPONSES_TOOLS": {},
            "PARALLEL_TOOLS": {"tool_choice": "required"},
            "JSON_SCHEMA": {},
            "JSON_O1": {},
            "JSON": {"response_format": format_of_openai},
            "MD_JSON": {"response_format": format_of_openai},
        },
        of_anthropic: {
            "ANTHROPIC_TOOLS": {},
            "ANTHROPIC_PARALLEL_TOOLS": {"tool_choice": {"type": "any"}},
            "ANTHROPIC_JSON": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        },
    }
    for client_of, modes in needed.items():
        for mode, more in modes.items():
            client = client_of(instructor.Mode[mode])
            for way in _WAYS:
                options = dict(model=MODEL, messages=QUESTION, max_retries=0, extra_body={**way, **more})
                if "PARALLEL" in mode:
                    [answer, *_] = client.create(response_model=Iterable[Answer], max_tokens=_MOST_OF_CALLS, **options)
                else:
                    options |= dict(response_model=Answer, max_tokens=_MOST_TOKENS)
                    answer, whole = client.create_with_completion(**options)
                    assert _end_of(whole) in ("stop", "tool_calls", "completed", "end_turn", "tool_use")
                    *_, streamed = client.create_partial(**options)
                    assert Answer.model_validate(streamed.model_dump())
                assert isinstance(answer, Answer)
            yield f"instructor {metadata.version('instructor')}, {mode}: {answer!r}"


def _end_of(answer: Any) -> str:
    """Return why an answer ended, in the words of its API."""
    if hasattr(answer, "choices"):
        return answer.choices[0].finish_reason
    return answer.status if hasattr(answer, "status") else answer.stop_reason


def _smolagents(url: str) -> Iterator[str]:
    import smolagents

    tool = smolagents.tool(now)
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": Answer.model_json_schema(), "strict": True},
    }
    for way in _WAYS:
        model = smolagents.OpenAIModel(MODEL, url, api_key="none", max_tokens=_MOST_TOKENS, **way)
        called = model.generate(QUESTION, tools_to_call_from=[tool])
        assert called.raw.choices[0].finish_reason == "tool_calls"
        for call in called.tool_calls:
            now(**_object(call.function.arguments))
        said = model.generate(QUESTION, response_format=response_format)
        assert said.raw.choices[0].finish_reason == "stop" and Answer.model_validate_json(said.content)
    yield f"smolagents {metadata.version('smolagents')}: {call.function.arguments}, {said.content}"


def _dspy(url: str) -> Iterator[str]:
    import dspy

    class LM(dspy.LM):
        """A model that is not in dspy's tables."""

        supports_response_schema = True
        supported_params = frozenset({"temperature", "max_tokens", "seed", "response_format"})

    class Ask(dspy.Signature):
        """Answer a question about Python."""

        question: str = dspy.InputField()
        answer: Answer = dspy.OutputField()

    for way in _WAYS:
        model = LM(f"openai/{MODEL}", api_base=url, max_tokens=200, cache=False, num_retries=0, **way)
        with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
            found = dspy.Predict(Ask)(question=_TEXT)
        assert isinstance(found.answer, Answer)
    yield f"dspy {metadata.version('dspy')}: {found.answer!r}"


def _haystack(url: str) -> Iterator[str]:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    tools = [create_tool_from_function(now), create_tool_from_function(_nothing, name="nothing")]
    messages = [ChatMessage.from_user(_TEXT)]
    for way in _WAYS:
        model = OpenAIChatGenerator(
            Secret.from_token("none"), MODEL, api_base_url=url, generation_kwargs={"max_tokens": _MOST_TOKENS, **way}
        )
        for tool in tools:
            forced = {"tool_choice": {"type": "function", "function": {"name": tool.name}}}
            [reply] = model.run(messages, tools=tools, generation_kwargs=forced)["replies"]
            assert reply.meta["finish_reason"] == "tool_calls"
            result = tool.invoke(**reply.tool_call.arguments)
        [reply] = model.run(messages, generation_kwargs={"response_format": Answer})["replies"]
        assert reply.meta["finish_reason"] == "stop" and Answer.model_validate_json(reply.text)
    yield f"haystack {metadata.version('haystack-ai')}: {result!r}, {reply.text}"


def _nothing() -> str:
    """Do nothing; it has no arguments."""
    return "nothing"


def _llama_index(url: str) -> Iterator[str]:
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    for way in _WAYS:
        options = dict(model=MODEL, api_base=url, api_key="none", max_tokens=_MOST_TOKENS, max_retries=0)
        extra = {"additional_kwargs": {"seed": way["seed"]}} if "seed" in way else {}
        model = OpenAILike(
            **options, **extra, temperature=way["temperature"], is_chat_model=True, is_function_calling_model=True
        )
        answer = model.chat_with_tools([FunctionTool.from_defaults(now)], _TEXT, tool_required=True)
        [call] = model.get_tool_calls_from_response(answer)
        assert answer.raw.choices[0].finish_reason == "tool_calls" and set(call.tool_kwargs) == {"zone"}
        found = model.structured_predict(Answer, PromptTemplate("{question}"), question=_TEXT)
        assert isinstance(found, Answer)
    yield f"llama-index {metadata.version('llama-index-core')}: {call.tool_kwargs}, {found!r}"


def _autogen(url: str) -> Iterator[str]:
    from autogen_core import CancellationToken
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = dict(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")
    tool = FunctionTool(now, "the time")

    async def ask(way: dict[str, Any]) -> tuple[str, Answer]:
        model = OpenAIChatCompletionClient(
            model=MODEL, base_url=url, api_key="none", model_info=info, max_tokens=_MOST_TOKENS, **way
        )
        message = [UserMessage(content=_TEXT, source="user")]
        called = await model.create(message, tools=[tool], tool_choice="required")
        said = await model.create(message, json_output=Answer)
        await model.close()
        assert (called.finish_reason, said.finish_reason) == ("function_calls", "stop")
        result = await tool.run_json(_object(called.content[0].arguments), CancellationToken())
        return result, Answer.model_validate_json(said.content)

    for way in _WAYS:
        result, answer = asyncio.run(ask(way))
    yield f"autogen {metadata.version('autogen-ext')}: {result}, {answer!r}"


def _langgraph(url: str) -> Iterator[str]:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    for way in _WAYS:
        model = ChatOpenAI(model=MODEL, base_url=url, max_retries=0, max_tokens=_MOST_TOKENS, **way)
        forced = model.bind_tools([now], tool_choice="required")
        graph = StateGraph(MessagesState)
        graph.add_node("call", lambda state, forced=forced: {"messages": [forced.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode([now]))
        graph.add_edge(START, "call")
        graph.add_edge("call", "tools")
        graph.add_edge("tools", END)
        _, call, *results = graph.compile().invoke({"messages": QUESTION})["messages"]
        assert call.response_metadata["finish_reason"] == "tool_calls"
        assert results and all(result.status == "success" for result in results)
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Answer, method=method).invoke(QUESTION), Answer)
    yield f"langgraph {metadata.version('langgraph')}: {results[0].content}"


def _object(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments, which some packages have parsed already."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments
