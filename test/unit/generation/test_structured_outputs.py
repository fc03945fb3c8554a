"""Texts that follow a schema, a regular expression, choices or a grammar, on a random model with one token per byte."""

import json
import math
import re
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from transformers import GenerationConfig, PreTrainedTokenizerFast

from benchmarks.engine.faults import ByMasks
from granite4_neuron import UserError, generate, stream_generate
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import DraftModel, Engine, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.engine.sampling import NoTokenLeft
from granite4_neuron.generation.structured_outputs import Grammars, schema_text
from granite4_neuron.system.sandbox.limited_process import Stop, Stopped
from test.support.checkpoints import save_byte_tokenizer
from test.support.descriptors import descriptors
from test.support.engines import engine_model, generate_one, run, tokens_of
from test.support.schemas import SCHEMAS

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

VOCAB = 264  # two more than the tokenizer has
END = 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", '"\\']}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: "(" inner ")"\ninner: /[a-c]{1,3}/ | start start'
KINDS = {
    "json": ("json", PERSON),
    "json text": ("json", json.dumps(PERSON)),
    "regex": ("regex", "[A-Z][a-z]{2,5}( [0-9]+)?!"),
    "choice": ("choice", ["yes", "yes, of course", "no 😀", 'a"\\\n']),
    "lark": ("grammar", LARK),
    "gbnf": ("grammar", 'root ::= [x-z] ("," root)?'),
}
CIRCULAR = {"type": "object"}
CIRCULAR["properties"] = {"a": CIRCULAR}
NESTED = "\n".join(["start: r0", *(f'r{n}: "a" r{n + 1} "b"' for n in range(1900)), 'r1900: "c"'])
AMBIGUOUS = "\n".join(
    ["start: e", f'e: {" | ".join(f"r{n}" for n in range(100))} | "a"', *(f"r{n}: e e" for n in range(100))]
)
TAG = {"begin": "<f>", "schema": {"uniqueItems": True}, "end": ""}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def model():
    return engine_model(vocab_size=VOCAB, eos_token_id=END, max_position_embeddings=600)


@pytest.fixture(scope="module")
def runtime(model):
    return CPURuntime(model, GenerationConfig(top_k=None))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    with closing(Grammars(tokenizer, VOCAB)) as grammars:
        yield grammars


@pytest.fixture(scope="module")
def hasty(tokenizer):
    """Return biases that make a random model end its texts."""
    closing_tokens = {tokenizer.convert_tokens_to_ids(character): 4 for character in '"}],)'}
    return {**closing_tokens, END: 20}


def nested(text):
    return re.fullmatch(r"\([a-c]{1,3}\)|\((.*)\)", text) is not None and text.count("(") == text.count(")")


CHECKS = {
    "json": lambda text: jsonschema.validate(json.loads(text), PERSON) is None,
    "json text": lambda text: jsonschema.validate(json.loads(text), PERSON) is None,
    "regex": lambda text: re.fullmatch(KINDS["regex"][1], text),
    "choice": lambda text: text in KINDS["choice"][1],
    "lark": nested,
    "gbnf": lambda text: re.fullmatch("[x-z](,[x-z])*", text),
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_of_their_kind(runtime, tokenizer, grammars, hasty, kind):
    texts = set()
    for seed in range(8):
        options = dict(temperature=1.0, seed=seed, max_tokens=300, logit_bias=hasty)
        *_, last = responses = list(
            stream_generate(runtime, tokenizer, "x", constraint=grammars.constraint(*KINDS[kind]), **options)
        )
        texts.add("".join(response.text for response in responses))
        assert last.finish_reason == "stop" and last.token == END
    assert all(map(CHECKS[kind], texts)) and len(texts) > 1


@pytest.mark.slow
def test_schemas(runtime, tokenizer, grammars, hasty):
    """Every finished answer is valid. Few schemas are refused and few answers cut off."""
    counts = dict(stop=0, length=0, refused=0)

    @settings(max_examples=200)
    @given(SCHEMAS)
    def check(schema):
        try:
            constraint = grammars.constraint("json", schema)
        except UserError:
            counts["refused"] += 1
            return
        options = dict(temperature=1.0, seed=1, max_tokens=200, logit_bias=hasty)
        responses = list(stream_generate(runtime, tokenizer, "x", constraint=constraint, **options))
        reason = responses[-1].finish_reason
        counts[reason] += 1
        if reason == "stop":
            text = "".join(response.text for response in responses)
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))

    check()
    assert counts["stop"] >= 170, counts


