"""Calls of tools in answers, whole and piece by piece, and the grammar of such answers."""

import json
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from granite4_neuron.generation.structured_outputs import Grammars
from granite4_neuron.generation.tool_calls import (
    CLOSE,
    OPEN,
    Arguments,
    CallStart,
    Content,
    Tool,
    ToolCall,
    ToolCallStream,
    calls_grammar,
    parse_tool_calls,
)
from test.support.checkpoints import save_byte_tokenizer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[]<>/ \n\té' + CLOSE, max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"{\\', max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text("ab}", max_size=3), JSON, max_size=3)
TEXTS = st.text("ab <>{}\n", min_size=1, max_size=9).filter(str.strip)
CALLS = st.tuples(st.sampled_from(["f", "get-it", "a.b_c"]), OBJECTS, st.sampled_from([None, 1]))


def spelled(name, arguments, indent):
    arguments = json.dumps(arguments, ensure_ascii=False, indent=indent)
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}', ToolCall(name, arguments)


def streamed(text, cuts=None):
    """Return content and calls of a text that comes in pieces, and the pieces that came back."""
    stream, pieces, calls = ToolCallStream(), [], []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if cuts else [(0, len(text))]:
        pieces += stream.add(text[start:end])
    pieces += stream.finish()
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append(ToolCall(piece.name, ""))
        elif isinstance(piece, Arguments):
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + piece.text)
    return "".join(piece.text for piece in pieces if isinstance(piece, Content)), calls, pieces


@given(st.text("ab <>{}\n", max_size=9), st.lists(CALLS, min_size=1, max_size=3), st.data())
def test_calls_after_a_text(text, calls, data):
    spellings, expected = zip(*(spelled(*call) for call in calls), strict=True)
    answer = text + "\n".join(spellings)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    assert parse_tool_calls(answer) == (text.rstrip(), list(expected))
    assert streamed(answer, cuts)[:2] == (text.rstrip(), list(expected))


@given(TEXTS, CALLS, TEXTS, st.data())
def test_text_after_a_call(before, call, after, data):
    spelling, expected = spelled(*call)
    answer = f"{before} {spelling} {after}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    content = before.rstrip() + after.lstrip()
    assert parse_tool_calls(answer) == (content, [expected])
    assert streamed(answer, cuts)[:2] == (content, [expected])


def test_arguments_come_as_they_are_generated():
    spelling, call = spelled("f", {"a": "one two three", "b": [1, 2, {"c": '"\\}'}]}, None)
    stream, seen = ToolCallStream(), ""
    begin = spelling.index(call.arguments)
    for number, character in enumerate(spelling):
        pieces = stream.add(character)
        seen += "".join(piece.text for piece in pieces if isinstance(piece, Arguments))
        due = call.arguments[: max(0, number + 1 - begin)]
        assert due.startswith(seen) and len(due) - len(seen) <= 1, "a backslash waits for the next character"
    assert seen == call.arguments


MALFORMED = {
    "no end": f'{OPEN}\n{{"name": "f"',
    "no call": f"a {OPEN} b",
    "no JSON": f"a {OPEN}x{CLOSE} b",
    "no name": f'{OPEN}{{"arguments": {{}}}}{CLOSE}',
    "a number as name": f'{OPEN}{{"name": 5, "arguments": {{}}}}{CLOSE}',
    "a text as arguments": f'{OPEN}{{"name": "f", "arguments": "{{}}"}}{CLOSE}',
    "a list": f"{OPEN}[]{CLOSE}",
    "a member too many": f'{OPEN}{{"name": "f", "x": 1, "arguments": {{}}}}{CLOSE}',
    "end without begin": f"a {CLOSE} b",
    "very deep": f'{OPEN}{{"arguments": {"[" * 100_000}{CLOSE}',
    "a newline in the name": f'{OPEN}{{"name": "a\nb", "arguments": {{}}}}{CLOSE}',
}
LATE = {
    "arguments that are no JSON": f'{OPEN}{{"name": "f", "arguments": {{a}}}}{CLOSE}',
    "cut off": f'{OPEN}{{"name": "f", "arguments": {{"a": "b',
    "junk behind the arguments": f'{OPEN}{{"name": "f", "arguments": {{}}, "x": 1}}{CLOSE}',
    "the end is missing": f'{OPEN}{{"name": "f", "arguments": {{}}}}\n',
}


@pytest.mark.parametrize("text", [*MALFORMED.values(), *LATE.values()], ids=[*MALFORMED, *LATE])
def test_a_malformed_call_stays_text(text):
    good, call = spelled("g", {"a": 1}, None)
    assert parse_tool_calls(text) == (text, [])
    assert parse_tool_calls(f"{good}\n{text}") == (text, [call])


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_stays_text_in_a_stream(text):
    good, call = spelled("g", {"a": 1}, None)
    for cuts in ([], range(len(text)) if len(text) < 1000 else []):
        assert streamed(text, list(cuts))[:2] == (text, [])
    assert streamed(f"{good}\n{text}")[:2] == (text, [call])


@pytest.mark.parametrize("text", LATE.values(), ids=LATE)
def test_a_call_that_turns_out_to_be_malformed_has_begun_in_a_stream(text):
    content, [call], _ = streamed(text, range(len(text)))
    assert call.name == "f" and call.arguments in text and (content == "" or content in text)


def test_members_in_another_order():
    text = f'{OPEN}{{"arguments": {{"a": "é"}}, "name": "f"}}{CLOSE}'
    assert parse_tool_calls(text) == ("", [ToolCall("f", '{"a": "é"}')])
    assert streamed(text)[:2] == ("", [ToolCall("f", '{"a": "é"}')])


TOOLS = [
    Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    Tool('g"::=', {"type": "object", "additionalProperties": False}),
]
F, G, WRONG = (
    f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'
    for name, arguments in (("f", '{"a": 1}'), ('g"::=', "{}"), ("f", '{"a": ""}'))
)
ANSWERS = {"f": F, "g": G, "both": f"{F}\n{G}", "text": "hi", "text and f": f"hi\n{F}", "json": '{"b": null}'}
ANSWERS |= {"wrong": WRONG, "text and wrong": f"hi {WRONG}", "nothing": "", "unknown": F.replace("f", "h", 1)}
ALLOWED = [
    (dict(required=True, several=True), {"f", "g", "both"}),
    (dict(required=True, several=False), {"f", "g"}),
    (dict(required=False, several=True), {"f", "g", "both", "text", "text and f", "json", "nothing"}),
    (dict(required=False, several=False), {"f", "g", "text", "text and f", "json", "nothing"}),
    (dict(required=False, several=True, answer={"required": ["b"], "type": "object"}), {"f", "g", "both", "json"}),
]


@pytest.mark.parametrize("options, allowed", ALLOWED)
@pytest.mark.parametrize("special", [False, True])
def test_grammars(tmp_path, options, allowed, special):
    """As text, and with tags that are special tokens."""
    save_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": [OPEN, CLOSE]})
    with closing(Grammars(tokenizer, 264)) as grammars:
        constraint = grammars.constraint("lark", calls_grammar(TOOLS, **options, special=special))
    for name, answer in ANSWERS.items():
        tokens = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        assert (constraint.count_allowed(tokens) == len(tokens)) == (name in allowed), name
