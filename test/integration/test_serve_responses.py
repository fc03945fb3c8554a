"""OpenAI's Responses API: the same prompts and options as a chat's, and answers as OpenAI's own client reads them."""
# ruff: noqa: E402 (importorskip comes first)

import json
import sys

import pytest
from pydantic import BaseModel, Field, TypeAdapter

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
responses = pytest.importorskip("openai.types.responses", reason="OpenAI's client is too old")

from granite4_neuron.generation.tool_calls import OPEN
from granite4_neuron.serving.apis.chat.protocol import ChatBody
from granite4_neuron.serving.apis.responses.body import ResponsesBody
from test.support.serving import MODEL, named_events
from test.support.tool_template import spelled

QUESTION = "What is the weather in Rome?"
HUGE = "a number in the place of this text"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get-weather", "description": "Look.", "parameters": CITY, "strict": True}
TIME = {"name": "time"}
TOOLS = [{"type": "function", **tool} for tool in (WEATHER, TIME)]
CHAT_TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, TIME)]
TALK = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"},
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "get-weather", "arguments": '{"city": "R"}'},
    {"type": "function_call", "call_id": "b", "name": "time", "arguments": ""},
    {"type": "function_call_output", "call_id": "a", "output": "sunny"},
    {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
    {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "one"},
    {"role": "assistant", "content": "It is sunny."},
    {"role": "user", "content": "Thanks."},
]
CALLS = {
    "a": {"id": "a", "function": {"name": "get-weather", "arguments": '{"city": "R"}'}},
    "b": {"id": "b", "function": {"name": "time", "arguments": "{}"}},
    "c": {"id": "c", "function": {"name": "time", "arguments": "{}"}},
}
CHAT_TALK = [
    {"role": "system", "content": "Speak Latin."},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALLS["a"], CALLS["b"]]},
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "assistant", "tool_calls": [CALLS["c"]]},
    {"role": "tool", "tool_call_id": "c", "content": "one"},
    {"role": "assistant", "content": "It is sunny."},
    {"role": "user", "content": "Thanks."},
]
SAMPLING = dict(
    temperature=0.5,
    top_p=0.9,
    top_k=-1,
    min_p=0.1,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    logit_bias={"70": 5},
    seed=3,
    stop=["x"],
    stop_token_ids=[9],
    min_tokens=2,
    ignore_eos=True,
)
LOGPROBS = "message.output_text.logprobs"
SCHEMA = {"name": "city", "schema": CITY, "strict": True}


@pytest.fixture
def post(byte_server):
    def send(path="responses", **body):
        return httpx.post(f"{byte_server.address}/v1/{path}", json=body, timeout=60)

    return send