def test_a_text_is_the_same_however_it_is_served(model, runtime, tokenizer, grammars, hasty):
    """Requests run in a batch, with drafts, from a prefix cache, with log-probabilities, greedy and sampled. The
    expected texts come from requests that run alone, with one mask per token.
    """
    prompt = tokenizer.encode('The person in JSON: {"name": "abc", "age": 3, "tags": ["a"]} and once more: ')
    constraints = [None, *(grammars.constraint(*value) for value in KINDS.values())]
    requests = [
        Request(prompt, 60, constraint=constraint, stop_token_ids=[END], logit_bias=hasty, **options)
        for constraint in constraints
        for options in (dict(temperature=0), dict(temperature=1.0, seed=3), dict(temperature=0, logprobs=3))
    ]
    alone = []
    for request in requests:
        engine = Engine(runtime, 1)
        by_masks = request.constraint and ByMasks(request.constraint)
        id = engine.add(replace(request, constraint=by_masks))
        alone.append(run(engine)[id])
    cache = PrefixCache(runtime, None, 512)
    accepted = 0
    for drafter in (None, NgramDrafter(1, 3), DraftModel(CPURuntime(model, GenerationConfig()), VOCAB, 4, 600)):
        engine = Engine(runtime, 4, tokenizer=tokenizer, prefix_cache=cache, drafter=drafter)
        ids = [engine.add(request) for request in requests]
        outputs = run(engine)
        accepted += engine.stats.accepted_tokens
        for id, expected in zip(ids, alone, strict=True):
            assert tokens_of(outputs[id]) == tokens_of(expected)
            for output, before in zip(outputs[id], expected, strict=True):
                assert output.logprob == before.logprob
    assert accepted > 100


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("trigger", ["<f>", "<f"])
def test_structural_tags(tokenizer, trigger, special):
    """A trigger anywhere in a text begins a structure, also if it is a special token."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer.name_or_path)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<f>"]})
    structures = [
        {"begin": f"{trigger}é>", "schema": {"enum": [1]}, "end": "</f>"},
        {"begin": f"{trigger}b>", "schema": {"type": "object", "additionalProperties": False}, "end": ""},
    ]
    tag = {"triggers": ["<g", trigger], "structures": structures}
    with closing(Grammars(tokenizer, VOCAB)) as grammars:
        constraint = grammars.constraint("structural_tag", json.dumps(tag) if special else {**tag, "type": "x"})
    first, second = f"{trigger}é>1</f>", f"{trigger}b>{{}}"
    right = ["", "hello\n<", "<g", first, second, f"a {first}{second} b\n{first}!"]
    wrong = [trigger, f"a {trigger}x", first.replace("1", "2"), second[:-1], first[:-1]]
    for text in right + wrong:
        tokens = [*tokenizer.encode(text), END]
        assert (constraint.count_allowed(tokens) == len(tokens)) == (text in right), text


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
OBJECTS = {
    "members are named": (A, ['{"a": 1}'], ['{"a": 1, "b": 1}', "{}"]),
    "none is named": ({"type": "object"}, ["{}"], ['{"a": 1}']),
    "one is required": ({"type": "object", "required": ["b"]}, ['{"b": [{}]}'], ['{"a": 1, "b": 1}', "{}"]),
    "or null": ({"type": ["object", "null"], "properties": {"a": {}}}, ["{}", "null"], ['{"b": 1}']),
    "within a value": ({"items": {"prefixItems": [A]}}, ['[[{"a": 1}]]'], ['[[{"a": 1, "b": 1}]]']),
    "any members": ({**A, "additionalProperties": True}, ['{"a": 1, "b": {"c": 1}}'], ["{}"]),
    "any of a kind": ({"additionalProperties": A}, ['{"b": {"a": 1}}'], ['{"b": {"a": 1, "c": 1}}', '{"b": {}}']),
    "any of a pattern": ({"patternProperties": {"^a": {"const": 1}}}, ['{"ab": 1}', "{}"], ['{"b": 1}', '{"a": 2}']),
    "more than are named": ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    "no object": ({}, ['{"a": {"b": 1}}', "1"], []),
    "values": ({"enum": [{"a": 1}, {"b": {}}]}, ['{"a": 1}', '{"b": {}}'], ['{"a": 1, "b": {}}']),
    "one of two": ({"oneOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', '{"b": 1, "c": 1}']),
    "both of two": ({"allOf": [A, B]}, ['{"a": 1, "b": 1}'], ['{"a": 1}', '{"a": 1, "b": 1, "c": 1}']),
    "one of two is needed": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'],
        ["{}", '{"a": 1, "c": 1}'],
    ),
    "a reference": (
        {"$ref": "#/$defs/A", "description": "x", "$defs": {"A": A}},
        ['{"a": 1}'],
        ['{"a": 1, "b": 1}'],
    ),
    "a reference and more": (
        {
            "$ref": "#/$defs/A",
            "properties": {"c": {"$ref": "#/$defs/A"}},
            "$defs": {"A": {"allOf": [A, B]}, "open0": {}},
        },
        ['{"a": 1, "b": 1}', '{"a": 1, "b": 1, "c": {"a": 1, "b": 1}}'],
        ['{"a": 1, "b": 1, "c": {"a": 1, "b": 1, "c": 1}}', '{"a": 1, "b": 1, "d": 1}'],
    ),
    "a tree": (
        {"$ref": "#/x/T", "x": {"T": {"properties": {"t": {"anyOf": [{"$ref": "#/x/T"}, {"type": "null"}]}}}}},
        ['{"t": {"t": null}}'],
        ['{"t": {"a": 1}}', '{"a": 1}'],
    ),
}


@pytest.mark.parametrize("schema, right, wrong", OBJECTS.values(), ids=OBJECTS.keys())
def test_objects_have_the_members_that_their_schema_names(tokenizer, grammars, schema, right, wrong):
    constraint = grammars.constraint("json", schema)
    for text in right + wrong:
        tokens = [*tokenizer.encode(text), END]
        assert (constraint.count_allowed(tokens) == len(tokens)) == (text in right), text
        if text in right:
            jsonschema.validate(json.loads(text), schema)


def test_repeated_references_do_not_multiply_the_schema():
    chain = {f"D{n}": {"allOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2} for n in range(40)}
    text = schema_text({"$ref": "#/$defs/D0", "properties": {"b": {}}, "$defs": {**chain, "D40": A}}, "it")
    assert len(text) < 20_000


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_whitespace(tokenizer, grammars, kind):
    """With the option, only one space after commas and colons is allowed; otherwise any whitespace up to a limit."""
    schema = {"type": "object", "properties": {"a": {"items": {"const": {"b": " ", "c": {}}}}}}
    spellings = [json.dumps({"a": [{"b": " ", "c": {}}] * 2}, **options) for options in WHITESPACE]
    spellings += [spellings[0].replace("{}", "{" + " " * 41 + "}"), spellings[0].replace("{}", "{ }")]
    value = schema
    if kind == "structural_tag":
        value = {"triggers": ["<"], "structures": [{"begin": "<", "schema": schema, "end": ">"}]}
        spellings = [f"<{text}>" for text in spellings]
    for is_disabled, expected in ((True, [1, 0, 0, 0, 0]), (False, [1, 1, 1, 0, 1])):
        constraint = grammars.constraint(kind, value, disable_any_whitespace=is_disabled)
        tokens = [[*tokenizer.encode(text), END] for text in spellings]
        assert [constraint.count_allowed(each) == len(each) for each in tokens] == expected


WHITESPACE = ({}, {"separators": (",", ":")}, {"indent": 3})


def test_drafts_that_the_grammar_forbids_are_not_verified(runtime, tokenizer, grammars):
    constraint = grammars.constraint("regex", "abc(de)?")
    tokens = tokenizer.encode("abcdx")
    assert [constraint.count_allowed(tokens[:length]) for length in range(6)] == [0, 1, 2, 3, 4, 4]
    assert constraint.count_allowed([*tokenizer.encode("abc"), END]) == 4
    assert constraint.count_allowed([*tokenizer.encode("ab"), END]) == 2


REFUSED = {
    "not a schema": ("json", {"type": "foo"}, r"the JSON schema cannot be used \(Invalid type: foo\)"),
    "not supported": ("json", {"uniqueItems": True}, "uniqueItems is not supported"),
    "another file": ("json", {"$ref": "file:///etc/passwd"}, "does not fetch"),
    "nothing is valid": ("json", {"$ref": "#"}, r"a \$ref that leads back to itself, so that no value is ever valid"),
    "not an object": ("json", "[1]", "the JSON schema must be an object"),
    "not JSON": ("json", "{", "the JSON schema is not JSON"),
    "very deep": ("json", "[" * 60_000, "the JSON schema is not JSON"),
    "multiples of a large number": ("json", {"type": "integer", "multipleOf": 99_999_989}, "takes more than 4 seconds"),
    "too long": ("regex", "a" * 2**17, "the regular expression has 131,072 characters, and may have 65,536"),
    "too long a schema": (
        "json",
        {"enum": ["a" * 2**16]},
        "the JSON schema has 65,550 characters, and may have 65,536",
    ),
    "not an expression": ("regex", "a(", "the regular expression cannot be used"),
    "no choices": ("choice", [], "must have at least one string"),
    "not choices": ("choice", [1], "must have at least one string"),
    "not a grammar": ("grammar", "start: other", "the grammar cannot be used"),
    "deep parentheses": ("grammar", "root ::= " + "(" * 30_000, "the grammar cannot be used"),
    "not a text": ("grammar", 5, "the grammar must be a string"),
    "no kind": ("zzz", "a", "must be one of json, regex, choice, grammar, lark, structural_tag"),
    "a kind that is no text": (["json"], "a", "must be one of json, regex"),
    "a set": ("json", {"enum": {1, 2}}, r"the JSON schema is not JSON \(Object of type set"),
    "itself": ("json", CIRCULAR, r"the JSON schema is not JSON \(Circular reference"),
    "itself in a tag": (
        "structural_tag",
        {"triggers": ["<"], "structures": [{"begin": "<", "schema": CIRCULAR, "end": ""}]},
        r"the schema of a structural tag is not JSON \(Circular reference",
    ),
    "a part refers to itself": (
        "json",
        {"properties": {"a": {"allOf": [{}, {"$ref": "#/properties/a"}]}}},
        r"a \$ref that leads back to itself",
    ),
    "nested rules": ("lark", NESTED, r"the grammar cannot be used \(it is nested too deep, "),
    "no tags": ("structural_tag", {"triggers": ["<"], "structures": []}, 'have "structures"'),
    "a part of a tag": (
        "structural_tag",
        {"triggers": ["<"], "structures": [{"begin": "<"}]},
        'must have "structures"',
    ),
    "another format of tags": ("structural_tag", {"format": {"type": "any_text"}}, '"format" is not supported'),
    "many tags": ("structural_tag", {"triggers": ["<"], "structures": [TAG] * 129}, "up to 128 of both"),
    "an empty trigger": ("structural_tag", {"triggers": [""], "structures": [TAG]}, 'must have "structures"'),
    "no trigger": ("structural_tag", {"triggers": ["g"], "structures": [TAG]}, 'no trigger with which "<f>" begins'),
    "schema of a tag": (
        "structural_tag",
        {"triggers": ["<"], "structures": [TAG]},
        "the structural tag .* Unimplemented",
    ),
}


def test_a_recursive_schema_that_can_end(grammars):
    tree = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
            "const": {"const": {"$ref": "#/$defs/const"}},
        },
    }
    assert grammars.constraint("json", tree)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind, value, message", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(grammars, kind, value, message):
    with pytest.raises(UserError, match=message) as error:
        grammars.constraint(kind, value)
    assert "\n" not in str(error.value)
    assert grammars.constraint("choice", ["a"]), "others are served after it"


def test_a_request_cannot_set_options_of_the_library(runtime, tokenizer, grammars):
    """Otherwise a schema could tell llguidance to ignore keywords that it does not support."""
    with pytest.raises(UserError, match="uniqueItems is not supported"):
        grammars.constraint("json", {"uniqueItems": True, "x-guidance": {"lenient": True}})


@pytest.mark.parametrize(
    "vocab_size, end, reason", [(100, "<|end|>", "vocab size too small"), (VOCAB, None, "no end-of-")]
)
def test_a_tokenizer_that_grammars_cannot_use(tokenizer, vocab_size, end, reason):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer.name_or_path)
    tokenizer.eos_token = end
    with closing(Grammars(tokenizer, vocab_size)) as grammars, pytest.raises(UserError, match=f"grammars .*{reason}"):
        grammars.constraint("choice", ["a"])


def test_the_first_grammar_starts_no_process(tokenizer, monkeypatch):
    """The process that compiles it has the vocabulary by then."""
    with closing(Grammars(tokenizer, VOCAB)) as grammars:
        monkeypatch.setattr(subprocess, "Popen", None)
        grammars.constraint("choice", ["a"])


def test_a_long_text_is_cut(runtime, tokenizer, grammars):
    long = grammars.constraint("regex", "a{50}")
    assert generate(runtime, tokenizer, "x", constraint=long, max_tokens=7) == "a" * 7


def test_a_grammar_that_fails_later_ends_its_text(runtime, tokenizer, grammars):
    """It forces an endless text, but only after the tokens that are tried when it is compiled."""
    endless = grammars.constraint("grammar", 'start: "x" /[b-z]/ endless\nendless: "a" endless')
    with pytest.raises(UserError, match=r"the grammar allows no further token \(parser error: Too many items"):
        generate(runtime, tokenizer, "x", constraint=endless, max_tokens=7)


def test_thousands_of_choices(runtime, tokenizer, grammars):
    choices = [f"choice {number * 7919 % 10007}" for number in range(2400)]
    constraint = grammars.constraint("choice", choices)
    texts = {generate(runtime, tokenizer, "x", constraint=constraint, temperature=1, seed=seed) for seed in range(3)}
    assert len(texts) == 3 and texts <= set(choices)


def test_an_object_that_may_have_a_thousand_members(runtime, tokenizer, grammars):
    names = [f"name {number}" for number in range(1000)]
    constraint = grammars.constraint(
        "json", {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    )
    for token in tokenizer.encode('{"name 7": null, '):
        constraint.mask(torch.zeros(VOCAB))
        constraint.accept(token)
    assert constraint.count_allowed(tokenizer.encode('"name 999": null}')) == 17


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["lark", "grammar"])
def test_a_costly_grammar_ends_its_text_alone(runtime, tokenizer, grammars, kind):
    """Each mask of an ambiguous grammar takes longer than the one before."""
    prompt = tokenizer.encode("x")
    options = dict(stop_token_ids=[END], temperature=1.0, seed=1, logit_bias={tokenizer.encode("a")[0]: 20})
    requests = [
        Request(prompt, 60, constraint=constraint, **options)
        for constraint in (grammars.constraint(kind, AMBIGUOUS), grammars.constraint("regex", "[a-z]{60}"), None)
    ]
    engine = Engine(runtime, 3)
    ids = [engine.add(request) for request in requests]
    outputs = run(engine)
    last = outputs[ids[0]][-1]
    assert last.is_requests_fault and last.error.startswith("the grammar takes too much processor time")
    for id, request in zip(ids[1:], requests[1:], strict=True):
        alone = Engine(runtime, 1)
        assert tokens_of(outputs[id]) == generate_one(alone, request)


def test_a_grammar_that_was_given_up_stays_so(tokenizer, grammars, monkeypatch):
    """The time that masks take is counted, in a process or not."""
    constraint = grammars.constraint("regex", "a{9}")
    mask = constraint._matcher.mask
    monkeypatch.setattr(constraint._matcher, "mask", lambda tokens: replace(mask(tokens), seconds=0.3))
    constraint.mask(torch.zeros(VOCAB))
    with pytest.raises(NoTokenLeft, match="takes too much processor time"):
        constraint.mask(torch.zeros(VOCAB))
    constraint = grammars.constraint("grammar", AMBIGUOUS)
    [token] = set(tokenizer.encode("aa", add_special_tokens=False))
    with pytest.raises(NoTokenLeft, match="takes too much processor time"):
        for _ in range(60):
            constraint.mask(torch.zeros(VOCAB))
            constraint.accept(token)
    assert constraint.count_allowed([token]) == 0
    for forked in (constraint, constraint.fork()):
        with pytest.raises(NoTokenLeft, match="takes too much processor time"):
            forked.mask(torch.zeros(VOCAB))
    process = Path(f"/proc/{constraint._matcher._pid}")
    del constraint, forked
    end = time.monotonic() + 60
    while process.exists():
        assert time.monotonic() < end, "its process goes on"
        time.sleep(0.01)


def test_texts_that_wait_have_no_processes(runtime, tokenizer, grammars):
    constraint = grammars.constraint("grammar", 'root ::= "ab"')
    engine = Engine(runtime, 2, tokenizer=tokenizer)
    request = Request([1], 9, constraint=constraint, stop_token_ids=[END])
    with descriptors(10):
        ids = [engine.add(request) for _ in range(30)]
        outputs = run(engine)
    assert ["".join(output.text for output in outputs[id]) for id in ids] == ["ab"] * 30


def test_a_deferred_grammar_is_that_grammar(grammars):
    for kind in ("lark", "gbnf", "regex"):
        compiled = grammars.compile(*KINDS[kind])
        logits, expected = torch.zeros(VOCAB), grammars.constraint_of(compiled)
        deferred = grammars.deferred_constraint_of(compiled)
        for constraint in (deferred.fork(), deferred, deferred.fork()):
            assert torch.equal(constraint.mask(logits), expected.mask(logits))


def test_a_complete_structure_ends_a_text_before_min_tokens(runtime, tokenizer, grammars):
    for pattern, length in (("abc", 3), ("a{1,9}", 9)):
        constraint = grammars.constraint("regex", pattern)
        text = generate(runtime, tokenizer, "x", constraint=constraint, min_tokens=20, max_tokens=30, ignore_eos=False)
        assert len(text) == length


A, B, C, E = (ord(letter) - ord("!") + 6 for letter in "abce")  # six special tokens come first
NOTHING_LEFT = "options (a grammar or another constraint, allowed_token_ids, bad_words, min_tokens, logits_processors)"
# A grammar, other options, the text, and a part of the error behind it.
OPTIONS_THAT_MEET = {
    "bad words": ("abcdefgh", dict(bad_words_ids=[[E]]), "abcd", NOTHING_LEFT),
    "bad words in a row": ("aabcdefg", dict(bad_words_ids=[[A, A, B]]), "aa", NOTHING_LEFT),
    "allowed tokens": ("[ab]bcdefgh", dict(allowed_token_ids=[END, C]), "", NOTHING_LEFT),
    "allowed tokens, min_tokens": (None, dict(allowed_token_ids=[END], min_tokens=5), "", NOTHING_LEFT),
    "only stop tokens, min_tokens": (None, dict(stop_token_ids=range(300), min_tokens=5), "", NOTHING_LEFT),
    "an end that is not allowed": ("a{1,9}", dict(allowed_token_ids=[A], min_tokens=20), "a" * 9, NOTHING_LEFT),
    "an end before min_tokens": ("a{1,9}", dict(allowed_token_ids=[A, END], min_tokens=20), "a" * 9, None),
    "an end that is bad": ("abc", dict(bad_words_ids=[[END]]), "abc", NOTHING_LEFT),
    "an end that is no stop token": ("abcdef", dict(stop_token_ids=[]), "abcdef<|end|>", "its text has ended"),
    "an end after a choice": ("ab?b?", dict(stop_token_ids=[], bad_words_ids=[[B]]), "a<|end|>", "its text has ended"),
    "an end that the grammar names": ("lark", dict(stop_token_ids=[]), "ab<|end|>", "its text has ended"),
    "a temperature near 0": ("[ab]bcdefgh", dict(temperature=1e-40, bad_words_ids=[[A]]), "bbcdefgh", None),
    "a temperature below all": ("abcdefgh", dict(temperature=1e-300, repetition_penalty=1e-300), "abcdefgh", None),
    "a temperature above all": ("[ab]bcdefgh", dict(temperature=1e300, bad_words_ids=[[A]]), "bbcdefgh", None),
    "a penalty above all": (
        "[ab]bcdefgh",
        dict(repetition_penalty=1e300, bad_words_ids=[[A]]),
        "bbcdefgh",
        None,
    ),
    "a processor": ("abcdefgh", dict(logits_processors=[lambda tokens, scores: scores / 2]), "abcdefgh", None),
    "a processor that forbids": (
        "abcdefgh",
        dict(logits_processors=[lambda tokens, scores: scores.index_fill(1, torch.tensor([E]), -math.inf)]),
        "abcd",
        NOTHING_LEFT,
    ),
}


def test_options_that_meet_a_grammar(model, runtime, tokenizer, grammars):
    """One by one, forced, from a prefix cache and with drafts: the rules are the same, and so is the error."""
    cutting = CPURuntime(model, GenerationConfig(top_k=None))
    cutting.tokens_per_step = 3
    for name, (pattern, options, text, error) in OPTIONS_THAT_MEET.items():
        constraint = None
        if pattern == "lark":
            constraint = grammars.constraint("lark", 'start: "ab" <|end|>')
        elif pattern is not None:
            constraint = grammars.constraint("regex", pattern)
        options = {"stop_token_ids": [END], "seed": 1, **options}
        request = Request(tokenizer.encode("x"), 60, constraint=constraint, **options)
        cached = Engine(cutting, 1, prefix_cache=PrefixCache(cutting, None, 3))
        for engine, by_masks in (
            (Engine(runtime, 1), True),
            (Engine(runtime, 1), False),
            (cached, False),
            (cached, False),
            (Engine(runtime, 1, drafter=NgramDrafter(1, 2)), False),
        ):
            masked = None if constraint is None else ByMasks(constraint)
            id = engine.add(replace(request, constraint=masked) if by_masks else request)
            outputs = run(engine)[id]
            found = tokenizer.decode([output.token for output in outputs if output.token not in (None, END)])
            found += "<|end|>" * (sum(output.token == END for output in outputs) - (error is None))
            assert (name, found, outputs[-1].finish_reason) == (name, text, "stop" if error is None else "error")
            assert error is None or (error in outputs[-1].error and outputs[-1].is_requests_fault)


def test_a_compilation_can_be_stopped(grammars):
    """A running one is ended, a waiting one never runs, and later ones are served."""
    stops, ended = [Stop(), Stop()], []

    def compile_it(number):
        try:
            grammars.constraint("json", {"type": "integer", "multipleOf": 99_999_989 + number}, stops[number])
        except Exception as error:
            ended.append(type(error))

    running = threading.Thread(target=compile_it, args=[0])
    running.start()
    while stops[0]._process is None:
        assert running.is_alive()
    waiting = threading.Thread(target=compile_it, args=[1])
    waiting.start()
    compiling = grammars._process._compiling
    stops[1].set()
    stops[0].set()
    for thread in (running, waiting):
        thread.join(60)
    assert ended == [Stopped, Stopped]
    assert compiling._connection.recv(1) == b"", "the process has ended"
    assert grammars.constraint("choice", ["a"])


_DEEP = """
import sys, threading
from transformers import PreTrainedTokenizerFast
from granite4_neuron import UserError
from granite4_neuron.generation.structured_outputs import Grammars
import torch

