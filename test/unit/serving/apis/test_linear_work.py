"""The work for a body grows as its length does, whatever a client writes, and that for an answer, whatever the model
writes: counted in lines of this package that run, in characters that are copied, and in bytes that are held at once.
"""

import json
import tracemalloc
from contextlib import closing
from functools import partial

import pytest

pytest.importorskip("pydantic", reason="granite4-neuron[serve] is not installed")

from granite4_neuron.engine import Output
from granite4_neuron.errors import UserError
from granite4_neuron.generation.answer_formats import AnswerStream
from granite4_neuron.generation.tool_calls import ToolCallStream
from granite4_neuron.serving.apis.blocks import Block
from granite4_neuron.serving.apis.chat.answers import TokenTexts
from granite4_neuron.serving.apis.chat.protocol import parse
from granite4_neuron.serving.apis.endpoints import BY_PATH
from granite4_neuron.serving.apis.history import History
from granite4_neuron.serving.errors import RequestError, to_short_json
from granite4_neuron.serving.http.bodies import in_utf8
from granite4_neuron.serving.sequences import Limits, RequestBuilder
from granite4_neuron.system.sandbox.grammar_process import GrammarProcess, GrammarTooCostly
from test.support import thinking
from test.support.counting import steps_of
from test.support.tool_template import GRANITE_3_3_TEMPLATE, NEMOTRON_TEMPLATE, TOOL_TEMPLATE

USER = {"role": "user", "content": "Hi"}
MARKS = "<think></think><tool_call>|<response>"


@pytest.fixture(
    scope="module",
    params=[TOOL_TEMPLATE, NEMOTRON_TEMPLATE, GRANITE_3_3_TEMPLATE],
    ids=["Granite 4", "Nemotron", "Granite 3.3"],
)
def model(request, tmp_path_factory):
    return thinking.thinking_model(tmp_path_factory.mktemp("model"), template=request.param)


@pytest.fixture(scope="module")
def maker(model):
    with closing(RequestBuilder(*model, Limits(2**20, None, 2**10), names=())) as maker:
        yield maker


def of_chat(**fields):
    return "/v1/chat/completions", {"messages": [USER], **fields}


def function(**schema):
    return {"name": "f", "parameters": {"type": "object", **schema}}


def forced(schema):
    return of_chat(tools=[{"type": "function", "function": function(**schema)}], tool_choice="required")


def named(number, schema):
    return {f"p{index}": schema for index in range(number)}


def repeated(number):
    """Return a schema of objects that all have the members of one other."""
    each = {"$ref": "#/$defs/all", "properties": {"x": {"type": "integer"}}}
    return {"$defs": {"all": {"type": "object", "properties": named(number, {})}}, "properties": named(number, each)}


def chain(number):
    """Return definitions of which each is the next one."""
    return {f"p{i}": {"allOf": [{"$ref": f"#/$defs/p{i + 1}"}]} for i in range(number)} | {
        f"p{number}": {"type": "object"}
    }


def calls(number):
    made = {"type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2'}}
    called = {"role": "assistant", "content": "", "tool_calls": [made] * number}
    return of_chat(messages=[USER, called, *[{"role": "tool", "tool_call_id": "1", "content": "it"}] * number])


def items(number):
    of_each = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 3},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1'},
        {"type": "function_call_output", "call_id": "c", "output": "it"},
        {"type": "web_search_call", "id": "w"},
    ]
    return "/v1/responses", {"input": [USER, *of_each * number]}


def blocks(number):
    said = [
        {"type": "thinking", "thinking": "so " * 50, "signature": ""},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"x": [1]}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "it"}] * 2}
    turns = [{"role": "assistant", "content": said * number}, {"role": "user", "content": [result] * number}]
    system = [{"type": "text", "text": "be"}] * number
    return "/v1/messages", {"messages": [USER, *turns], "system": system, "max_tokens": 5}


BODIES = {
    "parts of a text": lambda n: of_chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a "}] * n}]),
    "messages": lambda n: of_chat(messages=[USER, {"role": "assistant", "content": "a</think>b"}] * n),
    "marks": lambda n: of_chat(messages=[{"role": "user", "content": MARKS * n}]),
    "marks of an answer": lambda n: of_chat(messages=[USER, {"role": "assistant", "content": MARKS * n}, USER]),
    "calls": calls,
    "unknown fields": lambda n: of_chat(**named(n, {"x": [1, None]})),
    "nulls": lambda n: of_chat(messages=[{**USER, **named(n, None)}]),
    "tools": lambda n: of_chat(
        tools=[{"type": "function", "function": {**function(), "name": f"f{i}"}} for i in range(n)]
    ),
    "required tools": lambda n: of_chat(
        tools=[{"type": "function", "function": {**function(), "name": f"f{i}"}} for i in range(n)],
        tool_choice="required",
    ),
    "a tool's parameters": lambda n: forced(dict(properties=named(n, {"type": "integer"}), required=[*named(n, {})])),
    "a tool's definitions": lambda n: forced(
        {"properties": named(n, {"type": "integer"}), "$defs": named(n, {"type": "integer", "minimum": 3})}
    ),
    "references": lambda n: forced(repeated(n)),
    "alternatives": lambda n: of_chat(json_schema={"anyOf": [{"type": "object", "properties": named(3, {})}] * n}),
    "a chain of references": lambda n: of_chat(json_schema={"$ref": "#/$defs/p0", "$defs": chain(n)}),
    "choices": lambda n: of_chat(structured_outputs={"choice": [f"a{i}" for i in range(n)]}),
    "stop strings": lambda n: of_chat(stop=["ab"] * n),
    "bad words": lambda n: of_chat(bad_words=["ab"] * n),
    "prompts": lambda n: ("/v1/completions", {"prompt": ["ab"] * n}),
    "tokens": lambda n: ("/v1/completions", {"prompt": [5] * n, "logit_bias": {str(i % 200): 1 for i in range(n)}}),
    "items of a response": items,
    "tools of a response": lambda n: (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", **function(), "name": f"f{i}"} for i in range(n)]},
    ),
    "blocks of messages": blocks,
    "tools of messages": lambda n: (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 5, "tools": [{"name": f"f{i}", "input_schema": {}} for i in range(n)]},
    ),
}