@pytest.fixture
def client(byte_server):
    with openai.OpenAI(base_url=f"{byte_server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


class TestTheRequestIsAChats:
    """The engine gets the same request as from a chat."""

    @pytest.mark.parametrize(
        ("asked", "chat"),
        [
            (dict(instructions="Speak Latin.", input=TALK, tools=TOOLS), dict(messages=CHAT_TALK, tools=CHAT_TOOLS)),
            (dict(**SAMPLING, max_output_tokens=7), dict(**SAMPLING, max_tokens=7)),
            (dict(include=[LOGPROBS], top_logprobs=2), dict(logprobs=True, top_logprobs=2)),
            (dict(top_logprobs=2), {}),
            (dict(tools=TOOLS, tool_choice="none"), dict(tools=CHAT_TOOLS, tool_choice="none")),
            (
                dict(tools=TOOLS, tool_choice={"type": "function", "name": "time"}),
                dict(tools=CHAT_TOOLS, tool_choice={"type": "function", "function": {"name": "time"}}),
            ),
            (
                dict(
                    tools=TOOLS,
                    parallel_tool_calls=False,
                    tool_choice={
                        "type": "allowed_tools",
                        "mode": "required",
                        "tools": [{"type": "function", "name": "time"}],
                    },
                ),
                dict(
                    tools=CHAT_TOOLS,
                    parallel_tool_calls=False,
                    tool_choice={
                        "type": "allowed_tools",
                        "allowed_tools": {
                            "mode": "required",
                            "tools": [{"type": "function", "function": {"name": "time"}}],
                        },
                    },
                ),
            ),
            (
                dict(text={"format": {"type": "json_schema", **SCHEMA}, "verbosity": "medium"}),
                dict(response_format={"type": "json_schema", "json_schema": SCHEMA}),
            ),
            (dict(text={"format": {"type": "json_object"}}), dict(response_format={"type": "json_object"})),
        ],
        ids=["talk", "sampling", "logprobs", "no logprobs", "none", "function", "allowed", "schema", "json"],
    )
    def test_the_engine_gets_the_request_of_a_chat(self, byte_server, asked, chat):
        maker = byte_server.service.maker
        body = ResponsesBody.model_validate_json(json.dumps({"input": QUESTION, **asked}))
        messages = [{"role": "user", "content": QUESTION}]
        expected = maker.chat_requests(ChatBody.model_validate_json(json.dumps({"messages": messages, **chat})))
        prepared = maker.chat_requests(body.chat)
        assert list(prepared.requests) == list(expected.requests)
        kinds = [None if each is None else (each.kind, each.value) for each in (prepared.structure, expected.structure)]
        assert kinds[0] == kinds[1]

    def test_fields_that_change_nothing(self, post):
        plain = post(input=QUESTION, max_output_tokens=5).json()
        fields = dict(
            store=True,
            background=False,
            truncation="disabled",
            metadata={"run": "1"},
            user="me",
            reasoning={"effort": "low", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            prompt_cache_key="k",
            service_tier="auto",
            previous_response_id=None,
        )
        answer = post(input=QUESTION, max_output_tokens=5, **fields).json()
        assert answer["output"][0]["content"] == plain["output"][0]["content"]
        assert answer["store"] is False and answer["metadata"] == {"run": "1"}

    @pytest.mark.parametrize(
        "fields",
        [
            dict(metadata={"x": [HUGE]}),
            dict(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "number", "maximum": HUGE}}}),
            dict(text={"format": {"type": "text"}, "verbosity": HUGE}),
            dict(tool_choice={"type": "function", "name": "time", "x": HUGE}, tools=TOOLS),
            dict(tools=[{**TOOLS[1], "parameters": {"maximum": HUGE}}]),
            dict(reasoning={"effort": HUGE, "summary": None}),
            *({name: HUGE} for name in ("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")),
        ],
        ids=lambda fields: next(iter(fields)),
    )
    def test_numbers_that_json_cannot_repeat_are_cut(self, byte_server, fields):
        """JSON can write 1e400, and readers make it infinity, which JSON cannot write."""
        body = json.dumps(dict(input=QUESTION, max_output_tokens=3, **fields)).replace(json.dumps(HUGE), "1e400")
        url, headers = f"{byte_server.address}/v1/responses", {"Content-Type": "application/json"}
        whole = httpx.post(url, content=body, headers=headers, timeout=60)
        assert whole.status_code == 200, whole.text
        streamed = httpx.post(url, content=f'{{"stream": true, {body[1:]}', headers=headers, timeout=60)
        [field, *_] = fields
        for answer in whole.json(), named_events(streamed.text)[-1]["response"]:
            assert answer["status"] == "incomplete" and repr(sys.float_info.max) in json.dumps(answer[field])


