"""Tools and documents on the server: transformers' prompts, and calls that OpenAI's and LangChain's clients read.

The model is random. It calls tools because a grammar forces it to.
"""
# ruff: noqa: E402 (importorskip comes first)

import json
from typing import ClassVar, Literal

import pytest
import torch

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

from pydantic import BaseModel, Field

from granite4_neuron import load
from granite4_neuron.engine import Output
from granite4_neuron.generation.answer_formats import GRANITE
from granite4_neuron.generation.tool_calls import CLOSE, OPEN
from granite4_neuron.serving.apis.chat.protocol import ChatBody
from granite4_neuron.serving.apis.chat.tool_answers import CallsOfAnswer
from test.support.serving import MODEL, serving

USER = {"role": "user", "content": "What is the weather in Rome?"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get-weather", "description": "Look.", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
PARAMETERS = {"get-weather": CITY, "time": {"type": "object", "additionalProperties": False}}


@pytest.fixture(scope="module")
def server(byte_server):
    return byte_server


@pytest.fixture
def ending(hasty):
    """Return options with which the model ends its answer."""
    return dict(temperature=1, logit_bias=hasty, max_tokens=800)


@pytest.fixture
def post(server):
    def send(**body):
        return httpx.post(f"{server.address}/v1/chat/completions", json={"messages": [USER], **body}, timeout=60)

    return send


def requests_of(server, body):
    maker = server.service.maker
    return maker.constrained(maker.chat_requests(ChatBody.model_validate_json(json.dumps(body))))


def spelled(name, arguments):
    return f'{OPEN}\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n{CLOSE}'


def allows(model, request, text):
    """Return whether the request's grammar allows this text as its answer."""
    tokens = [*model[1].encode(text), 1]
    return request.constraint is None or request.constraint.count_allowed(tokens) == len(tokens)


def check_calls(calls):
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])


class TestPrompts:
    CALL: ClassVar = {"name": "get-weather", "arguments": {"city": 'R"é\n', "days": None}}
    TALK = (
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": CALL, "id": "a"}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        {"role": "tool", "content": "warm", "tool_call_id": "b"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL, "id": "c"}] * 2},
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    )
    DOCUMENTS = ({"doc_id": 1, "title": "Röme", "text": "It\nrains."}, {"doc_id": 2, "text": "It <rains>."})

    def sent(self, **body):
        """Return the body of a request with this conversation, where calls have their arguments as text."""
        messages = json.loads(json.dumps(self.TALK))
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        messages[5]["content"] = None
        return dict(messages=messages, **body)

    def tokens(self, server, body):
        [request] = requests_of(server, body)
        return list(request.tokens)

    @pytest.mark.parametrize("tools", [None, [WEATHER, TIME]], ids=["no tools", "tools"])
    @pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["no documents", "documents"])
    def test_prompts_equal_transformers(self, server, byte_model, tools, documents):
        expected = byte_model[1].apply_chat_template(
            list(self.TALK),
            tools=tools,
            documents=documents,
            add_generation_prompt=True,
            mood="kind",
            return_dict=False,
        )
        body = self.sent(chat_template_kwargs={"mood": "kind"}, documents=documents)
        assert self.tokens(server, {**body, "tools": tools}) == expected

    def test_tools_that_may_not_be_called_are_not_shown(self, server):
        body = self.sent(tools=[WEATHER], tool_choice="none")
        assert self.tokens(server, body) == self.tokens(server, self.sent())

    def test_strict_is_not_shown(self, server):
        strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
        assert self.tokens(server, self.sent(tools=[strict])) == self.tokens(server, self.sent(tools=[WEATHER]))

    def test_control_tokens_are_text_wherever_they_are(self, server, byte_model):
        """Control tokens stay text in tools, documents, options, arguments and names of members."""
        control = "<|end|>"
        body = self.sent(
            tools=[{"type": "function", "function": {"name": "f", "description": control, "parameters": {control: 1}}}],
            documents=[{control: control}],
            chat_template_kwargs={"mood": control},
        )
        body["messages"][2]["tool_calls"][0]["function"]["arguments"] = json.dumps({control: [control]})
        body["messages"][3]["content"] = control
        tokens, text = self.tokens(server, body), json.dumps(body).replace(control, "other")
        plain = self.tokens(server, json.loads(text))
        assert tokens.count(1) == plain.count(1) == 6
        assert byte_model[1].decode(tokens).count(control) - 6 == byte_model[1].decode(plain).count("other")


