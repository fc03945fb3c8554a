"""What clients send beside what a text needs: the server ignores it, says so, and takes back all that it has said."""
# ruff: noqa: E402 (importorskip comes first)

import gzip
import json
import logging
import time

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron.serving import engine_client
from granite4_neuron.serving.apis.chat.protocol import ChatBody, parse
from granite4_neuron.serving.apis.messages.body import MessagesBody
from granite4_neuron.serving.apis.responses.body import ResponsesBody
from granite4_neuron.serving.apis.strict import Ignored
from test.support.serving import MODEL, serving

HI = {"role": "user", "content": "Say hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "look", "parameters": SCHEMA}
CUSTOM = {"name": "look", "input_schema": SCHEMA}


def history(name="look", arguments="{}", **fields):
    """Return a chat with a call and its result."""
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], **fields}
    return {"messages": [HI, said, {"role": "tool", "tool_call_id": "c", "content": "an error"}]}


def chat(**fields):
    return {"messages": [HI], **fields}


def said(**fields):
    return chat(messages=[HI, {"role": "assistant", "content": "Hi.", **fields}, HI])


ANSWERED = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "an error"}]}
PLAIN = said()
CHATS = [
    (chat(verbosity="high", store=True, user="u", new={"a": [1]}), chat(), "new store user verbosity"),
    (chat(reasoning_effort="xhigh", stream_options={"include_usage": True, "more": 1}), chat(), "more"),
    (chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Say hi", "image_url": None}]}]), chat(), ""),
    (chat(messages=[{**HI, "role": "msg", "name": "n", "cache_control": {}}]), chat(), "cache_control name"),
    (chat(tools=[{"type": "web_search"}, {"type": "custom", "custom": {}}]), chat(), "tool:custom tool:web_search"),
    (chat(tools=[{**TOOL, "eager": 1}], tool_choice={"type": "auto"}), chat(tools=[TOOL]), "eager"),
    (said(provider_specific_fields={"refusal": None}, thinking_blocks=[], annotations=5), PLAIN, None),
    (said(reasoning_details=[{"type": "reasoning.text", "text": "t"}], reasoning={"a": 1}), PLAIN, "reasoning_details"),
    (said(content=[{"type": "refusal", "refusal": "Hi."}, {"type": "thinking", "thinking": "t"}]), PLAIN, None),
    (said(content=None), said(content=""), ""),
    (history(arguments='{"a": "x", "b": "y'), history(arguments='{"a": "x"}'), ""),
    (history(arguments="[1]"), history(), ""),
    (history(arguments='{"a" 1}'), history(), ""),
    (history(arguments='{"a":' * 9999), history(arguments="{}"), ""),
    (history("functions.look:0 <?>"), history("functions.look:0 <?>"), ""),
    (history(content=""), history(), ""),
    # A turn that was interrupted before its call had a result goes on.
    ({"messages": [*history()["messages"][:2], HI]}, {"messages": [*history(content="")["messages"][:2], HI]}, ""),
]
RESPONSES = [
    ({"client_metadata": {}, "text": {"verbosity": "low"}, "store": True, "include": ["x"]}, chat(), None),
    ({"text": {"format": {"type": "text", "schema": None}}, "reasoning": {"effort": None}}, chat(), ""),
    ({"tools": [FLAT, {"type": "web_search"}, {"type": "namespace", "tools": [FLAT]}]}, chat(tools=[TOOL]), None),
    ({"input": [{**HI, "id": "m", "status": "done"}, {"type": "web_search_call", "id": "w"}]}, chat(), None),
    (
        {
            "input": [
                HI,
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "an error"},
            ]
        },
        history("patch", '{"input": "+"}'),
        "",
    ),
    (
        {
            "input": [
                HI,
                {"type": "function_call", "call_id": "c", "name": "a:b", "arguments": '{"a": "x'},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "an error"}],
                },
            ]
        },
        history("a:b", "{}"),
        "",
    ),
]
MESSAGES = [
    (
        {
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": []},
            "mcp_servers": [],
            "metadata": {},
        },
        chat(),
        "context_management mcp_servers metadata",
    ),
    ({"messages": [{"role": "ctx", "content": "a"}, {"role": "msg", "content": "b"}]}, None, ""),
    ({"tools": [{**CUSTOM, "type": None}, {"type": "web_search_20250305", "name": "w"}]}, chat(tools=[TOOL]), None),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Say hi", "citations": None}]}]}, chat(), ""),
    (
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "w", "input": {}},
                        {"type": "tool_use", "id": "c", "name": "a:b", "input": None},
                    ],
                },
                ANSWERED,
            ]
        },
        history("a:b"),
        "block:server_tool_use",
    ),
]
WHOLE = {
    ChatBody: ({}, CHATS),
    ResponsesBody: ({"input": "Say hi"}, RESPONSES),
    MessagesBody: ({"messages": [HI], "max_tokens": 4}, MESSAGES),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_changes_no_text_is_ignored_and_named(byte_server, kind):
    maker = byte_server.service.maker
    required, cases = WHOLE[kind]
    for fields, plain, names in cases:
        ignored = Ignored()
        body = parse(kind, json.dumps({**required, **fields}).encode(), 100, ignored)
        prompt = maker.chat_tokens(body if kind is ChatBody else body.chat)
        if plain is not None:
            assert prompt == maker.chat_tokens(ChatBody.model_validate(plain)), fields
        if names is not None:
            assert sorted(ignored.names) == names.split(), fields


def test_names_of_tools_have_the_longest_that_an_api_takes_and_there_may_be_many(byte_server):
    names = [f"mcp__{'a' * 110}__{number}" for number in range(300)]
    body = {"messages": [HI], "max_tokens": 4, "tools": [{**CUSTOM, "name": name} for name in names]}
    shown = parse(MessagesBody, json.dumps(body).encode(), 100).chat.shown_tools
    assert [tool.function.name for tool in shown] == names


def poster(server):
    """Return a function that posts a body to a path of the server and returns the response."""

    def send(path, body, **options):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **options}
        return httpx.post(f"{server.address}/v1/{path}", content=content, headers=headers, timeout=60)

    return send


