"""Schemas without keywords that llguidance does not take: the same values are valid. What cannot be said is named."""

import random
import sys
import time
from contextlib import closing

import pytest
import regex

from granite4_neuron.errors import UserError
from granite4_neuron.generation.equal_schemas import PATTERNS, equal_schema
from granite4_neuron.generation.structured_outputs import Grammars
from test.support.checkpoints import save_byte_tokenizer

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

TEXT, NUMBER = {"type": "string"}, {"type": "number"}
NAMED = {"$defs": {"E": {"enum": ["a", "b"], "title": "E", "type": "string"}}, "propertyNames": {"$ref": "#/$defs/E"}}
VALUES = [
    {},
    {"a": 1},
    {"a": 1, "b": 2},
    {"c": 1},
    {"xa": 1},
    {"a": "1"},
    [],
    [1],
    [1, 1],
    [None, None],
    [1, 2],
    "a",
    5,
]
EQUAL = [
    {"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER},
    {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": NUMBER},
    {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": NUMBER, "required": ["a"]},
    {"type": "object", "propertyNames": {**TEXT, "pattern": "^x"}, "additionalProperties": NUMBER},
    {"type": "object", **NAMED, "additionalProperties": NUMBER},
    {"type": "object", "properties": {"a": {"not": {}}}},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "array", "uniqueItems": False, "minContains": 2},
    {"anyOf": [{"type": "string", "format": "path"}, {"if": TEXT}, {"dependentRequired": {}}]},
    {"type": "object", "properties": {"a": NUMBER}, "unevaluatedProperties": True},
]


@pytest.mark.parametrize("schema", EQUAL, ids=str)
def test_the_same_values_are_valid(schema):
    said = equal_schema(schema)
    assert said != schema and not {"not", "propertyNames", "uniqueItems", "minContains"} & said.keys()
    for value in VALUES:
        valid = [jsonschema.Draft202012Validator(each).is_valid(value) for each in (schema, said)]
        assert valid[0] == valid[1], value


def test_a_look_ahead_for_the_length_is_a_length():
    schema = {"type": "string", "pattern": r"^(?=.{1,4}\.?$)[a-z]+\.?$", "maxLength": 9}
    said = equal_schema(schema)
    assert said == {"type": "string", "pattern": r"^[a-z]+\.?$", "maxLength": 4}
    for text in ("", "a", "ab.", "abcd", "abcde", "a.b"):
        valid = [jsonschema.Draft202012Validator(each).is_valid(text) for each in (schema, said)]
        assert valid[0] == valid[1], text


def test_bounds_beyond_all_numbers_say_nothing():
    largest = sys.float_info.max
    assert equal_schema({"type": "number", "minimum": -largest, "maximum": largest}) == {"type": "number"}
    assert equal_schema({"exclusiveMaximum": 1e30, "minimum": -5}) == {"exclusiveMaximum": 10**18, "minimum": -5}


ALPHABETS = ["a.@_-+b", "P1YMDTHS.W", "☺\N{DIGIT ONE}\u20e3\U0001f1e9a", "+-01."]
EXAMPLES = ["a.b@c.de", "P1Y2M3DT4H5M6.7S", "☺", "-0.5"]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "pattern, alphabet, example",
    [*zip(PATTERNS, ALPHABETS, EXAMPLES, strict=True)],
    ids=["email", "duration", "emoji", "decimal"],
)
def test_the_same_texts_match(pattern, alphabet, example):
    both = [regex.compile(each.replace(r"\x{20E3}", r"\u20E3")) for each in (pattern, PATTERNS[pattern])]
    assert both[0].search(example)
    chance, matched = random.Random(1), 0
    for _ in range(50_000):
        text = "".join(chance.choices(alphabet, k=chance.randrange(1, 9)))
        if alphabet is ALPHABETS[0] and chance.random() < 0.9:
            text = f"{text}@a.bb"
        if alphabet is ALPHABETS[1] and chance.random() < 0.9:
            text = f"P{text}"
        found = [each.search(text) is not None for each in both]
        assert found[0] == found[1], text
        matched += found[0]
    assert matched > 20


# What zod 4 and pydantic 2 write for their types, beside what every engine takes; None if it is enforced.
VOCABULARY = {
    "z.record(z.string(), z.number())": (
        {"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER},
        None,
    ),
    "z.json()": (
        {"anyOf": [TEXT, {"type": "object", "propertyNames": TEXT, "additionalProperties": {"$ref": "#"}}]},
        None,
    ),
    "z.never().optional()": (EQUAL[5], None),
    "z.jwt()": ({"type": "string", "format": "jwt"}, None),
    "z.cuid()": ({"type": "string", "format": "cuid", "pattern": "^[cC][0-9a-z]{6,}$"}, None),
    "z.hostname()": (
        {"type": "string", "format": "hostname", "pattern": r"^(?=.{1,253}\.?$)[a-z](?:[a-z-]{0,61}[a-z])?\.?$"},
        None,
    ),
    "z.float32()": ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, None),
    "z.float64()": ({"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max}, None),
    "z.file()": ({"type": "string", "format": "binary", "contentEncoding": "binary"}, None),
    "z.string().regex() with look-around": (
        {"properties": {"price": {"type": "string", "pattern": "^(?!0)[0-9]+$"}}},
        "price: its pattern has look-around, which is not supported",
    ),
    "z.xor()": (
        {"properties": {"a": {"items": {"oneOf": [NUMBER, {"type": "integer"}]}}}},
        "a: its oneOf has alternatives that one value may match together; anyOf is supported",
    ),
    "UUID4": ({"type": "string", "format": "uuid4"}, None),
    "Path, SecretStr": (
        {"anyOf": [{**TEXT, "format": "path"}, {**TEXT, "format": "password", "writeOnly": True}]},
        None,
    ),
    "dict[Enum, int]": ({"type": "object", **NAMED, "additionalProperties": {"type": "integer"}}, None),
    "set[str]": (
        {
            "$defs": {"S": {"type": "array", "items": TEXT, "uniqueItems": True}},
            "properties": {"s": {"$ref": "#/$defs/S"}},
        },
        "s: uniqueItems is not supported",
    ),
    "contains": (
        {"properties": {"x": {"properties": {"ids": {"type": "array", "contains": TEXT}}}}},
        "x.ids: contains is not supported",
    ),
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder)
    with closing(Grammars(PreTrainedTokenizerFast.from_pretrained(folder), 264)) as grammars:
        yield grammars


@pytest.mark.parametrize("schema, fault", VOCABULARY.values(), ids=VOCABULARY.keys())
def test_the_vocabulary_of_zod_and_pydantic(grammars, schema, fault):
    assert grammars.why_not(schema) == fault
    if fault is not None:
        with pytest.raises(
            UserError, match=regex.escape(f"the JSON schema cannot be used ({fault})", special_only=True)
        ):
            grammars.constraint("json", schema)


def test_a_fault_beside_costly_members_is_found_soon(grammars):
    """Each of these members alone takes the compiler longer than it may."""
    costly = {f"n{index}": {"type": "integer", "multipleOf": 99999989 + 2 * index} for index in range(4)}
    started = time.monotonic()
    fault = grammars.why_not({"properties": {**costly, "z": {"dependentSchemas": {"a": TEXT}}}})
    assert fault == "z: dependentSchemas is not supported"
    assert time.monotonic() - started < 8
