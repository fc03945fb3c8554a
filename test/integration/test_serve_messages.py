"""Anthropic's Messages API: the same prompts and options as a chat's, and answers as Anthropic's own client reads them.

Where that client is installed, its types check all that the server sends.
"""
# ruff: noqa: E402 (importorskip comes first)

import importlib.util
import json
import re

import pytest
from pydantic import TypeAdapter
from pydantic_core import from_json

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron.generation.tool_calls import OPEN
from granite4_neuron.serving.apis.chat.protocol import ChatBody
from granite4_neuron.serving.apis.messages.body import MessagesBody, PromptBody
from test.support.serving import named_events, serving
from test.support.tool_template import spelled

if importlib.util.find_spec("anthropic"):
    from anthropic.types import Message, MessageStreamEvent

    WHOLE, EVENT = TypeAdapter(Message), TypeAdapter(MessageStreamEvent)
else:
    WHOLE = EVENT = TypeAdapter(dict)

QUESTION = "What is the weather in Rome?"
USER = {"role": "user", "content": QUESTION}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
NONE = {"type": "object", "properties": {}}
TOOLS = [
    {"name": "get-weather", "description": "Look.", "input_schema": CITY, "strict": True},
    {"type": "custom", "name": "time", "input_schema": NONE, "cache_control": {"type": "ephemeral"}},
]
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": "get-weather", "description": "Look.", "parameters": CITY, "strict": True},
    },
    {"type": "function", "function": {"name": "time", "parameters": NONE}},
]
TALK = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is the weather "}, {"type": "text", "text": "in Rome?"}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "I look.", "citations": None},
            {"type": "tool_use", "id": "a", "name": "get-weather", "input": {"city": "R"}},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "b", "name": "time", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "sunny", "is_error": False},
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "noon"}]},
            {"type": "tool_result", "tool_use_id": "c"},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
    {"role": "assistant", "content": [{"type": "tool_use", "id": "d", "name": "time", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "d", "content": "one"}]},
]
CALLS = {
    "a": {"id": "a", "function": {"name": "get-weather", "arguments": '{"city": "R"}'}},
    "b": {"id": "b", "function": {"name": "time", "arguments": "{}"}},
    "d": {"id": "d", "function": {"name": "time", "arguments": "{}"}},
}
CHAT_TALK = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALLS["a"], CALLS["b"]]},
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "tool", "tool_call_id": "c", "content": ""},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "tool_calls": [CALLS["d"]]},
    {"role": "tool", "tool_call_id": "d", "content": "one"},
]
SAMPLING = dict(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, logit_bias={"70": 5}, stop_token_ids=[9])
NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.fixture
def post(byte_server):
    def send(path="messages", **body):
        return httpx.post(f"{byte_server.address}/v1/{path}", json=body, timeout=60)

    return send


class TestTheRequestIsAChats:
    """The engine gets the same request as from a chat."""

    @pytest.mark.parametrize(
        ("asked", "chat"),
        [
            (
                dict(system=[{"type": "text", "text": "Be brief."}], messages=TALK, tools=TOOLS),
                dict(messages=CHAT_TALK, tools=CHAT_TOOLS),
            ),
            (dict(**SAMPLING, stop_sequences=["x", "y"]), dict(**SAMPLING, stop=["x", "y"])),
            (dict(tools=TOOLS, tool_choice={"type": "none"}), dict(tools=CHAT_TOOLS, tool_choice="none")),
            (
                dict(tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True}),
                dict(tools=CHAT_TOOLS, tool_choice="required", parallel_tool_calls=False),
            ),
            (
                dict(tools=TOOLS, tool_choice={"type": "tool", "name": "time"}),
                dict(tools=CHAT_TOOLS, tool_choice=NAMED),
            ),
            (
                dict(messages=[USER, {"role": "assistant", "content": "It is"}]),
                dict(messages=[USER, {"role": "assistant", "content": "It is"}], continue_final_message=True),
            ),
            (
                dict(output_config={"format": {"type": "json_schema", "schema": CITY}, "effort": "low"}),
                dict(response_format={"type": "json_schema", "json_schema": {"schema": CITY}}),
            ),
        ],
        ids=["talk", "sampling", "none", "any", "tool", "prefill", "schema"],
    )
    def test_the_engine_gets_the_request_of_a_chat(self, byte_server, asked, chat):
        maker = byte_server.service.maker
        body = MessagesBody.model_validate_json(json.dumps({"messages": [USER], "max_tokens": 7, **asked}))
        chat = {"messages": [USER], "max_tokens": 7, **chat}
        expected = maker.chat_requests(ChatBody.model_validate_json(json.dumps(chat)))
        prepared = maker.chat_requests(body.chat)
        assert list(prepared.requests) == list(expected.requests)
        kinds = [None if each is None else (each.kind, each.value) for each in (prepared.structure, expected.structure)]
        assert kinds[0] == kinds[1]
        counted = {name: value for name, value in asked.items() if name in PromptBody.model_fields}
        answer = httpx.post(f"{byte_server.address}/v1/messages/count_tokens", json={"messages": [USER], **counted})
        assert answer.json() == {"input_tokens": len(expected.requests[0].tokens)}

    def test_fields_that_change_nothing(self, post):
        plain = post(messages=[USER], max_tokens=5).json()
        fields = dict(
            metadata={"user_id": "me"},
            service_tier="auto",
            thinking={"type": "enabled", "budget_tokens": 1024},
            cache_control={"type": "ephemeral"},
            container=None,
        )
        answer = post(messages=[USER], max_tokens=5, **fields).json()
        assert answer["content"] == plain["content"] and answer["stop_reason"] == "max_tokens"