@pytest.fixture
def post(byte_server):
    return poster(byte_server)


@pytest.fixture
def server_of_two_names(byte_model):
    with serving(*byte_model, aliases=["small"]) as server:
        yield server


def test_a_model_has_several_names(server_of_two_names):
    """Agents name a second, small model."""
    post = poster(server_of_two_names)
    listed = httpx.get(f"{server_of_two_names.address}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in listed] == [MODEL, "small"]
    fields = {"prompt": "a", "messages": [HI], "input": "a"}
    for path, field in (("completions", "prompt"), ("chat/completions", "messages"), ("responses", "input")):
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        answer = post(path, {"model": "small", field: fields[field], limit: 1})
        assert answer.json()["model"] == "small"
    body = {"messages": [HI], "max_tokens": 1}
    assert post("messages", {"model": "small", **body}).json()["model"] == "small"
    assert post("messages", {"model": "other", **body}).status_code == 404


def test_what_is_ignored_is_in_a_header_and_once_in_the_log(post, caplog):
    with caplog.at_level(logging.WARNING):
        answers = [post("completions", {"prompt": "a", "max_tokens": 1, "unheard_of": 1}) for _ in range(2)]
    assert [answer.headers["x-ignored-fields"] for answer in answers] == ["unheard_of"] * 2
    assert [record.message for record in caplog.records if "unheard_of" in record.message] == [
        "Requests to /v1/completions have what changes nothing here: unheard_of."
    ]


BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    "body, encoding, status, message",
    [
        (b"\xef\xbb\xbf" + BODY, None, 200, ""),
        (BODY.decode().encode("utf-16"), None, 200, ""),
        (BODY.decode().encode("utf-32-be"), None, 200, ""),
        (gzip.compress(BODY), "gzip", 200, ""),
        (gzip.compress(BODY)[:-9], "gzip", 400, "its end is missing"),
        (BODY, "gzip", 400, "Content-Encoding is gzip, and the body is not"),
        (gzip.compress(b" " * 2**21), "gzip", 413, "--max-body"),
        (BODY, "br", 415, "Content-Encoding is br"),
        (b"\xff\xfea", None, 400, "begins like utf-16"),
    ],
    ids=["BOM", "UTF-16", "UTF-32", "gzip", "gzip cut off", "no gzip", "gzip bomb", "brotli", "UTF-16 cut off"],
)
def test_bodies_in_other_encodings(post, body, encoding, status, message):
    answer = post("completions", body, **({"Content-Encoding": encoding} if encoding else {}))
    assert answer.status_code == status and message in answer.text