class TestAnswers:
    def test_whole_and_streamed(self, post, say):
        """Wherever the answer ends, its events make the whole answer, and OpenAI's types take all of it."""
        answer = f"Hm.\n{spelled('time', '{}')}\n{spelled('get-weather', json.dumps({'city': 'R'}))} So."
        say(answer)
        seen = set()
        second = answer.rindex(OPEN)
        for length in (2, 20, second - 15, second - 8, second + 5, second + 65, len(answer) - 1, len(answer) + 1):
            body = dict(input=QUESTION, tools=TOOLS[1:], max_output_tokens=length, include=[LOGPROBS])
            whole = post(**body).json()
            responses.Response.model_validate(whole)
            events = events_of(post(**body, stream=True).text)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
            assert events[-1]["type"] == f"response.{whole['status']}"
            assert rebuilt(events) == without_ids(whole["output"]) == without_ids(events[-1]["response"]["output"])
            assert {**whole, **CHANGING} == {**events[-1]["response"], **CHANGING}
            assert whole["incomplete_details"] == (None if length > len(answer) else {"reason": "max_output_tokens"})
            statuses = [item["status"] for item in whole["output"]]
            assert statuses == ["completed"] * (len(statuses) - 1) + [whole["status"]]
            seen.add(tuple(item["type"] for item in whole["output"]))
        kinds = ("message", "function_call", "function_call", "message")
        assert seen == {kinds[:1], kinds[:2], kinds[:3], kinds}, "none has a text that is a part of a mark"

    def test_the_order_of_events(self, post, say):
        say(f"A {spelled('time', '{}')}")
        body = dict(input=QUESTION, tools=[{"type": "function", "name": "time"}], stream=True)
        kinds = [event["type"].removeprefix("response.") for event in events_of(post(**body).text)]
        deltas = ("output_text.delta", "function_call_arguments.delta")
        assert [kind for at, kind in enumerate(kinds) if kind not in deltas or kinds[at - 1] != kind] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]

    def test_an_empty_answer_is_an_empty_text(self, post, say):
        say("")
        for tools in ([], TOOLS[1:]):
            [item] = post(input=QUESTION, tools=tools).json()["output"]
            assert item["content"][0]["text"] == "" and item["status"] == "completed"

    def test_without_tools_a_call_is_text(self, client, say):
        say(spelled("time", "{}"))
        assert client.responses.create(model=MODEL, input=QUESTION).output_text == spelled("time", "{}")

    def test_log_probabilities_are_a_chats(self, post, say):
        options = dict(seed=1, temperature=1)
        chat = post(
            "chat/completions",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=9,
            logprobs=True,
            top_logprobs=2,
            **options,
        ).json()
        body = dict(input=QUESTION, max_output_tokens=9, top_logprobs=2, include=[LOGPROBS], **options)
        part = post(**body).json()["output"][0]["content"][0]
        assert part["text"] == chat["choices"][0]["message"]["content"]
        expected = chat["choices"][0]["logprobs"]["content"]
        assert [each["logprob"] for each in part["logprobs"]] == [each["logprob"] for each in expected]
        assert len(part["logprobs"][0]["top_logprobs"]) == 2
        streamed = [
            event for event in events_of(post(**body, stream=True).text) if event["type"].endswith("text.delta")
        ]
        assert [each for event in streamed for each in event["logprobs"]] == part["logprobs"]

    def test_log_probabilities_are_those_of_texts(self, post, say):
        say(f"A {spelled('time', '{}')} B")
        body = dict(input=QUESTION, tools=TOOLS[1:], include=[LOGPROBS])
        first, _, last = post(**body).json()["output"]
        assert [each["token"] for each in first["content"][0]["logprobs"]] == ["A"]
        assert [each["token"] for each in last["content"][0]["logprobs"]] == ["B", "<|end|>"]

    def test_usage(self, post):
        body = dict(input=QUESTION * 3, max_output_tokens=3)
        [first, second] = [post(**body).json()["usage"] for _ in range(2)]
        tokens = post("chat/completions", messages=[{"role": "user", "content": QUESTION * 3}], max_tokens=3).json()
        assert first["input_tokens"] == second["input_tokens"] == tokens["usage"]["prompt_tokens"]
        assert second["input_tokens_details"]["cached_tokens"] > 0
        assert (second["output_tokens"], second["total_tokens"]) == (3, second["input_tokens"] + 3)


class TestTheClient:
    def test_parse(self, client, hasty):
        class City(BaseModel):
            city: str = Field(max_length=12)
            days: int

        options = dict(model=MODEL, input=QUESTION, text_format=City, temperature=1)
        answer = client.responses.parse(**options, extra_body={"logit_bias": hasty, "seed": 1})
        assert isinstance(answer.output_parsed, City)
        with client.responses.stream(**options, extra_body={"logit_bias": hasty, "seed": 1}) as stream:
            assert stream.get_final_response().output_parsed == answer.output_parsed

    def test_calls(self, client, hasty):
        options = dict(model=MODEL, input=QUESTION, tools=TOOLS[:1], tool_choice="required", temperature=1)
        with client.responses.stream(**options, extra_body={"logit_bias": hasty}) as stream:
            calls = stream.get_final_response().output
        assert calls and all(call.name == "get-weather" and "city" in call.parsed_arguments for call in calls)
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
        said = [{"role": "user", "content": QUESTION}, *(call.to_dict() for call in calls), *results]
        for item in said:
            item.pop("parsed_arguments", None)
        answer = client.responses.create(
            model=MODEL, input=said, tools=TOOLS[:1], tool_choice="none", max_output_tokens=3
        )
        assert answer.output[0].type == "message"