grammars, found = Grammars(PreTrainedTokenizerFast.from_pretrained(sys.argv[1]), 264), []

def compile_all():
    for depth in (200, 400, 800, 1600, 2400):
        rules = [f'r{n}: "a" r{n + 1} "b"' for n in range(depth)]
        try:
            grammars.constraint("lark", "\\n".join(["start: r0", *rules, f'r{depth}: "c"'])).mask(torch.zeros(264))
            found.append("ok")
        except UserError as error:
            found.append("deep" if "it is nested too deep" in str(error) else str(error))

thread = threading.Thread(target=compile_all)
thread.start()
thread.join()
grammars.close()
print(*found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["unlimited", "8192", "1024"])
def test_a_deep_grammar_overflows_no_stack_of_this_process(tokenizer, limit):
    """Under any limit of the shell, a grammar that overflows the stack does so in the process that tries it."""
    command = ["bash", "-c", f'ulimit -S -s {limit} || exit 99; exec "$@"', "bash"]
    done = subprocess.run(
        [*command, sys.executable, "-c", _DEEP, tokenizer.name_or_path], capture_output=True, text=True, timeout=300
    )
    if done.returncode == 99:
        pytest.skip(f"the hard limit of stacks is below {limit}")
    assert done.returncode == 0, done
    first, *_, last = done.stdout.split()
    assert (first, last) == ("ok", "deep") and set(done.stdout.split()) == {"ok", "deep"}
