"""A Nemotron model's answers on the server: reasoning and tool calls, whole and streamed, in all three APIs.

The model's answers are scripted, or forced by a grammar.
"""
# ruff: noqa: E402 (importorskip comes first)

import json
import re
from functools import partial

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

from granite4_neuron.generation.answer_formats import GRANITE_3, NEMOTRON_NANO_2
from granite4_neuron.serving.apis.chat.protocol import ChatBody
from test.support import thinking
from test.support.serving import MODEL, serving
from test.support.tool_template import (
    GRANITE_3_2_TEMPLATE,
    GRANITE_3_3_TEMPLATE,
    GRANITE_3_TEMPLATE,
    NEMOTRON_NANO_2_TEMPLATE,
    listed,
    with_parameters,
)

USER = {"role": "user", "content": "What is the weather in Rome?"}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = with_parameters("weather", city='R"ome', days="3")
ARGUMENTS = {"city": 'R"ome', "days": 3}
TAG = {"triggers": ["<a"], "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}]}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "special tokens"])
def model(request, tmp_path_factory):
    """Return (runtime, tokenizer). The marks of thoughts and calls are ordinary texts or special tokens."""
    return thinking.thinking_model(
        tmp_path_factory.mktemp("nemotron"), thinking.NEMOTRON_MARKS if request.param else ()
    )


@pytest.fixture(scope="module")
def server(model):
    with serving(*model, max_length=2048) as server:
        yield server


@pytest.fixture
def say(model, monkeypatch):
    """Return a function that sets what the model answers."""
    return partial(thinking.say, monkeypatch, model[1])


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def chat(client, **options):
    """Return the message of a chat, after comparing it with the streamed one."""
    options = dict(model=MODEL, messages=[USER], **options)
    choice = client.chat.completions.create(**options).choices[0]
    joined, calls, reason = {"content": "", "reasoning_content": ""}, [], None
    for chunk in client.chat.completions.create(**options, stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        joined["content"] += delta.content or ""
        joined["reasoning_content"] += getattr(delta, "reasoning_content", "")
        for call in delta.tool_calls or ():
            if call.function.name:
                calls.append([call.function.name, ""])
            calls[-1][1] += call.function.arguments
    message = choice.message
    assert joined["content"] == (message.content or "") and reason == choice.finish_reason
    assert joined["reasoning_content"] == getattr(message, "reasoning_content", "")
    assert calls == [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    return choice


@pytest.mark.slow_cases
def test_a_thought_and_a_text(client, say):
    say("It is\nsunny.\n</think>\n\nSunny.")
    choice = chat(client)
    assert (choice.message.reasoning_content, choice.message.content) == ("It is\nsunny.", "Sunny.")
    assert choice.finish_reason == "stop"


def test_a_text_without_a_thought(client, say):
    say("Sunny.</x>")
    message = chat(client, extra_body=NO_THOUGHT).message
    assert message.content == "Sunny.</x>" and not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("thought", ["", "I look.\n</think>\n"])
def test_calls(client, say, thought):
    say(f"{thought}One moment.\n{CALL}\n{CALL}")
    choice = chat(client, tools=[TOOL], extra_body={} if thought else NO_THOUGHT)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment."
    assert getattr(choice.message, "reasoning_content", "") == thought.partition("\n")[0]
    calls = [call.function for call in choice.message.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", ARGUMENTS)] * 2


@pytest.mark.slow_cases
def test_a_call_ends_a_thought(client, say):
    say(f"I look.\n{CALL}\n{CALL}")
    choice = chat(client, tools=[TOOL])
    assert choice.message.reasoning_content == "I look." and not choice.message.content
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [ARGUMENTS] * 2
    assert choice.finish_reason == "tool_calls"
    assert chat(client).message.reasoning_content == f"I look.\n{CALL}\n{CALL}", "there are no tools"


@pytest.mark.slow_cases
@pytest.mark.parametrize("most", [4, 12, 16, 40, 60, 75, 90, 101])
def test_cut_off_answers_are_the_same_whole_and_streamed(client, say, most):
    say(f"I look.\n</think>\nOne moment.\n{CALL}")
    choice = chat(client, tools=[TOOL], max_tokens=most)
    assert choice.finish_reason == "length" or choice.message.tool_calls
    if most == 4:
        assert choice.message.reasoning_content == "I lo" and not choice.message.content


def test_calls_that_a_grammar_makes(client):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        limits = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
        tool = {"type": "function", "function": {"name": "weather", "parameters": limits}}
        options = dict(tools=[tool], tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=1)
        answer = chat(client, **options, max_tokens=200, extra_body=NO_THOUGHT)
        [call] = answer.message.tool_calls
        assert json.loads(call.function.arguments)["days"] in (1, 2) and answer.finish_reason == "tool_calls"


def allows(server, model, text, **body):
    maker = server.service.maker
    prepared = maker.chat_requests(ChatBody.model_validate({"messages": [USER], **body}))
    [request] = maker.constrained(prepared)
    tokens = [*model[1].encode(text, add_special_tokens=False), 1]
    return request.constraint.count_allowed(tokens) == len(tokens)


def test_a_structure_applies_to_the_text_after_the_thought(server, model):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for body, right, wrong in (
        ({"json_schema": schema}, '{"a": 1}', '{"a": true}'),
        ({"structured_outputs": {"regex": r"a/b\/[0-9]+"}}, "a/b/12", "a/b/"),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'n"o', "maybe"),
        ({"structured_outputs": {"structural_tag": TAG}}, "say <a>1</a>", "say <a>x</a>"),
        ({"tools": [TOOL], "tool_choice": "required"}, CALL, "text"),
    ):
        assert allows(server, model, f"so\n</think>\n\n{right}", **body)
        assert not allows(server, model, f"so\n</think>\n\n{wrong}", **body)
        assert not allows(server, model, f"so\n{wrong}", **body)
        assert allows(server, model, f"so\n{right}", **body) == (right == CALL), "a call ends a thought"
        assert allows(server, model, right, **body, **NO_THOUGHT)


@pytest.mark.parametrize("are_special", [False, True], ids=["texts", "special tokens"])
@pytest.mark.parametrize(
    "format, template", [(GRANITE_3, GRANITE_3_TEMPLATE), (NEMOTRON_NANO_2, NEMOTRON_NANO_2_TEMPLATE)]
)
def test_lists_of_calls(tmp_path, monkeypatch, format, template, are_special):
    """Granite 3's and Nemotron Nano v2's."""
    marks = [format.marks.open, *filter(None, [format.marks.close])]
    model = thinking.thinking_model(tmp_path, marks if are_special else (), template)
    with serving(*model, max_length=2048) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        arguments = json.dumps(ARGUMENTS)
        required = dict(tools=[TOOL], tool_choice="required")
        written = listed(format.marks, ("weather", arguments))
        assert allows(server, model, written, **required) and not allows(server, model, "text", **required)
        begin = "I look.\n</think>\n" if format.thoughts else ""
        calls = listed(format.marks, ("weather", arguments), ("weather", arguments))
        thinking.say(monkeypatch, model[1], f"{begin}One moment.\n{calls}")
        choice = chat(client, tools=[TOOL])
        assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment."
        assert getattr(choice.message, "reasoning_content", "") == begin.partition("\n")[0]
        assert [call.function.arguments for call in choice.message.tool_calls] == [arguments] * 2
        for most in (1, 12, 20, 30, 36, 50, 80, 100):
            cut = chat(client, tools=[TOOL], max_tokens=most).message
            shown = (cut.content or "") + getattr(cut, "reasoning_content", "")
            assert not any(mark[:5] in shown for mark in marks)
        body = dict(model=MODEL, input=USER["content"], tools=[{"type": "function", **FUNCTION, "strict": False}])
        *_, text, one, two = client.responses.create(**body).output
        assert text.content[0].text == "One moment." and [one.arguments, two.arguments] == [arguments] * 2
        *_, last = client.responses.create(**body, stream=True)
        assert [getattr(item, "arguments", None) for item in last.response.output[-2:]] == [arguments] * 2
        tool = {"name": "weather", "input_schema": FUNCTION["parameters"]}
        body = dict(model=MODEL, messages=[USER], max_tokens=500, tools=[tool])
        answer = httpx.post(f"{server.address}/v1/messages", json=body, timeout=60).json()
        assert [block.get("input") for block in answer["content"][-2:]] == [ARGUMENTS] * 2
        streamed = httpx.post(f"{server.address}/v1/messages", json={**body, "stream": True}, timeout=60).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
        parts = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
        assert "".join(parts) == arguments * 2


SAID_BY_GRANITE = {
    "3.2": (GRANITE_3_2_TEMPLATE, (), "Here is my thought process: I look.\n\nHere is my response:\nSunny."),
    "3.3": (GRANITE_3_3_TEMPLATE, (), "<think>I look.\n</think>\n\n<response>Sunny.</response>"),
    "3.3, special tokens": (
        GRANITE_3_3_TEMPLATE,
        ("<think>", "</think>", "<response>", "</response>"),
        "<think>I look.</think><response>Sunny.</response>",
    ),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("template, special, said", SAID_BY_GRANITE.values(), ids=SAID_BY_GRANITE)
def test_thoughts_that_the_model_begins(tmp_path, monkeypatch, template, special, said):
    """In all APIs, whole and streamed. A completion has the text as it is."""
    model = thinking.thinking_model(tmp_path, special, template)
    with serving(*model, max_length=2048) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        thinking.say(monkeypatch, model[1], said)
        for tools in ({}, {"tools": [TOOL]}):
            message = chat(client, reasoning_effort="high", **tools).message
            assert (message.reasoning_content, message.content) == ("I look.", "Sunny.")
        for most in range(1, len(said), 5):
            cut = chat(client, max_tokens=most).message
            shown = getattr(cut, "reasoning_content", "").rstrip(), (cut.content or "").rstrip()
            assert all(map(str.startswith, ("I look.", "Sunny."), shown))
        thought, answer = client.responses.create(model=MODEL, input=USER["content"]).output
        assert (thought.type, thought.content[0].text, answer.content[0].text) == ("reasoning", "I look.", "Sunny.")
        *_, last = client.responses.create(model=MODEL, input=USER["content"], stream=True)
        assert [item.content[0].text for item in last.response.output] == ["I look.", "Sunny."]
        usage = last.response.usage
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        body = dict(model=MODEL, messages=[USER], max_tokens=500)
        content = httpx.post(f"{server.address}/v1/messages", json=body, timeout=60).json()["content"]
        assert content[0] == {"type": "thinking", "thinking": "I look.", "signature": ""}
        assert content[1:] == [{"type": "text", "text": "Sunny."}]
        streamed = httpx.post(f"{server.address}/v1/messages", json={**body, "stream": True}, timeout=60).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == "I look."
        assert "".join(delta.get("text", "") for delta in deltas) == "Sunny."
        prompt = "<|start_of_role|>user<|end_of_role|>Hi<|end|><|start_of_role|><|assistant|>"
        options = dict(model=MODEL, prompt=prompt, max_tokens=200, extra_body={"split_special_tokens": False})
        written = re.sub("|".join(special), "", said) if special else said
        assert client.completions.create(**options).choices[0].text == written
        switched = ({"reasoning_effort": "low"}, {"thinking": {"type": "enabled"}, "max_tokens": 5})
        for path, switch in zip(("/v1/chat/completions", "/v1/messages"), switched, strict=True):
            assert prompt_of(server, path, dict(messages=[USER], **switch)).startswith("<|system|>")
            plain = dict(messages=[USER], max_tokens=5)
            assert not prompt_of(server, path, plain).startswith("<|system|>")
        asked = prompt_of(server, "/v1/responses", dict(input="Hi", reasoning={"effort": "low"}))
        assert asked.startswith("<|system|>")


def test_responses(client, say):
    say(f"I look.\n</think>\nOne moment.\n{CALL}")
    options = dict(model=MODEL, input=USER["content"], tools=[{"type": "function", **FUNCTION, "strict": False}])
    response = client.responses.create(**options)
    thought, text, call = response.output
    assert thought.type == "reasoning" and thought.content[0].text == "I look." and thought.id.startswith("rs_")
    assert text.content[0].text == "One moment." and json.loads(call.arguments) == ARGUMENTS
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    events = list(client.responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "I look."
    [done] = (event.text for event in events if event.type == "response.reasoning_text.done")
    assert done == "I look."
    streamed = [{**item.to_dict(), "id": "", "call_id": ""} for item in events[-1].response.output]
    assert streamed == [{**item.to_dict(), "id": "", "call_id": ""} for item in response.output]


def test_messages(server, say):
    say(f"I look.\n</think>\nOne moment.\n{CALL}")
    tool = {"name": "weather", "input_schema": FUNCTION["parameters"]}
    body = dict(model=MODEL, messages=[USER], max_tokens=500, tools=[tool])
    path = f"{server.address}/v1/messages"
    content = httpx.post(path, json=body, timeout=60).json()["content"]
    assert content[0] == {"type": "thinking", "thinking": "I look.", "signature": ""}
    assert content[1] == {"type": "text", "text": "One moment."} and content[2]["input"] == ARGUMENTS
    streamed = httpx.post(path, json={**body, "stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "I look."
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["thinking", "text", "tool_use"]
    assert begun[0]["thinking"] == ""


def prompt_of(server, api, body):
    from granite4_neuron.serving.apis.endpoints import BY_PATH

    [request] = BY_PATH[api].requests(server.service.maker, BY_PATH[api].body.model_validate(body)).requests
    return server.service.texts.texts(request.tokens)


@pytest.mark.parametrize(
    "api, body",
    [
        ("/v1/chat/completions", dict(messages=[USER], reasoning_effort="none")),
        ("/v1/chat/completions", dict(messages=[USER], **NO_THOUGHT)),
        ("/v1/messages", dict(messages=[USER], max_tokens=5, thinking={"type": "disabled"})),
        ("/v1/responses", dict(input="Hi", reasoning={"effort": "none"})),
    ],
)
def test_a_request_without_thoughts(server, api, body):
    assert prompt_of(server, api, body).endswith("<|assistant|><think></think>")
    switches = ("reasoning_effort", "chat_template_kwargs", "thinking", "reasoning")
    with_thoughts = {name: value for name, value in body.items() if name not in switches}
    assert prompt_of(server, api, with_thoughts).endswith("<|assistant|><think>\n")


def test_earlier_thoughts_are_shown_to_the_model(server):
    asked = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    plain = {"role": "assistant", "content": "and"}
    of_chat = {"role": "assistant", "content": "it", "reasoning_content": "so"}
    blocks = [{"type": "thinking", "thinking": "so", "signature": "x"}, {"type": "text", "text": "it"}]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    for api, body in (
        ("/v1/chat/completions", dict(messages=[asked[0], of_chat, plain, asked[1]])),
        (
            "/v1/messages",
            dict(messages=[asked[0], {"role": "assistant", "content": blocks}, plain, asked[1]], max_tokens=5),
        ),
        ("/v1/responses", dict(input=[asked[0], thought, {"role": "assistant", "content": "it"}, plain, asked[1]])),
    ):
        said = "<|assistant|><think>so</think>it<|end|><|assistant|><think></think>and<|end|>"
        expected = f"<|user|>a<|end|>{said}<|user|>b<|end|><|assistant|><think>\n"
        assert prompt_of(server, api, body) == expected