def test_a_stream_that_fails(post, say):
    say("abc", None)
    *_, last = events = events_of(post(input=QUESTION, stream=True).text)
    assert last["type"] == "response.failed" and last["response"]["error"]["message"] == "the logits are wrong."
    assert last["sequence_number"] == len(events) - 1 and last["response"]["status"] == "failed"
    assert post(input=QUESTION).json()["error"]["message"] == "the logits are wrong."


REFUSED = {
    "previous": (dict(previous_response_id="resp_1"), "previous_response_id: this server stores no responses"),
    "conversation": (dict(conversation="conv_1"), "conversation: this server stores no responses"),
    "background": (dict(background=True), "background: this server supports only false"),
    "prompt": (dict(prompt={"id": "p"}), "prompt: this server does not support it; give input"),
    "choices": (dict(n=2), "n: this server supports only 1"),
    "built-in choice": (dict(tool_choice={"type": "web_search"}), 'tool_choice: it must be "none"'),
    "no tools": (dict(tools=[{"type": "web_search"}], tool_choice="required"), "tool_choice: it needs tools"),
    "tool": (dict(tools=[{"type": "function", "name": "a b"}]), "tools.0.name: "),
    "tools": (dict(tools=TOOLS[1:] * 2), "tools: each must have a name of its own"),
    "image": (
        dict(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        'input.0.content: this server supports no part of the type "input_image"',
    ),
    "file": (
        dict(input=[{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file"}]}]),
        'input.0.output: this server supports no part of the type "input_file"',
    ),
    "item": (dict(input=[{"type": "letter"}]), 'input.0: this server supports no item of the type "letter"'),
    "reference": (dict(input=[{"type": "item_reference", "id": "m"}]), "input.0: this server stores no responses"),
    "call": (
        dict(input=[{"type": "function_call", "name": "f", "arguments": "{}"}]),
        "input.0.call_id: field required",
    ),
    "nothing": (dict(input=[]), "input: list should have at least 1 item"),
    "only reasoning": (dict(input=TALK[2:3]), "input: list should have at least 1 item"),
    "no input": (dict(input=None), "input: field required"),
    "number": (dict(input=5), "input: "),
    "format": (dict(text={"format": {"type": "xml"}}), 'text.format: it must be {"type": "text"}'),
    "schema": (
        dict(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}),
        "text.format: the JSON schema cannot be used",
    ),
    "long": (dict(input="x" * 5000), "the prompt is too long: input has 50"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("fields, message", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(post, fields, message):
    answer = post(**{"input": QUESTION, **fields})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


# Fields that differ between two answers with the same text.
CHANGING = dict(id=None, created_at=None, completed_at=None, output=None, usage=None)
EVENT = TypeAdapter(responses.ResponseStreamEvent)


def events_of(text):
    """Return the events of a stream, after OpenAI's types have taken them."""
    events = named_events(text)
    for event in events:
        EVENT.validate_python(event)
    return events


def rebuilt(events):
    """Return the output that the events make, and check what they repeat."""
    items, texts = [], []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
        elif "item_id" in event:
            assert event["output_index"] == len(items) - 1 and event["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            texts[-1] += event["delta"]
        elif kind == "output_text.done":
            assert event["text"] == texts[-1]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts[-1] and event["name"] == items[-1]["name"]
        elif kind == "output_item.done":
            item = event["item"]
            said = item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
            assert said == texts[-1] and item["id"] == items[-1]["id"]
            items[-1] = item
    return without_ids(items)


def without_ids(items):
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]