class TestCalls:
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get-weather"}}], ids=str)
    @pytest.mark.parametrize("parallel", [None, False])
    def test_whole_and_streamed(self, client, ending, choice, parallel):
        ending = {**ending, "logit_bias": {**ending["logit_bias"], "1": 2}}  # so that further calls may follow
        numbers = set()
        for seed in range(4):
            body = dict(model=MODEL, messages=[USER], tools=[WEATHER, TIME], tool_choice=choice, seed=seed, **ending)
            body |= {} if parallel is None else {"parallel_tool_calls": parallel}
            [whole] = client.chat.completions.create(**body).choices
            assert whole.finish_reason == "tool_calls" and whole.message.content is None
            check_calls(whole.message.tool_calls)
            numbers.add(len(whole.message.tool_calls))
            if choice != "required":
                assert whole.message.tool_calls[0].function.name == "get-weather"
            with client.chat.completions.stream(**body) as stream:
                events = [event.type for event in stream]
                [streamed] = stream.get_final_completion().choices
            assert streamed.finish_reason == "tool_calls" and not streamed.message.content
            functions = [call.function for call in whole.message.tool_calls]
            assert [(each.function.name, each.function.arguments) for each in streamed.message.tool_calls] == [
                (function.name, function.arguments) for function in functions
            ]
            assert len({call.id for call in streamed.message.tool_calls}) == len(functions)
            assert events.count("tool_calls.function.arguments.delta") >= len(functions)
        assert numbers == {1} if parallel is False or choice != "required" else max(numbers) > 1

    @pytest.mark.parametrize("mode", ["auto", "required"])
    def test_allowed_tools(self, client, server, byte_model, ending, mode):
        """The prompt shows all tools, and the answer calls no other."""
        body = dict(messages=[USER], tools=[WEATHER, TIME])
        narrow = {**body, "tool_choice": allowed("time", mode=mode)}
        requests = [requests_of(server, each)[0] for each in (narrow, body)]
        assert list(requests[0].tokens) == list(requests[1].tokens) and requests[1].constraint is None
        for name, text in (("time", ""), ("get-weather", ""), ("time", "I look.")):
            call = text + spelled(name, {"city": "Rome"} if name == "get-weather" else {})
            may_follow = allows(byte_model, requests[0], call + "\n" * (not text) + call)
            assert may_follow == (name == "time" and (mode == "auto" or not text))
        [choice] = client.chat.completions.create(model=MODEL, seed=1, **narrow, **ending).choices
        assert bool(choice.message.tool_calls) == (mode == "required")
        check_calls(choice.message.tool_calls or ())
        [one] = requests_of(server, {**body, "tool_choice": {"type": "function", "function": {"name": "time"}}})
        call = spelled("time", {})
        assert allows(byte_model, one, call) and not allows(byte_model, one, call + "\n" + call)

    @pytest.mark.parametrize(
        "parameters",
        [
            None,
            {},
            {"type": "object"},
            {"type": "object", "properties": {}, "required": []},
            {"title": "Time", "description": "None.", "properties": {}, "$defs": {"City": {"type": "string"}}},
            {"type": "object", "properties": {}, "additionalProperties": False},
            {"anyOf": [{"type": "object"}]},
        ],
        ids=str,
    )
    def test_a_tool_without_arguments_has_none(self, server, byte_model, parameters):
        tool = {"type": "function", "function": {"name": "time", "parameters": parameters}}
        [request] = requests_of(server, dict(messages=[USER], tools=[tool], tool_choice="required"))
        assert allows(byte_model, request, spelled("time", {}))
        assert not allows(byte_model, request, spelled("time", {"now": True}))

    @pytest.mark.parametrize(
        "parameters",
        [
            {"type": "object", "additionalProperties": True},
            {"type": "object", "properties": {}, "additionalProperties": {"type": "boolean"}},
            {"$ref": "#/$defs/Any", "$defs": {"Any": {"type": "object", "properties": {"now": {}}}}},
            {"anyOf": [{"type": "object", "properties": {"now": {}}}]},
            {"type": "object", "required": ["now"]},
        ],
        ids=str,
    )
    def test_a_tool_may_declare_arguments_in_other_ways(self, server, byte_model, parameters):
        tool = {"type": "function", "function": {"name": "time", "parameters": parameters}}
        [request] = requests_of(server, dict(messages=[USER], tools=[tool], tool_choice="required"))
        assert allows(byte_model, request, spelled("time", {"now": True}))

    def test_calls_have_whitespace_only_if_requested(self, server, byte_model):
        """Also if the answer may be JSON."""
        body = dict(messages=[USER], tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"})
        for option, may_have in (({}, False), ({"structured_outputs": {"disable_any_whitespace": False}}, True)):
            [request] = requests_of(server, {**body, **option})
            call = spelled("get-weather", {"city": "Rome"})
            assert allows(byte_model, request, call)
            assert allows(byte_model, request, call.replace('"Rome"', '\n\n"Rome"')) == may_have

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_strict_tool_is_called_by_its_schema(self, server, byte_model, strict):
        """Also if the answer may be text and other tools are not strict."""
        tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
        [request] = requests_of(server, dict(messages=[USER], tools=[tool, TIME]))
        assert allows(byte_model, request, "I look." + spelled("get-weather", {"city": "Rome"}))
        wrong = (spelled("get-weather", {"city": 5}), spelled("get-weather", {}), spelled("unknown", {}))
        assert [allows(byte_model, request, "I look." + call) for call in wrong] == [not strict] * 3

    def test_openai_parses_strict_tools(self, client, ending):
        class GetWeather(BaseModel):
            city: str = Field(max_length=9)
            unit: Literal["C", "F"]

        tool = openai.pydantic_function_tool(GetWeather)
        for seed in range(3):
            answer = client.chat.completions.parse(
                model=MODEL, messages=[USER], tools=[tool], tool_choice="required", seed=seed, **ending
            )
            calls = answer.choices[0].message.tool_calls
            assert calls and all(isinstance(call.function.parsed_arguments, GetWeather) for call in calls)

    def test_a_turn_after_the_calls(self, client, ending):
        """The client sends the message that it got, and the tools' answers."""
        body = dict(model=MODEL, tools=[WEATHER, TIME], seed=1, **ending)
        message = client.chat.completions.create(messages=[USER], tool_choice="required", **body).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        said = {"role": "assistant", "tool_calls": [call.model_dump() for call in message.tool_calls]}
        [choice] = client.chat.completions.create(messages=[USER, said, *results], **body).choices
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None

    def test_text_that_is_no_call_is_the_content(self, post, ending):
        """Also with a strict tool, whose grammar allows any text before a call."""
        strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
        for tool in (WEATHER, strict):
            body = dict(tools=[tool], seed=1, **{**ending, "max_tokens": 12})
            [choice] = post(**body).json()["choices"]
            [free] = post(**body, tool_choice="none").json()["choices"]
            assert "tool_calls" not in choice["message"]
            if tool is WEATHER:
                assert choice["message"] == free["message"]

    def test_a_json_answer_or_calls(self, post, ending):
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
        seen = set()
        for bias in (20, -20):
            biases = {**ending["logit_bias"], str(byte_token("<")): -bias, str(byte_token('"')): bias}
            body = dict(tools=[WEATHER], response_format=format, seed=1, **{**ending, "logit_bias": biases})
            [choice] = post(**body).json()["choices"]
            seen.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                assert json.loads(choice["message"]["content"]) in ("a", "b")
        assert seen == {"stop", "tool_calls"}

    def test_log_probabilities_and_choices(self, post, ending):
        body = dict(tools=[TIME], tool_choice="required", n=3, seed=1, logprobs=True, top_logprobs=3, **ending)
        answer = post(**body).json()
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "tool_calls"
            assert "".join(each["token"] for each in choice["logprobs"]["content"]).startswith(OPEN)
        chunks = [json.loads(line[6:]) for line in post(**body, stream=True).text.splitlines() if line[6:7] == "{"]
        reports = [
            each
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == 1
            for each in choice["logprobs"]["content"]
        ]
        assert reports == answer["choices"][1]["logprobs"]["content"]


def byte_token(character):
    """Return the byte tokenizer's token for a printable ASCII character."""
    return 6 + ord(character) - 33


def test_a_call_has_one_entry_in_an_event():
    """A call has one entry however much of it one step gives, because some clients read only the first."""
    text = spelled("time", {"a": "b"}) + spelled("other", {})
    for cut in (text.index("{"), text.index('{"a"') + 4, len(text) - 20):
        answer = CallsOfAnswer(GRANITE.stream([]))
        calls = {}
        for piece, reason in ((text[:cut], None), (text[cut:], "stop")):
            entries = answer.delta([Output(0, 5, piece, reason)]).get("tool_calls", ())
            assert len({entry["index"] for entry in entries}) == len(entries)
            for entry in entries:
                call = calls.setdefault(entry["index"], {"name": entry["function"].get("name"), "arguments": ""})
                call["arguments"] += entry["function"]["arguments"]
        assert list(calls.values()) == [
            {"name": "time", "arguments": '{"a": "b"}'},
            {"name": "other", "arguments": "{}"},
        ]


class TestScripted:
    """The model's answers are scripted."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_calls_and_malformed_calls(self, client, say, stream):
        good = f'{OPEN}\n{{"name": "time", "arguments": {{"a": [1, "}}"]}}}}\n{CLOSE}'
        for text, content, calls, reason in (
            (f"Hm.\n{good}\n{good}", "Hm.", 2, "tool_calls"),
            (f"{OPEN}\nno JSON\n{CLOSE}", f"{OPEN}\nno JSON\n{CLOSE}", 0, "stop"),
            ("no call", "no call", 0, "stop"),
        ):
            say(text)
            body = dict(model=MODEL, messages=[USER], tools=[TIME], max_tokens=300)
            if stream:
                with client.chat.completions.stream(**body) as events:
                    [choice] = events.get_final_completion().choices
            else:
                [choice] = client.chat.completions.create(**body).choices
            assert choice.finish_reason == reason and choice.message.content == content
            functions = [call.function for call in choice.message.tool_calls or ()]
            assert [(each.name, each.arguments) for each in functions] == [("time", '{"a": [1, "}"]}')] * calls

    def test_a_call_that_is_cut_off_is_the_same_whole_and_streamed(self, post, say):
        answer = "Hm. " + spelled("time", {"a": "b"}).replace(CLOSE, "") + spelled("time", {})
        say(answer)
        seen = set()
        for length in (*range(1, len(answer), 5), len(answer) + 1):
            body = dict(tools=[TIME], max_tokens=length)
            [whole] = post(**body).json()["choices"]
            lines = post(**body, stream=True).text.splitlines()
            chunks = [json.loads(line[6:])["choices"][0] for line in lines if line[6:7] == "{"]
            content, calls = "", []
            for delta in (chunk["delta"] for chunk in chunks):
                content += delta.get("content", "")
                for piece in delta.get("tool_calls", ()):
                    if "id" in piece:
                        calls.append([piece["function"]["name"], ""])
                    calls[piece["index"]][1] += piece["function"]["arguments"]
            functions = [call["function"] for call in whole["message"].get("tool_calls", ())]
            assert [[each["name"], each["arguments"]] for each in functions] == calls
            assert (whole["message"]["content"] or "") == content
            assert whole["finish_reason"] == chunks[-1]["finish_reason"]
            seen.add((len(calls), whole["finish_reason"]))
        assert seen == {(0, "length"), (1, "length"), (2, "length"), (2, "tool_calls")}

    def test_without_tools_a_call_is_text(self, client, say):
        text = f'{OPEN}\n{{"name": "time", "arguments": {{}}}}\n{CLOSE}'
        say(text)
        [choice] = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=300).choices
        assert choice.message.content == text and choice.finish_reason == "stop"


class TestLangChain:
    @pytest.fixture
    def model(self, server, ending):
        return langchain_openai.ChatOpenAI(
            model=MODEL, base_url=f"{server.address}/v1", api_key="none", seed=2, **ending
        )

    def test_bind_tools(self, model):
        def get_weather(city: str, days: int = 1) -> str:
            """Look out of the window."""

        bound = model.bind_tools([get_weather], tool_choice="any")
        answer = bound.invoke("What is the weather?")
        assert answer.tool_calls and {call["name"] for call in answer.tool_calls} == {"get_weather"}
        assert all(isinstance(call["args"]["city"], str) for call in answer.tool_calls)
        pieces = list(bound.stream("What is the weather?"))
        total = pieces[0]
        for piece in pieces[1:]:
            total += piece
        assert [call["args"] for call in total.tool_calls] == [call["args"] for call in answer.tool_calls]

    @pytest.mark.parametrize("strict", [None, True])
    def test_with_structured_output(self, model, strict):
        class Weather(BaseModel):
            """The weather."""

            city: str
            degrees: int

        answer = model.with_structured_output(Weather, method="function_calling", strict=strict).invoke("Rome?")
        assert isinstance(answer, Weather)


@pytest.fixture(scope="module")
def plain():
    """Serve the bundled model."""
    with serving(*load(dtype=torch.float32)) as server:
        yield server.address


class TestATemplateThatShowsNone:
    @pytest.mark.parametrize("choice", ["auto", None, "allowed_tools"])
    def test_tools_are_refused(self, plain, choice):
        choice = allowed("time") if choice == "allowed_tools" else choice
        body = dict(messages=[USER], tools=[TIME], tool_choice=choice)
        for path in ("v1/chat/completions", "tokenize"):
            fields = body if path != "tokenize" else dict(messages=[USER], tools=[TIME])
            error = httpx.post(f"{plain}/{path}", json=fields, timeout=60).json()["error"]
            assert error["param"] == "tools" and "chat template does not show tools to the model" in error["message"]

    def test_documents_are_refused(self, plain):
        body = dict(messages=[USER], documents=[{"text": "It rains."}])
        answer = httpx.post(f"{plain}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400 and "does not show documents" in answer.json()["error"]["message"]

    def test_a_required_call_follows_the_grammar(self, plain):
        body = dict(messages=[USER], tools=[TIME], max_tokens=200)
        answer = httpx.post(f"{plain}/v1/chat/completions", json={**body, "tool_choice": "required"}, timeout=60)
        [call] = answer.json()["choices"][0]["message"]["tool_calls"][:1]
        assert call["function"]["name"] == "time" and json.loads(call["function"]["arguments"]) == {}
        answer = httpx.post(f"{plain}/v1/chat/completions", json={**body, "tool_choice": "none"}, timeout=60)
        assert answer.status_code == 200


FUNCTION = {"type": "function", "function": {"name": "f"}}


def allowed(*names, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


REFUSED = {
    "name": (dict(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools.0.function.name: "),
    "twice": (dict(tools=[FUNCTION, FUNCTION]), "tools: each must have a name of its own"),
    "nothing to choose": (dict(tools=[{"type": "web_search"}], tool_choice="required"), "tool_choice: it needs tools"),
    "unknown choice": (
        dict(tools=[FUNCTION], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice: there is no tool g in tools",
    ),
    "unknown choices": (
        dict(tools=[FUNCTION], tool_choice=allowed("f", "g")),
        "tool_choice: there is no tool g in tools",
    ),
    "a choice without a name": (
        dict(tools=[FUNCTION], tool_choice=allowed(None)),
        'tool_choice: it must be "none", "auto", "required", {"',
    ),
    "no choices": (
        dict(tools=[FUNCTION], tool_choice=allowed()),
        'tool_choice: it must be "none", "auto", "required", {"',
    ),
    "a schema that is only itself": (
        dict(tools=[{"function": {"name": "f", "parameters": {"$ref": "#"}, "strict": True}}]),
        "the schema of the arguments of f cannot be used (it has a $ref that leads back to itself",
    ),
    "mode of choices": (
        dict(tools=[FUNCTION], tool_choice=allowed("f", mode="none")),
        'tool_choice: it must be "none"',
    ),
    "a choice of no kind": (dict(tools=[FUNCTION], tool_choice="f"), 'tool_choice: it must be "none"'),
    "schema": (
        dict(tools=[{"function": {"name": "f", "parameters": {"type": "x"}, "strict": True}}]),
        "tools: the schema of the arguments of f cannot be used (Invalid type: x)",
    ),
    "an expression beside tools": (
        dict(tools=[FUNCTION], structured_outputs={"regex": "a"}),
        "structured_outputs: with tools and tool_choice auto, it must be JSON",
    ),
    "calls of a user": (
        dict(messages=[{**USER, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}]),
        "messages.0: only an assistant's message may have tool_calls",
    ),
    "documents": (dict(documents=["a"]), "documents.0: "),
    "many documents": (dict(documents=[{}] * 1025), "documents: list should have at most 1024 items"),
    "a large document": (dict(documents=[{"text": "a" * 500_000}]), "documents has 500004 characters"),
    "options": (dict(chat_template_kwargs={"messages": []}), "messages is a variable of the chat template that has"),
    "an option that the template refuses": (
        dict(chat_template_kwargs={"mood": 5}),
        "this checkpoint's chat template does not render",
    ),
}


@pytest.mark.parametrize("fields, message", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(post, fields, message):
    answer = post(**fields)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