def prepare(maker, path, content):
    """Do what the server does with a body before a sequence runs, beside processes of their own; return a refusal."""
    api = BY_PATH[path]
    try:
        prepared = api.requests(maker, parse(api.body, in_utf8(content, "", 2**24), 2**20))
        if prepared.structure is not None:
            structure = prepared.structure
            if hasattr(structure, "grammar_of"):
                structure.grammar_of([tool.called() for tool in structure.value])
            else:
                maker.constrained(prepared)
    except (RequestError, UserError) as error:
        return str(error)
    return None


def work(maker, path, body):
    """Return the steps (see `steps_of`), and how many bytes were held at once."""
    content = json.dumps(body).encode()
    steps = steps_of(partial(prepare, maker, path, content), History)
    tracemalloc.start()
    prepare(maker, path, content)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return steps, most


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", BODIES)
def test_it_grows_as_the_body(maker, kind):
    path, body = BODIES[kind](2)
    prepare(maker, path, json.dumps(body).encode())  # what is kept from the first time on
    (steps, held), (more_steps, more_held) = (work(maker, *BODIES[kind](number)) for number in (60, 240))
    assert more_steps < 4.5 * steps
    assert more_held < 6 * held  # tables double


def test_costly_schemas_take_the_compiler_a_few_times(maker, monkeypatch):
    """While it compiles for one client, others wait."""
    tries = []

    def compile(process, kind, text, stop=None):
        tries.append(kind)
        raise GrammarTooCostly

    monkeypatch.setattr(GrammarProcess, "compile", compile)
    nested = {"type": "object", "properties": named(9, {"type": "integer"})}
    for body in (dict(json_schema=nested), forced({"properties": named(9, nested)})[1]):
        with pytest.raises(RequestError, match=r"cannot be used .*takes more than 4 seconds"):
            path, asked = of_chat(**body)
            api = BY_PATH[path]
            maker.constrained(api.requests(maker, parse(api.body, json.dumps(asked).encode(), 2**20)))
    tool = {"type": "function", "function": function()}
    tools = [{**tool, "function": {**tool["function"], "name": f"f{index}"}} for index in range(9)]
    path, asked = of_chat(tools=tools, tool_choice="required")
    tries.clear()
    with pytest.raises(RequestError, match=r"cannot be used .*takes more than 4 seconds"):
        maker.constrained(api.requests(maker, parse(api.body, json.dumps(asked).encode(), 2**20)))
    assert len(tries) == 1 + 4


ANSWERS = {  # the beginning of an answer, and what is repeated behind it
    "a thought": ("<think>", "so "),
    "a text": ("</think>", "so "),
    "calls": ("</think>", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'),
    "a call": ('</think><tool_call>\n{"name": "f", "arguments": {"x": "', "a "),
    "a value": ("</think><tool_call>\n<function=f>\n<parameter=x>\n", "a "),
    "parameters": ("</think><tool_call>\n<function=f>\n", "<parameter=x>\n1\n</parameter>\n"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", BY_PATH)
@pytest.mark.parametrize("kind", ANSWERS)
def test_it_grows_as_the_answer(model, maker, path, kind):
    """Whatever the model writes, an event costs the same behind much text as behind little."""
    of_chat_tools = [{"type": "function", "function": function()}]
    body = {
        "/v1/completions": {"prompt": "Hi"},
        "/v1/chat/completions": {"messages": [USER], "tools": of_chat_tools},
        "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **function()}]},
        "/v1/messages": {"messages": [USER], "max_tokens": 5, "tools": [{"name": "f", "input_schema": {}}]},
    }[path]
    api, (start, repeated) = BY_PATH[path], ANSWERS[kind]
    body = parse(api.body, json.dumps({**body, "stream": True}).encode(), 2**20)
    requests = api.requests(maker, body).requests
    texts = TokenTexts(model[1], 2**20)

    def stream(length):
        said = start + repeated * (length // len(repeated))
        answer = api.answer(texts, "m", requests, body)
        for at in range(0, len(said), 3):
            output = Output(0, 5, said[at : at + 3], "stop" if at + 3 >= len(said) else None)
            answer.add(0, [output])
            for event in answer.events(0, [output]):
                event.text(to_short_json)

    few, many = (steps_of(partial(stream, length), ToolCallStream, AnswerStream, Block) for length in (700, 2800))
    assert many < 6 * few