class TestAnswers:
    def test_whole_and_streamed(self, post, say):
        """Wherever the answer ends, its events make the whole answer, and Anthropic's types take all of it."""
        answer = f"Hm.\n{spelled('time', '{}')}\n{spelled('get-weather', json.dumps({'city': 'R'}))} So."
        say(answer)
        seen, second = set(), answer.rindex(OPEN)
        for length in (2, 20, second - 15, second - 8, second + 5, second + 65, len(answer) - 1, len(answer) + 1):
            body = dict(messages=[USER], tools=TOOLS[1:], max_tokens=length)
            whole = post(**body).json()
            WHOLE.validate_python(whole)
            events = events_of(post(**body, stream=True).text)
            streamed = rebuilt(events)
            assert without_ids(streamed) == without_ids(whole)
            seen.add((*(block["type"] for block in whole["content"]), whole["stop_reason"]))
        cut = "max_tokens"
        kinds = ("text", "tool_use", "tool_use", "text")
        assert seen == {
            ("text", cut),
            ("text", "tool_use", cut),
            (*kinds[:3], cut),
            (*kinds, cut),
            (*kinds, "tool_use"),
        }

    def test_the_order_of_events(self, post, say):
        say(f"A {spelled('time', '{}')}")
        events = events_of(post(messages=[USER], tools=TOOLS[1:], max_tokens=99, stream=True).text)
        kinds = [event["type"] for event in events]
        assert [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_reasons_are_anthropics(self, post, say, stream):
        def reason(text, **options):
            say(text)
            answer = post(messages=[USER], **{"max_tokens": 99, **options}, stream=stream)
            message = rebuilt(events_of(answer.text)) if stream else answer.json()
            return message["stop_reason"], message["stop_sequence"], message["content"][0].get("text")

        assert reason("abcd") == ("end_turn", None, "abcd")
        assert reason("abcd", max_tokens=2) == ("max_tokens", None, "ab")
        assert reason("abcd", stop_sequences=["x", "cd"]) == ("stop_sequence", "cd", "ab")
        assert reason(spelled("time", "{}"), tools=TOOLS) == ("tool_use", None, None)
        assert reason("") == ("end_turn", None, "")

    def test_malformed_arguments_are_an_empty_object(self, post, say):
        say(spelled("time", '{"a": b}'))
        [block] = post(messages=[USER], tools=TOOLS[1:], max_tokens=99).json()["content"]
        assert (block["name"], block["input"]) == ("time", {})

    def test_required_calls_are_made(self, post, hasty):
        body = dict(messages=[USER], tools=TOOLS, tool_choice={"type": "tool", "name": "get-weather"}, max_tokens=800)
        answer = post(**body, temperature=1, logit_bias=hasty).json()
        [block] = answer["content"]
        assert block["name"] == "get-weather" and isinstance(block["input"]["city"], str)
        assert answer["stop_reason"] == "tool_use" and block["id"].startswith("toolu_")
        talk = [USER, {"role": "assistant", "content": answer["content"]}]
        talk.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "sun"}]}
        )
        assert post(messages=talk, tools=TOOLS, max_tokens=3).status_code == 200

    def test_usage(self, post):
        body = dict(messages=[{"role": "user", "content": "How is the weather? " * 5}], max_tokens=3)
        usages = [post(**body).json()["usage"], rebuilt(events_of(post(**body, stream=True).text))["usage"]]
        counted = post("messages/count_tokens", messages=body["messages"]).json()["input_tokens"]
        for usage in usages:
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted and usage["output_tokens"] == 3
        assert usages[1]["cache_read_input_tokens"] > 0


