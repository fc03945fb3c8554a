"""Structured outputs of the server, judged by OpenAI's and LangChain's clients and by jsonschema."""
# ruff: noqa: E402 (importorskip comes first)

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

from pydantic import BaseModel, Field

from granite4_neuron.serving.engine_client import Generation
from test.support.serving import MODEL

USER = {"role": "user", "content": "Who is it?"}


class Person(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["a", "b"]
    ages: list[int] = Field(max_length=3)


@pytest.fixture(scope="module")
def server(byte_server):
    return byte_server


@pytest.fixture
def post(server):
    def send(path, **body):
        return httpx.post(f"{server.address}/v1/{path}", json=body, timeout=60)

    return send


class TestClients:
    def test_openai_parses(self, client, hasty):
        for seed in range(4):
            options = dict(temperature=1, seed=seed, logit_bias=hasty)
            answer = client.chat.completions.parse(model=MODEL, messages=[USER], response_format=Person, **options)
            assert isinstance(answer.choices[0].message.parsed, Person)
            assert answer.choices[0].finish_reason == "stop"

    def test_openai_parses_a_stream(self, client, hasty):
        options = dict(temperature=1, seed=1, logit_bias=hasty)
        with client.chat.completions.stream(model=MODEL, messages=[USER], response_format=Person, **options) as stream:
            events = [event.type for event in stream]
            found = stream.get_final_completion().choices[0].message
        assert isinstance(found.parsed, Person) and "content.delta" in events
        whole = client.chat.completions.parse(model=MODEL, messages=[USER], response_format=Person, **options)
        assert found.content == whole.choices[0].message.content

    @pytest.mark.parametrize("method", ["json_schema", "json_mode"])
    def test_langchain(self, server, hasty, method):
        model = langchain_openai.ChatOpenAI(
            model=MODEL, base_url=f"{server.address}/v1", api_key="none", temperature=1, seed=2, logit_bias=hasty
        )
        schema = Person if method == "json_schema" else None
        answer = model.with_structured_output(schema, method=method).invoke("Who is it?")
        assert isinstance(answer, Person if method == "json_schema" else dict)


TAG = {"begin": "<", "schema": {"const": 1}, "end": ">"}
FORMATS = {
    "json": (dict(json=Person.model_json_schema()), lambda text: Person.model_validate_json(text)),
    "json as text": (dict(json=json.dumps(Person.model_json_schema())), lambda text: Person.model_validate_json(text)),
    "any object": (dict(json_object=True, regex=None), lambda text: isinstance(json.loads(text), dict)),
    "regex": (dict(regex="[a-f]{3,9}!"), lambda text: re.fullmatch("[a-f]{3,9}!", text)),
    "choice": (dict(choice=["yes", "no, never", "né 😀"]), lambda text: text in ("yes", "no, never", "né 😀")),
    "structural tag": (
        dict(
            structural_tag=json.dumps(
                {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"const": 1}, "end": ">"}]}
            )
        ),
        lambda text: re.fullmatch("([^<]|<1>)*", text, re.DOTALL),
    ),
    "grammar": (dict(grammar='start: "(" /[a-z]/ ")"'), lambda text: re.fullmatch(r"\([a-z]\)", text)),
}


