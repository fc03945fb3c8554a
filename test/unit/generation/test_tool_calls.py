"""Tool calls in answers, parsed whole and piece by piece, and the grammar of such answers."""

import json
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from granite4_neuron.errors import UserError
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
    """Parse a text piece by piece; return its content, its calls and the pieces that the stream gave."""
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
    "a text as arguments": f'{OPEN}{{"name": "f", "arguments": "today"}}{CLOSE}',
    "a list": f"{OPEN}[]{CLOSE}",
    "a member too many": f'{OPEN}{{"name": "f", "x": 1, "arguments": {{}}}}{CLOSE}',
    "end without begin": f"a {CLOSE} b",
    "very deep": f'{OPEN}{{"arguments": {"[" * 100_000}{CLOSE}',
    "a newline in the name": f'{OPEN}{{"name": "a\nb", "arguments": {{}}}}{CLOSE}',
}
F_BEGINS = f'{OPEN}{{"name": "f", "arguments": '
# Content and calls of answers with an incomplete call, or with a call whose mark is missing.
UNUSUAL = {
    "arguments that are no JSON": (F_BEGINS + f"{{a}}}}{CLOSE}", "", ["{a}"]),
    "constants that are not in JSON": (
        F_BEGINS + '{"a": [NaN, -Infinity,Infinity], "b": "NaN\\"-Infinity"}' + f"}}{CLOSE}",
        "",
        ['{"a": [null, null,null], "b": "NaN\\"-Infinity"}'],
    ),
    "such constants in another order": (
        f'{OPEN}{{"arguments": {{"a": [NaN, "\t"]}}, "name": "f"}}{CLOSE}',
        "",
        ['{"a": [null, "\\t"]}'],
    ),
    "such constants in a text": (
        f'{OPEN}{{"arguments": "{{\\"a\\": [ NaN,\\"\\n\\"]}}", "name": "f"}}{CLOSE}',
        "",
        ['{"a": [ null,"\\n"]}'],
    ),
    "control characters in strings": (F_BEGINS + '{\n"a": "b\n\tc"}' + f"}}{CLOSE}", "", ['{\n"a": "b\\n\\tc"}']),
    "cut off in a constant": (F_BEGINS + '{"a": -Inf', "", ['{"a": -Inf']),
    "cut off in a string": (F_BEGINS + '{"a": "b', "", ['{"a": "b']),
    "cut off behind a backslash": (F_BEGINS + '{"a": "b\\', "", ['{"a": "b\\']),
    "cut off before its last brace": (f"Hm. {F_BEGINS}{{}}", "Hm.", ["{}"]),
    "cut off in the mark": (F_BEGINS + "{}}\n</tool", "", ["{}"]),
    "cut off before the arguments": (F_BEGINS, F_BEGINS, []),
    "the mark is missing": (F_BEGINS + "{}}\n", "", ["{}"]),
    "the mark is missing before text": (F_BEGINS + "{}}\nSo it is.", "So it is.", ["{}"]),
    "the mark is missing before a call": (
        F_BEGINS + '{"a": 1}}\n' + F_BEGINS + f"{{}}}}{CLOSE}",
        "",
        ['{"a": 1}', "{}"],
    ),
    "the mark is missing before a call's beginning": (F_BEGINS + "{}}" + F_BEGINS, F_BEGINS, ["{}"]),
    "a call within arguments": (F_BEGINS + '{"a": ' + F_BEGINS + f"{{}}}}{CLOSE}", "", ['{"a": ', "{}"]),
    "a brace is missing": (F_BEGINS + f"{{}}{CLOSE}", "", ["{}"]),
    "two braces are missing": (F_BEGINS + f'{{"a": 1{CLOSE} So', "So", ['{"a": 1']),
    "a brace too many": (F_BEGINS + f"{{}}}}}}{CLOSE}", f"}}{CLOSE}", ["{}"]),
    "junk behind the arguments": (F_BEGINS + f'{{}}, "x": 1}}{CLOSE}', f', "x": 1}}{CLOSE}', ["{}"]),
    "marks in strings": (
        F_BEGINS + json.dumps({"a": OPEN + CLOSE}) + f"}}{CLOSE}",
        "",
        [json.dumps({"a": OPEN + CLOSE})],
    ),
    "another order, and a mark in a string": (
        f'{OPEN}{{"arguments": {{"a": "}}{CLOSE}"}}, "name": "f"}}{CLOSE} So',
        "So",
        [json.dumps({"a": "}" + CLOSE})],
    ),
    "another order, and the mark is missing": (f'{OPEN}{{"arguments": {{}}, "name": "f"}}\nSo', "So", ["{}"]),
    "arguments in a text": (f'So\n{OPEN}\n{{"name": "f", "arguments": "{{\\"a\\": 1}}"}}\n{CLOSE}', "So", ['{"a": 1}']),
    "malformed, and a call behind it": (f"{OPEN}a\n{F_BEGINS}{{}}}}{CLOSE}", f"{OPEN}a", ["{}"]),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_stays_text(text):
    good, call = spelled("g", {"a": 1}, None)
    assert parse_tool_calls(text) == (text, [])
    assert parse_tool_calls(f"{good}\n{text}") == (text, [call])
    assert parse_tool_calls(f"{text}\n{good}") == (text, [call])
    for cuts in ([], range(len(text)) if len(text) < 1000 else []):
        assert streamed(text, list(cuts))[:2] == (text, [])
    assert streamed(f"{good}\n{text}")[:2] == (text, [call])


@pytest.mark.parametrize("text, content, arguments", UNUSUAL.values(), ids=UNUSUAL)
def test_a_call_counts_once_its_arguments_begin(text, content, arguments):
    expected = (content, [ToolCall("f", each) for each in arguments])
    assert parse_tool_calls(text) == expected
    assert streamed(text, range(len(text)))[:2] == expected


MARKS = (
    OPEN,
    CLOSE,
    OPEN[:4],
    CLOSE[-5:],
    "<",
    '{"name": "f", "arguments": ',
    '{"arguments": {}, "name": "g"}',
    '{"a": 1}',
    "NaN",
    "-Infinity",
)
PIECES = st.sampled_from([*MARKS, *'{}"\\[,\n é']) | st.builds(lambda call: spelled(*call)[0], CALLS)


@given(st.lists(PIECES, max_size=8).map("".join), st.data())
def test_any_beginning_of_an_answer_has_the_same_calls_whole_and_streamed(text, data):
    """An answer may be cut off by its length, and its pieces are as long as the tokens."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    stream, content, arguments = ToolCallStream(), "", []
    for end in range(len(text) + 1):
        prefix = text[:end]
        whole = parse_tool_calls(prefix)
        assert streamed(prefix, [cut for cut in cuts if cut <= end])[:2] == whole
        assert whole[1] or whole[0] == prefix, "a text without calls must not change"
    assert streamed(text, list(range(len(text))))[:2] == whole
    for character in text:  # text that was given out is not taken back
        for piece in stream.add(character):
            content += piece.text if isinstance(piece, Content) else ""
            arguments += [piece.text] if isinstance(piece, Arguments) else []
    assert whole[0].startswith(content)
    assert "".join(call.arguments for call in whole[1]).startswith("".join(arguments))


@pytest.mark.parametrize("value", [None, 5, b"a", ["a"], "\ud800"])
def test_an_answer_that_is_not_text_is_refused(value):
    with pytest.raises(UserError, match="the answer is"):
        parse_tool_calls(value)


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
MANY = {f"{number} times": "\n".join([G] * number) for number in (16, 17)}
ANSWERS |= MANY
ALLOWED = [
    (dict(required=True, several=True), {"f", "g", "both", "16 times"}),
    (dict(required=True, several=False), {"f", "g"}),
    (dict(required=False, several=True), {"f", "g", "both", "text", "text and f", "json", "nothing", *MANY}),
    (dict(required=False, several=False), {"f", "g", "text", "text and f", "json", "nothing"}),
    (
        dict(required=False, several=True, answer={"required": ["b"], "type": "object"}),
        {"f", "g", "both", "json", "16 times"},
    ),
]


@pytest.mark.parametrize("options, allowed", ALLOWED)
@pytest.mark.parametrize("special", [False, True])
def test_grammars(tmp_path, options, allowed, special):
    """Tags are text or special tokens."""
    save_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": [OPEN, CLOSE]})
    with closing(Grammars(tokenizer, 264)) as grammars:
        constraint = grammars.constraint("lark", calls_grammar(TOOLS, **options, special=tokenizer.all_special_tokens))
    for name, answer in ANSWERS.items():
        tokens = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        assert (constraint.count_allowed(tokens) == len(tokens)) == (name in allowed), name