def test_a_stream_that_fails(post, say):
    say("abc", None)
    text = post(messages=[USER], max_tokens=9, stream=True).text
    name, data = text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    error = {"type": "error", "error": {"type": "api_error", "message": "the logits are wrong."}}
    assert name == "event: error" and json.loads(data.removeprefix("data: ")) == error


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED = {
    "no limit": (dict(max_tokens=None), "max_tokens: field required"),
    "image": (
        dict(messages=[{"role": "user", "content": [IMAGE]}]),
        'messages.0.content.0: this server supports no block of the type "image"',
    ),
    "image in a result": (
        dict(messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]),
        'messages.0.content.0.content: this server supports no part of the type "image"',
    ),
    "built-in": (
        dict(
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
            tool_choice={"type": "tool", "name": "web_search"},
        ),
        "tool_choice: it needs tools that are functions",
    ),
    "another API's field": (dict(stop=["a"]), "stop: this server does not support it; give stop_sequences"),
    "call of a user": (
        dict(messages=[{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]),
        "messages.0: only a message of the assistant may have blocks of the type tool_use",
    ),
    "result of the assistant": (
        dict(messages=[{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]),
        "messages.0: only a message of the user may have blocks of the type tool_result",
    ),
    "call without result": (dict(messages=TALK[:2]), "messages: the last one calls tools; their results must follow"),
    "no messages": (dict(messages=[]), "messages: list should have at least 1 item"),
    "role": (dict(messages=[{"role": "tool", "content": "a"}]), "messages.0.role: "),
    "schema": (dict(tools=[{"name": "f"}]), "tools.0.input_schema: field required"),
    "choice": (dict(tools=TOOLS, tool_choice={"type": "tool"}), 'tool_choice: a choice of the type "tool"'),
    "no such tool": (
        dict(tools=TOOLS, tool_choice={"type": "tool", "name": "x"}),
        "tool_choice: there is no tool x in tools",
    ),
    "format": (
        dict(output_config={"format": {"type": "text"}}),
        'output_config.format: it must be {"type": "json_schema"',
    ),
    "bad schema": (
        dict(output_config={"format": {"type": "json_schema", "schema": {"type": "x"}}}),
        "output_config.format: the JSON schema cannot be used",
    ),
    "long": (dict(messages=[{"role": "user", "content": "x" * 5000}]), "the prompt is too long: messages has 50"),
    "stop": (dict(stop_sequences=[""]), "stop_sequences: it must be a string or a list"),
}


@pytest.mark.parametrize("fields, message", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(post, fields, message):
    answer = post(**{"messages": [USER], "max_tokens": 5, **fields})
    error = answer.json()
    assert answer.status_code == 400 and message in error["error"]["message"], answer.text
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


def test_a_prompt_that_is_too_long_has_both_numbers_as_claude_code_reads_them(post):
    answer = post(messages=[{"role": "user", "content": "x" * 5000}], max_tokens=5)
    found = re.search(r"prompt is too long\D*(\d+) tokens > (\d+)", answer.json()["error"]["message"])
    assert int(found[1]) > 5000 > int(found[2]) > 100


def test_errors_have_the_apis_form(byte_model):
    with serving(*byte_model, api_key="secret", max_body=1000) as server:

        def error(key="secret", path="", header="x-api-key", content=None, **body):
            body = {"messages": [USER], "max_tokens": 2, **body}
            options = dict(json=body) if content is None else dict(content=content)
            answer = httpx.post(f"{server.address}/v1/messages{path}", headers={header: key}, **options, timeout=60)
            assert answer.status_code == 200 or answer.json()["type"] == "error"
            return answer.status_code, answer.json().get("error", {}).get("type")

        assert error() == error(key="Bearer secret", header="Authorization") == (200, None)
        assert error(key="other") == error(header="x-key") == (401, "authentication_error")
        assert error(model="other") == (404, "not_found_error") == error(path="/batches")
        assert error(content="{}") == (415, "invalid_request_error")
        assert error(system="x" * 1000) == (413, "request_too_large")
        assert error(path="/count_tokens", max_tokens=None)[0] == 200
        assert httpx.post(f"{server.address}/v1/responses", json={}).json()["error"]["type"] == "authentication_error"
        server.service.is_ending = True
        assert error() == (503, "overloaded_error")


def events_of(text):
    """Return the events of a stream, after Anthropic's types have taken them."""
    events = named_events(text)
    for event in events:
        EVENT.validate_python(event)
    return events


def rebuilt(events):
    """Return the message that the events make, as Anthropic's client does."""
    message, texts = None, []
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
                assert message["content"] == [] and message["stop_reason"] is None
            case "content_block_start":
                assert event["index"] == len(texts)
                message["content"].append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                assert event["index"] == len(texts) - 1
                texts[-1] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "text":
                    block["text"] = texts[-1]
                elif texts[-1]:
                    block["input"] = from_json(texts[-1], allow_partial=True)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def without_ids(message):
    """Return a message without the parts that differ between two messages with the same text."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": None, "content": content, "usage": message["usage"]["output_tokens"]}
