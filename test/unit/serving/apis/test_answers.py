"""Answers of all APIs to whatever a model writes."""

import json
import math

import pytest
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine import Output, Request
from granite4_neuron.generation.tool_calls import CLOSE, OPEN
from granite4_neuron.serving.apis.chat.answers import TokenTexts
from granite4_neuron.serving.apis.endpoints import BY_PATH
from granite4_neuron.serving.apis.tools import arguments_of
from granite4_neuron.serving.errors import to_json, to_short_json
from test.support.checkpoints import save_byte_tokenizer
from test.support.tool_template import TOOL_TEMPLATE

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
MESSAGES = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
BODIES = {
    "/v1/chat/completions": {**MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"model": "m", "input": "x", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {**MESSAGES, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    "/v1/completions": {"model": "m", "prompt": "x"},
}
ARGUMENTS = [
    '{"x": [NaN, -Infinity, 1e999, -1e999, 0.1]}',
    '{"x": "a\nb\tc \\ud800 NaN", "x": 1}',
    f'{{"x": {"9" * 5000}, "y": ""}}',
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    save_byte_tokenizer(folder, TOOL_TEMPLATE)
    return TokenTexts(PreTrainedTokenizerFast.from_pretrained(folder), 100)


def strict(text):
    return json.loads(text, parse_constant=pytest.fail, parse_int=float)


def values_of(value, name):
    """Yield the values of this name, however deep."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and name in value:
        yield value[name]
    for child in children:
        yield from values_of(child, name)


@pytest.mark.parametrize("encode", [to_json, to_short_json])
def test_no_other_numbers_are_encoded(encode):
    with pytest.raises(ValueError):
        encode({"x": [math.inf]})


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["numbers", "strings", "digits"])
@pytest.mark.parametrize("call", ['{"name": "f", "arguments": %s}', '{"arguments": %s, "name": "f"}'])
def test_all_answers_are_strict_json(texts, call, arguments):
    text = f"{OPEN}\n{call % arguments}\n{CLOSE}"
    parts = [text[at : at + 7] for at in range(0, len(text), 7)]
    outputs = [Output(0, 5, part, "stop" if part is parts[-1] else None) for part in parts]
    expected = arguments_of(arguments)
    assert expected and strict(to_json(expected)) == expected
    for path, body in BODIES.items():
        api = BY_PATH[path]
        whole, streamed = (
            api.answer(texts, "m", [Request([5], 9)], api.body.model_validate_json(json.dumps(body))) for _ in range(2)
        )
        whole.add(0, outputs)
        answer = strict(to_json(whole.whole()))
        events = []
        for output in outputs:
            streamed.add(0, [output])
            events += streamed.events(0, [output])
        data = "".join(map(str, [*events, *streamed.last_events()]))
        said = [strict(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
        if path == "/v1/completions":
            assert answer["choices"][0]["text"] == text
            continue
        given = [*values_of(answer, "input"), *values_of(answer, "arguments")]
        name = {"/v1/messages": "partial_json", "/v1/responses": "delta"}.get(path, "arguments")
        pieces = "".join(each for each in values_of(said, name) if isinstance(each, str))
        strict(pieces)
        assert expected == arguments_of(pieces) and all(arguments_of(each) == expected for each in given) and given