@pytest.mark.parametrize("structure, check", FORMATS.values(), ids=FORMATS.keys())
def test_completions(post, hasty, structure, check):
    """Several prompts and choices, with log-probabilities and ignore_eos."""
    body = dict(prompt=["x", "yz"], n=2, temperature=1, seed=1, logit_bias=hasty, max_tokens=500, logprobs=4)
    answer = post("completions", **body, structured_outputs=structure, ignore_eos=True).json()
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop" and check(choice["text"])
        for token, value, top in zip(
            *(choice["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert value <= 0 and 1 <= len(top) <= 5 and top[token] == value


def test_texts_at_once_are_those_alone(post, hasty):
    """Structured and free texts, streamed and whole, are the same together and one by one."""
    bodies = [
        dict(prompt="x" * number, temperature=1, seed=number, logit_bias=hasty, max_tokens=90, **structure)
        for number, structure in enumerate(
            [*(dict(structured_outputs=structure) for structure, _ in FORMATS.values()), {}, {}], start=1
        )
    ]

    def streamed(body):
        lines = post("completions", **body, stream=True).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    alone = [post("completions", **body).json()["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(streamed, bodies)) == alone


def test_a_large_schema_is_served(post, hasty):
    properties = {f"property {number}": {"enum": [number, "é"]} for number in range(100)}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:9]}
    body = dict(messages=[USER], temperature=1, seed=1, logit_bias=hasty, max_tokens=1900)
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    [choice] = post("chat/completions", **body, response_format=format).json()["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)


COMPACT = '{"a": [1, 1]}'
PAIR = {"type": "object", "properties": {"a": {"const": [1, 1]}}, "required": ["a"]}


def test_whitespace_is_allowed_only_if_requested(post, byte_model):
    """Whitespace is allowed only if requested, also with a response_format, and in any object."""
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": PAIR, "strict": True}}
    newline = byte_model[1].encode("\n")[0]
    body = dict(prompt="x", max_tokens=90, logit_bias={newline: 100}, temperature=0)
    for structure in (dict(structured_outputs={"json": PAIR}), dict(response_format=format)):
        [choice] = post("completions", **body, **structure).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (COMPACT, "stop")
        structure["structured_outputs"] = {**structure.get("structured_outputs", {}), "disable_any_whitespace": False}
        [choice] = post("completions", **body, **structure).json()["choices"]
        assert choice["text"].startswith("{" + "\n" * 40 + '"')


REFUSED = {
    "whitespace of a text": (
        dict(structured_outputs={"regex": "a", "disable_any_whitespace": True}),
        "structured_outputs: disable_any_whitespace is true or false, and only for JSON",
    ),
    "whitespace of nothing": (
        dict(structured_outputs={"disable_any_whitespace": True}),
        "structured_outputs: it must have one of",
    ),
    "nothing beside a format": (
        dict(structured_outputs={}, response_format={"type": "json_object"}),
        "structured_outputs: it must have one of",
    ),
    "whitespace in words": (
        dict(structured_outputs={"json": {}, "disable_any_whitespace": "no"}),
        "structured_outputs: disable_any_whitespace is true or false",
    ),
    "format": (dict(response_format={"type": "xml"}), 'response_format: it must be {"type": "text"}'),
    "no schema": (dict(response_format={"type": "json_schema"}), "response_format: it must be"),
    "schema": (
        dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}),
        "response_format: the JSON schema cannot be used (Invalid type: foo)",
    ),
    "two": (dict(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs: it must have one of"),
    "none": (dict(structured_outputs={}), "structured_outputs: it must have one of"),
    "unknown": (dict(structured_outputs={"structural": "a"}), "structured_outputs: it must have one of"),
    "tag": (
        dict(response_format={"type": "structural_tag", "format": {"type": "any_text"}}),
        'response_format: the structural tag must have "structures"',
    ),
    "both": (
        dict(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        "response_format and structured_outputs exclude each other",
    ),
    "long": (dict(structured_outputs={"regex": "a" * 70_000}), "structured_outputs: the regular expression has 70,000"),
    "costly": (
        dict(structured_outputs={"json": {"type": "integer", "multipleOf": 99_999_989}}),
        "structured_outputs: the JSON schema cannot be used "
        "(it is nested too deep, or takes more than 4 seconds or 1 GiB)",
    ),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("fields, message", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(post, fields, message, stream):
    if stream and "json" in fields.get("structured_outputs", ()):
        pytest.skip("it takes seconds")
    answer = post("completions", prompt="x", stream=stream, **fields)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_a_grammar_that_fails_later_gives_an_error(post, monkeypatch):
    """A grammar that forces an endless text gives an error, also at the end of a stream, and behind tokens that the
    server reads together with it. Others are served.
    """
    structure, said = dict(grammar='start: "x" /[b-z]/ endless\nendless: "a" endless'), "the grammar allows no further"
    read = Generation.__anext__

    async def read_late(generation):
        while generation.unfinished:
            await asyncio.sleep(0.01)
        return await read(generation)

    for reader in (read, read_late):
        monkeypatch.setattr(Generation, "__anext__", reader)
        answer = post("completions", prompt="x", structured_outputs=structure)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        lines = post("completions", prompt="x", structured_outputs=structure, stream=True).text.splitlines()
        *events, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert said in last["error"]["message"]
        choices = [event["choices"][0] for event in events]
        assert re.fullmatch("x[b-z]a", "".join(choice["text"] for choice in choices))
        assert all(choice["finish_reason"] is None for choice in choices)
    assert post("completions", prompt="x", response_format={"type": "text"}, max_tokens=2).status_code == 200