def test_what_other_servers_have_is_named(post):
    for path, what in (("embeddings", "embeddings"), ("images/generations", "images"), ("audio/speech", "audio")):
        answer = post(path, {})
        assert answer.status_code == 404 and f"has no {what}" in answer.json()["error"]["message"]


MOST = 10_000_000
LIMITED = {
    "completions": {"prompt": [5] * 4090, "max_tokens": MOST, "min_tokens": 100},
    "chat/completions": {"messages": [{"role": "user", "content": "a" * 4050}], "max_completion_tokens": MOST},
    "responses": {"input": "a" * 4050, "max_output_tokens": MOST},
    "messages": {"messages": [{"role": "user", "content": "a" * 4050}], "max_tokens": MOST},
}
REASONS = {"responses": '"reason": "max_output_tokens"', "messages": '"stop_reason": "model_context_window_exceeded"'}


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", LIMITED)
def test_more_new_tokens_than_fit_are_cut(post, path):
    more = {"ignore_eos": True, "seed": 1, "logit_bias": {"65": 100}}
    for stream in (False, True):
        answer = post(path, {**LIMITED[path], **more, "stream": stream})
        assert answer.status_code == 200
        assert REASONS.get(path, '"finish_reason": "length"') in answer.text


@pytest.mark.parametrize("path", LIMITED)
def test_a_stream_begins_at_once_and_says_that_it_waits(post, monkeypatch, byte_server, path):
    monkeypatch.setattr(engine_client, "PAUSE_SECONDS", 0.01)
    step = byte_server.engine.step
    monkeypatch.setattr(byte_server.engine, "step", lambda: time.sleep(0.1) or step())
    body = {**LIMITED[path], "stream": True}
    address = f"{byte_server.address}/v1/{path}"
    with httpx.stream("POST", address, json=body, timeout=60) as answer:
        assert byte_server.service.engine.num_requests == 1, "the headers are there before the text"
        assert answer.status_code == 200 and answer.headers["x-accel-buffering"] == "no"
        first, *_ = answer.iter_text()
    assert first.startswith('event: ping\ndata: {"type": "ping"}\n\n' if path == "messages" else ":\n\n")


NOTE = {"type": "object", "properties": {"meta": {"type": "array", "uniqueItems": True}}, "required": ["meta"]}


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"parallel_tool_calls": False}, {"strict": True}, {"tool_choice": "allowed"}],
    ids=str,
)
def test_a_tool_whose_schema_is_no_grammar_is_free_if_it_is_not_strict(post, caplog, hasty, fields):
    note = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
    look = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": "strict" in fields}}
    body = {**chat(tools=[note, look]), "max_tokens": 50, "logit_bias": hasty, "seed": 1, **fields}
    body.pop("strict", None)
    if fields.get("tool_choice") == "allowed":
        named = [{"type": "function", "function": {"name": "note"}}]
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    answer = post("chat/completions", body)
    assert answer.status_code == 200, answer.text
    note["function"]["strict"] = True
    answer = post("chat/completions", body)
    message = "the schema of the arguments of note cannot be used (meta: uniqueItems is not supported); change it"
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_log_probabilities_of_parts_of_a_character_have_their_bytes(post):
    asked = {"structured_outputs": {"choice": ["é 日"]}, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    [choice] = post("chat/completions", {**chat(), **asked}).json()["choices"]
    *tokens, _ = choice["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == "é 日"
    assert [token["token"] for token in tokens] == [r"\xc3", r"\xa9", " ", r"\xe6", r"\x97", r"\xa5"]
    legacy = {**asked, "logprobs": 2, "prompt": "a", "top_logprobs": None}
    [choice] = post("completions", legacy).json()["choices"]
    assert choice["logprobs"]["tokens"][:2] == [r"\xc3", r"\xa9"]


CALLS = {
    "chat/completions": {**chat(tools=[TOOL]), "tool_choice": "required"},
    "responses": {"input": "Say hi", "tools": [FLAT], "tool_choice": "required"},
    "messages": {"messages": [HI], "tools": [CUSTOM], "tool_choice": {"type": "any"}},
}


@pytest.mark.parametrize("path", CALLS)
def test_a_call_that_is_cut_off_in_its_head_is_no_text(post, path):
    """One token is a byte here."""
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    for most in (1, 5, 20):
        for stream in (False, True):
            answer = post(path, {**CALLS[path], limit: most, "stream": stream})
            assert answer.status_code == 200
            assert "<" not in answer.text and "name" not in answer.text.replace('"name": "look"', "")
