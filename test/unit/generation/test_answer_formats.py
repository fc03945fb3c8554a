"""Thoughts and Nemotron's tool calls in answers: parsed from pieces of any size, and generated under grammars."""

import itertools
import json
import random
import re
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from granite4_neuron.errors import UserError
from granite4_neuron.generation import tool_calls
from granite4_neuron.generation.answer_formats import (
    GRANITE,
    GRANITE_3,
    GRANITE_3_2,
    GRANITE_3_3,
    NEMOTRON,
    NEMOTRON_NANO_2,
    AnswerStream,
    Thought,
    _MarkedAnswer,
    answer_format,
    shows_unknown_calls,
)
from granite4_neuron.generation.conversation_encoder import ConversationEncoder
from granite4_neuron.generation.structured_outputs import Grammars
from granite4_neuron.generation.tool_calls import (
    CLOSE,
    OPEN,
    Arguments,
    CallStart,
    Content,
    Tool,
    ToolCallStream,
    calls_grammar,
    pieces_of,
)
from granite4_neuron.generation.xml_tool_calls import XmlToolCallStream, xml_call_rules
from test.support.checkpoints import save_byte_tokenizer
from test.support.counting import steps_of
from test.support.tool_template import (
    GRANITE_3_2_TEMPLATE,
    GRANITE_3_3_TEMPLATE,
    GRANITE_3_TEMPLATE,
    GRANITE_THINKING_TEMPLATE,
    NEMOTRON_NANO_2_TEMPLATE,
    NEMOTRON_TEMPLATE,
    TOOL_TEMPLATE,
    listed,
    with_parameters,
)

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "unit": {"enum": ["C", "F"]},
    "where": {"$ref": "#/$defs/place"},
    "exact": {"type": ["boolean", "null"]},
    "stops": {"type": "array", "items": {"$ref": "#/$defs/place"}},
}
PLACE = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"], "$defs": {"place": PLACE}}
WEATHER, TIME = Tool("weather", PARAMETERS), Tool("time", {"type": "object"})
TOOLS = [WEATHER, TIME]


def stream(is_thinking=False, tools=TOOLS):
    return NEMOTRON.stream(tools, is_thinking)


def joined(pieces):
    """Return pieces, with neighbours of one type joined."""
    found = []
    for piece in pieces:
        if found and type(piece) is type(found[-1]) and not isinstance(piece, CallStart):
            found[-1] = type(piece)(found[-1].text + piece.text)
        elif isinstance(piece, CallStart) or piece.text:
            found.append(piece)
    return found


def of(text, is_thinking=False, tools=TOOLS):
    return joined(pieces_of(text, stream(is_thinking, tools)))


def of_parts(parts, is_thinking=False):
    divided = stream(is_thinking)
    pieces = [piece for part in parts for piece in divided.add(part)]
    return joined([*pieces, *divided.finish()])


def arguments_of(text):
    _, arguments = of(text)
    return json.loads(arguments.text)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("why\n</think>\n\nHi.", [Thought("why"), Content("Hi.")]),
        ("\n why \n</think>Hi.", [Thought("why"), Content("Hi.")]),
        ("</think>Hi.", [Content("Hi.")]),
        ("cut off </thi", [Thought("cut off </thi")]),
        ("a < b</think>", [Thought("a < b")]),
        ("<tool_call></think><tool_call>x", [Thought("<tool_call>"), Content("<tool_call>x")]),
        ("", []),
    ],
)
def test_thoughts(text, expected):
    assert of(text, is_thinking=True) == expected
    if OPEN not in text:
        assert of(text, is_thinking=True, tools=None) == expected


TIME_CALL = with_parameters("time")


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"look\n</think>\n{TIME_CALL}\n{TIME_CALL}", [Thought("look"), *[CallStart("time"), Arguments("{}")] * 2]),
        (f"look\n{TIME_CALL}", [Thought("look"), CallStart("time"), Arguments("{}")]),
        (f"{TIME_CALL}\n{TIME_CALL}", [CallStart("time"), Arguments("{}")] * 2),
        (f"look\n{TIME_CALL} and", [Thought("look"), CallStart("time"), Arguments("{}"), Content("and")]),
        (f"{TIME_CALL}\n</think>\n\nHi.", [CallStart("time"), Arguments("{}"), Content("Hi.")]),
        (f"{TIME_CALL}\n</think>\n{TIME_CALL}", [CallStart("time"), Arguments("{}")] * 2),
        (
            f"look {OPEN}\n<function=weather>\n<parameter=city>\n</think>",
            [Thought("look"), CallStart("weather"), Arguments('{"city": "</think>')],
        ),
        (f"a {OPEN} mark\n</think>\nHi.", [Thought(f"a {OPEN} mark"), Content("Hi.")]),
        (f"a {OPEN} mark \n", [Thought(f"a {OPEN} mark")]),
        (f"a {OPEN}\n<function=ti", [Thought(f"a {OPEN}\n<function=ti")]),
    ],
)
def test_thoughts_and_calls(text, expected):
    """A thought ends where a call begins, and a mark alone begins none."""
    assert of(text, is_thinking=True) == expected
    for cut in range(len(text)):
        assert of_parts([text[:cut], text[cut:]], is_thinking=True) == expected
    assert of_parts(text, is_thinking=True) == expected


def test_without_tools_a_thought_may_show_a_call():
    assert of(f"{TIME_CALL}\n</think>Hi.", is_thinking=True, tools=None) == [Thought(TIME_CALL), Content("Hi.")]


@pytest.mark.parametrize(
    "parameters, expected",
    [
        (dict(city="Rome", days="3"), dict(city="Rome", days=3)),
        (dict(city='a "b"\n\nc\\'), dict(city='a "b"\n\nc\\')),
        (dict(city="3", unit="C"), dict(city="3", unit="C")),
        (dict(city="", days=" 3\n"), dict(city="", days=3)),
        (dict(days="three", exact="True"), dict(days="three", exact=True)),
        (dict(days="3.5", exact="null"), dict(days="3.5", exact=None)),
        (dict(days="3.0"), dict(days=3)),
        (dict(days="1e3"), dict(days=1000)),
        (dict(where='{"x": 1}', other="[1]", text="x y"), dict(where={"x": 1}, other=[1], text="x y")),
        (dict(other="NaN", text='"x"'), dict(other="NaN", text='"x"')),
        (dict(where='{"x": [NaN, "NaN\t"]}'), dict(where={"x": [None, "NaN\t"]})),
        (dict(city="</function>"), dict(city="</function>")),
        (dict(city="a</parameter> b\n</parameter>", days="3"), dict(city="a</parameter> b\n</parameter>", days=3)),
        (dict(where='{"x": "</parameter>"}'), dict(where={"x": "</parameter>"})),
        (dict(city="<parameter=zip> <parameter=city>"), dict(city="<parameter=zip> <parameter=city>")),
    ],
)
def test_values_have_the_types_of_their_schemas(parameters, expected):
    assert arguments_of(with_parameters("weather", **parameters)) == expected


@pytest.mark.parametrize(
    "parts, text, expected",
    [
        ([{"type": "string"}, {"minLength": 1}], "3", "3"),
        ([{"type": ["integer", "string"]}, {"type": ["string", "null"]}], "3", "3"),
        ([{"type": "integer"}], "3", 3),
        ([{"minLength": 1}], "3", 3),
    ],
)
def test_a_value_has_a_type_that_all_parts_of_its_schema_allow(parts, text, expected):
    tool = Tool("f", {"type": "object", "properties": {"x": {"allOf": parts}}})
    _, arguments = of(with_parameters("f", x=text), tools=[tool])
    assert json.loads(arguments.text) == {"x": expected}


NOW, CUT = [CallStart("time"), Arguments("{}")], [CallStart("time"), Arguments("{")]
THREE_DAYS = [CallStart("weather"), Arguments('{"days": 3}')]


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"{OPEN}<function=time></function>{CLOSE} and", [CallStart("time"), Arguments("{}"), Content("and")]),
        (f"{OPEN}\n<function=time>\n{CLOSE}", [CallStart("time"), Arguments("{}")]),
        (f"{OPEN}<function=weather><parameter=days>3</parameter>{CLOSE} x", [*THREE_DAYS, Content("x")]),
        (f"{OPEN}<function=weather> <parameter=days>3</function>{CLOSE} x", [*THREE_DAYS, Content("x")]),
        (f"{OPEN}<function=weather>\n<parameter=days>\n3\n</function>", THREE_DAYS),
        (f"{OPEN}<function=weather><parameter=days>3</parameter>{OPEN}<function=time>{CLOSE}", [*THREE_DAYS, *NOW]),
        (f"{OPEN}<function=weather><parameter=days>3</parameter></function><function=time>", [*THREE_DAYS, *CUT]),
        (f"{OPEN}<function=weather><parameter=days>3</function>\n<function=time>\n</function>", [*THREE_DAYS, *NOW]),
        (f"{OPEN}<function=weather><parameter=days>3</parameter><function=time>\n{CLOSE}", [*THREE_DAYS, *NOW]),
        (
            f"{OPEN}<function=time></function> <function=time></function>{CLOSE}<function=",
            [*NOW, *NOW, Content("<function=")],
        ),
        (
            f"{OPEN}<function=weather><parameter=city>Rome\n<parameter=days>\n3\n</parameter></function>{CLOSE}",
            [CallStart("weather"), Arguments('{"city": "Rome", "days": 3}')],
        ),
        (
            f"{OPEN}<function=weather><parameter=city>Rome</parameter> x",
            [CallStart("weather"), Arguments('{"city": "Rome</parameter> x')],
        ),
        (f"{OPEN}<function=weather><parameter=days>3</parameter>", [CallStart("weather"), Arguments('{"days": 3')]),
        (f"{OPEN}\n<function=weather>\n<parameter=city>\nRo\n", [CallStart("weather"), Arguments('{"city": "Ro\\n')]),
        (f"{OPEN}\n<function=weather>\n<parameter=days>\n1", [CallStart("weather"), Arguments('{"days": 1')]),
        (f"{OPEN}\n<function=weather>\n<param", [CallStart("weather"), Arguments("{")]),
        (f"so {OPEN}\n<function=wea", [Content(f"so {OPEN}\n<function=wea")]),
        (f'{OPEN}\n{{"name": "time", "arguments": {{}}}}\n{CLOSE} and', [*NOW, Content("and")]),
        (f'{OPEN}{{"arguments": "{{}}", "name": "time"}}', NOW),
        (f"Hm.\n<function=time>\n</function>\n{CLOSE} and", [Content("Hm."), *NOW, Content("and")]),
        (f'{OPEN}\n<function=weather>\n{{"days": 3}}\n</function>\n{CLOSE} and', [*THREE_DAYS, Content("and")]),
        ('Hm.\n<function=weather>{"days": 3}</function> and', [Content("Hm."), *THREE_DAYS, Content("and")]),
        (f'{OPEN}<function=weather>{{"days": 3}}</function><function=time>{{}}{CLOSE}', [*THREE_DAYS, *NOW]),
        (f'{OPEN}<function=weather>{{"days": 3}}</func', THREE_DAYS),
        (f'{OPEN}<function=weather>{{"days": 3', [CallStart("weather"), Arguments('{"days": 3')]),
        ("so <function=other>x", [Content("so <function=other>x")]),
    ],
)
def test_calls_that_are_incomplete_or_malformed(text, expected):
    assert of(text) == expected
    for cut in range(len(text)):
        assert of_parts([text[:cut], text[cut:]]) == expected
    assert of_parts(text) == expected


@pytest.mark.parametrize(
    "format, head",
    [
        (GRANITE, f'{OPEN}\n{{"name": "weather", "argum'),
        (NEMOTRON, f"{OPEN}\n<function=weather"),
        (NEMOTRON, "<function=weather"),
        (NEMOTRON, f'{OPEN}{{"name"'),
    ],
)
def test_a_call_that_is_cut_off_in_its_head_is_no_text(format, head):
    for end in range(1, len(head) + 1):
        text = f"Hm.\n{head[:end]}"
        assert joined(pieces_of(text, format.stream(TOOLS), is_cut=True)) == [Content("Hm.")]
        divided = format.stream(TOOLS)
        pieces = [piece for part in text for piece in divided.add(part)]
        assert joined([*pieces, *divided.finish(is_cut=True)]) == [Content("Hm.")]
    assert joined(pieces_of("a < b", format.stream(TOOLS), is_cut=True)) == [Content("a < b")]
    assert of("why </thi", is_thinking=True) == [Thought("why </thi")]
    assert joined(pieces_of("why </thi", stream(True), is_cut=True)) == [Thought("why")]


PARTS = [
    "a",
    "\n",
    " ",
    "<",
    '"\\',
    "{",
    "3",
    "</think>",
    OPEN,
    CLOSE,
    "<function=weather>",
    "<function=",
    "<parameter=city>",
    "<parameter=days>\n",
    "\n</parameter>\n",
    "</parameter>",
    "</function>",
]


@given(st.lists(st.sampled_from(PARTS), max_size=20), st.lists(st.integers(1, 9), max_size=30), st.booleans())
def test_results_do_not_depend_on_the_cuts(parts, lengths, is_thinking):
    text = "".join(parts)
    ends = [*itertools.accumulate(lengths), len(text)]
    cut = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert of_parts(cut, is_thinking) == of(text, is_thinking)


@pytest.mark.parametrize(
    "template, expected",
    [
        (NEMOTRON_TEMPLATE, NEMOTRON),
        (TOOL_TEMPLATE, GRANITE),
        (f"{{# not <TOOLCALL></TOOLCALL> or <function=f><parameter=x> #}}{TOOL_TEMPLATE}", GRANITE),
        (TOOL_TEMPLATE.replace('"arguments"', '\\"arguments\\"'), GRANITE),
        (GRANITE_THINKING_TEMPLATE, NEMOTRON),
        (GRANITE_3_TEMPLATE, GRANITE_3),
        (GRANITE_3_2_TEMPLATE, GRANITE_3_2),
        (GRANITE_3_3_TEMPLATE, GRANITE_3_3),
        (NEMOTRON_NANO_2_TEMPLATE, NEMOTRON_NANO_2),
        (None, GRANITE),
        ({"default": NEMOTRON_TEMPLATE}, NEMOTRON),
        ({"default": "{{ messages }}", "tool_use": NEMOTRON_TEMPLATE}, NEMOTRON),
    ],
)
def test_the_format_of_a_template(tmp_path, template, expected):
    save_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.chat_template = template
    assert answer_format(tokenizer) is expected and not shows_unknown_calls(tokenizer)


def test_other_formats_of_calls_are_noticed(tmp_path):
    """Of GLM, Phi and Mistral."""
    save_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for calls in ("<tool_call>f<arg_key>x</arg_key></tool_call>", "<|tool_call|>[]<|/tool_call|>", "[TOOL_CALLS][]"):
        tokenizer.chat_template = f"{{% for tool in tools %}}{{{{ tool }}}}{{% endfor %}}{calls}"
        assert shows_unknown_calls(tokenizer) and answer_format(tokenizer) is GRANITE


LISTS = {"Granite 3": GRANITE_3, "Nemotron Nano v2": NEMOTRON_NANO_2}
IN_ROME = [CallStart("weather"), Arguments('{"city": "Rome"}')]


@pytest.mark.parametrize("format", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(
    "calls, expected",
    [
        ("{mark}[{rome}]{end}", IN_ROME),
        ("Hm.\n{mark} [ {rome},\n{time} ] {end} and", [Content("Hm."), *IN_ROME, *NOW, Content("and")]),
        ('{mark}[{{"arguments": {{}}, "name": "time"}}, {rome}]{end}', [*NOW, *IN_ROME]),
        ('{mark}[{{"name": "time", "arguments": "{{}}"}}]{end}', NOW),
        ("{mark}{rome}{end}", IN_ROME),
        ("{mark}[{rome}", IN_ROME),
        ("{mark}[{rome},", [*IN_ROME, Content(",")]),
        ("{mark}[{rome}{end}", IN_ROME),
        ('{mark}[{{"name": "weather", "arguments": {{"ci', [CallStart("weather"), Arguments('{"ci')]),
        ("so {mark}[]{end}", [Content("so {mark}[]{end}")]),
        ("so {mark} [1, {rome}", [Content("so {mark} [1, {rome}")]),
        ("{mark}[1] {mark}[{rome}]{end}", [Content("{mark}[1]"), *IN_ROME]),
    ],
)
def test_lists_of_calls(format, calls, expected):
    filled = dict(mark=format.marks.open, end=format.marks.close)
    filled |= dict(rome='{"name": "weather", "arguments": {"city": "Rome"}}', time='{"name": "time", "arguments": {}}')
    text = calls.format(**filled)
    expected = [Content(each.text.format(**filled)) if isinstance(each, Content) else each for each in expected]
    assert joined(pieces_of(text, format.stream(TOOLS))) == expected
    for size in (1, 2, 7):
        divided = format.stream(TOOLS)
        pieces = [piece for at in range(0, len(text), size) for piece in divided.add(text[at : at + size])]
        assert joined([*pieces, *divided.finish()]) == expected
    if expected == IN_ROME:
        head = text.partition("weather")[0]
        assert joined(pieces_of(f"Hm. {head}", format.stream(TOOLS), is_cut=True)) == [Content("Hm.")]


def test_a_thought_before_a_list_of_calls():
    text = f"look\n</think>\n\n{listed(NEMOTRON_NANO_2.marks, ('time', '{}'))}\n"
    for size in (1, len(text)):
        divided = NEMOTRON_NANO_2.stream(TOOLS, is_thinking=True)
        pieces = [piece for at in range(0, len(text), size) for piece in divided.add(text[at : at + size])]
        assert joined([*pieces, *divided.finish()]) == [Thought("look"), *NOW]


LOOK = f'{GRANITE_3.marks.open}[{{"name": "time", "arguments": {{}}}}]'
# Of each: how the marks are spelled. Those around the answer are "" in Granite 3.2.
SPELLED = {
    "3.2": (GRANITE_3_2, "Here is my thought process:", "Here is my response:", "", ""),
    "3.2, as quantised models write": (GRANITE_3_2, "Here's my thought process:", "Here's my response:", "", ""),
    "3.3": (GRANITE_3_3, "<think>", "</think>", "<response>", "</response>"),
}


@pytest.mark.parametrize("format, begin, end, opening, closing", SPELLED.values(), ids=SPELLED)
@pytest.mark.parametrize(
    "text, expected",
    [
        ("{0}why{1}{2}Hi.{3}", [Thought("why"), Content("Hi.")]),
        ("\n {0}\n why\nso \n{1} \n{2}\nHi. \n{3}\n", [Thought("why\nso"), Content("Hi.")]),
        ("{0}why{1}Hi.", [Thought("why"), Content("Hi.")]),
        ("{0}why{1}\n{2}Hi.", [Thought("why"), Content("Hi.")]),
        ("{0}why", [Thought("why")]),
        ("{0}{1}{2}Hi.{3}", [Content("Hi.")]),
        ("{0}a {0} b{1}{2}Hi. {0} {1} <resp{3}", [Thought("a {0} b"), Content("Hi. {0} {1} <resp")]),
        ("{2}Hi.{3}", [Content("Hi.")]),
        ("{2}Hi.</resp", [Content("Hi.</resp")]),
        ("Hi. {0}x{1}", [Content("Hi. {0}x{1}")]),
        ("Here", [Content("Here")]),
        ("<thin", [Content("<thin")]),
        ("{0}why{1}{2}I look.{3}\n" + LOOK, [Thought("why"), Content("I look."), *NOW]),
        ("{0}why{1}{2}I look.\n" + LOOK + "{3}", [Thought("why"), Content("I look."), *NOW]),
        ("{0}why\n" + LOOK, [Thought("why"), *NOW]),
        (LOOK, NOW),
    ],
)
def test_thoughts_that_the_model_begins(format, begin, end, opening, closing, text, expected):
    """As vLLM's parser for Granite 3.2 and llama.cpp's for 3.3 take them, but for white space around the marks."""

    def filled(text):
        return re.sub(r"\{([0-3])\}", lambda match: (begin, end, opening, closing)[int(match[1])], text)

    text = filled(text)
    expected = [type(each)(filled(each.text)) if isinstance(each, Thought | Content) else each for each in expected]
    for size in (1, 2, 5, len(text)):
        divided = format.stream(TOOLS)
        pieces = [piece for at in range(0, len(text), size) for piece in divided.add(text[at : at + size])]
        found = joined([*pieces, *divided.finish()])
        if not closing and isinstance(found[-1], Content):
            found[-1] = Content(found[-1].text.rstrip())
        assert found == expected, size
    # Marks that the length cuts give no text.
    for mark, before in ((begin, ""), (end, f"{begin}why"), (closing, f"{opening}Hi.")):
        for length in range(1, len(mark)):
            cut = joined(pieces_of(before + mark[:length], format.stream(TOOLS), is_cut=True))
            assert "".join(each.text for each in cut) == before.removeprefix(begin).removeprefix(opening)


def test_thoughts_of_the_model_do_not_depend_on_the_cuts():
    parts = ["<think>", "</think>", "<response>", "</response>", " ", "\n", "<", "a", LOOK, "</", "response>"]
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices(parts, k=draw.randint(1, 8)))
        found = set()
        for size in (1, 3, len(text)):
            divided = GRANITE_3_3.stream(TOOLS)
            pieces = [piece for at in range(0, len(text), size) for piece in divided.add(text[at : at + size])]
            found.add(tuple(joined([*pieces, *divided.finish()])))
        assert len(found) == 1, text


def test_granite_thinks(tmp_path):
    """The template writes an end of line behind the mark, and the model writes two behind its thought."""
    save_byte_tokenizer(tmp_path, GRANITE_THINKING_TEMPLATE)
    with closing(ConversationEncoder(PreTrainedTokenizerFast.from_pretrained(tmp_path))) as encoder:
        talk = [{"role": "user", "content": "What <think>?"}]
        thinks = {
            enabled: encoder.is_thinking_after(encoder.encode(talk, chat_template_kwargs={"enable_thinking": enabled}))
            for enabled in (True, False)
        }
        assert thinks == {True: True, False: False}
        for text, pieces in {
            f"\nRome.\n</think>\n\nI look.\n{ROME}": ["Rome.", "I look.", "weather"],
            "I see\n</think>\n\nSun.": ["I see", "Sun."],
        }.items():
            for size in (1, 5, len(text)):
                found = of_parts([text[at : at + size] for at in range(0, len(text), size)], is_thinking=True)
                shown = [each.name if isinstance(each, CallStart) else each.text.rstrip() for each in found]
                assert [each for each in shown if not each.startswith("{")] == pieces


ROME = with_parameters("weather", city="Rome", days="3")
FULL = with_parameters(
    "weather", city='R "\n<a>', days="3", unit="C", where='{"x": 1.5}', exact="null", stops='[{"x": 1}]'
)
ANSWERS = {"rome": ROME, "full": FULL, "time": with_parameters("time"), "text": "hi", "text and rome": f"hi\n{ROME}"}
ANSWERS |= {
    "a mark in a text": with_parameters("weather", city="a\n<parameter=unit>\nK", days="3"),
    "an end in a text": with_parameters("weather", city=f"a\n</function>\n{CLOSE}", days="3"),
    "both": f"{ROME}\n{ROME}",
    "days missing": with_parameters("weather", city="Rome"),
    "days are text": with_parameters("weather", city="Rome", days="three"),
    "another unit": with_parameters("weather", city="Rome", days="3", unit="K"),
    "a stop without x": with_parameters("weather", city="Rome", days="3", stops="[{}]"),
    "another order": with_parameters("weather", days="3", city="Rome"),
    "one more": with_parameters("time", zone="UTC"),
    "unknown": with_parameters("name"),
}
CALLS = {"rome", "full", "time"}


@pytest.mark.parametrize(
    "options, allowed",
    [
        (dict(required=True, several=False), CALLS),
        (dict(required=True, several=True), {*CALLS, "both"}),
        (dict(required=False, several=False), {*CALLS, "text", "text and rome"}),
    ],
)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("thought", ["", "so\n</think>\n"])
def test_grammars(tmp_path, options, allowed, special, thought):
    """Tags are text or special tokens; the calls come first, or after a thought, or end it."""
    save_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": [OPEN, CLOSE, "</think>"]})
    grammar = calls_grammar(
        TOOLS,
        **options,
        special=tokenizer.all_special_tokens,
        rules=xml_call_rules,
        ends_thought="</think>" if thought else None,
    )
    with closing(Grammars(tokenizer, 267)) as grammars:
        constraint = grammars.constraint("lark", grammar)

    def allows(text):
        tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
        return constraint.count_allowed(tokens) == len(tokens)

    for name, answer in ANSWERS.items():
        assert allows(thought + answer) == (name in allowed), name
        if name in CALLS:
            jsonschema.validate(arguments_of(answer), PARAMETERS if name != "time" else {})
        if thought and "text" not in name:
            assert allows(f"so\n{answer}") == (name in allowed), name
    if thought:
        assert not allows("so") and not allows(f"so {OPEN} so\n</think>\n{ROME}")
    if special:  # the marks in tokens of texts
        tokens = [token for character in f"{thought}so {ROME}" for token in tokenizer.encode(character)]
        assert constraint.count_allowed(tokens) < len(tokens)


@pytest.mark.parametrize("format", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("special", [False, True])
def test_grammars_of_lists(tmp_path, format, special):
    save_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    marks = format.marks
    if special:
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [mark for mark in (marks.open, marks.close) if mark]}
        )
    one, other = ("time", "{}"), ("weather", '{"city": "Rome", "days": 3}')
    answers = {
        "one": listed(marks, one),
        "both": listed(marks, one, other),
        "text": "hi",
        "text and one": f"hi\n{listed(marks, other)}",
        "wrong": listed(marks, ("weather", '{"city": 3, "days": 3}')),
        "none": listed(marks),
        "another mark": "".join(marks.others) + "[]",
    }
    for options, allowed in (
        (dict(required=True, several=False), {"one"}),
        (dict(required=True, several=True), {"one", "both"}),
        (dict(required=False, several=True), {"one", "both", "text", "text and one"}),
    ):
        if not (options["required"] or marks.others):
            allowed = {*allowed, "another mark"}
        grammar = calls_grammar(
            TOOLS, **options, special=tokenizer.all_special_tokens, rules=format.call_rules, marks=marks
        )
        with closing(Grammars(tokenizer, 266)) as grammars:
            constraint = grammars.constraint("lark", grammar)
        for name, answer in answers.items():
            tokens = [*tokenizer.encode(answer), tokenizer.eos_token_id]
            assert (constraint.count_allowed(tokens) == len(tokens)) == (name in allowed), (options, name)


@pytest.mark.parametrize("answer", [*ANSWERS.values(), f"so\n</think>\n{ROME}"])
def test_answers_come_character_by_character(answer):
    assert of_parts(answer, "</think>" in answer) == of(answer, "</think>" in answer)


def test_open_objects_have_any_parameters(tmp_path):
    save_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tool = Tool("f", {"type": "object", "additionalProperties": True})
    grammar = calls_grammar([tool], required=True, several=False, rules=xml_call_rules)
    with closing(Grammars(tokenizer, 264)) as grammars:
        constraint = grammars.constraint("lark", grammar)
    tokens = [*tokenizer.encode(with_parameters("f", a="1", b="x\ny")), tokenizer.eos_token_id]
    assert constraint.count_allowed(tokens) == len(tokens)


def test_names_that_cannot_be_written_are_refused():
    tool = Tool("f", {"properties": {"a>b": {}}})
    with pytest.raises(UserError, match='f has a parameter "a>b", which this model\'s calls cannot have'):
        list(xml_call_rules(0, tool, True))


@pytest.mark.parametrize("name", ["city", "days", "other"])
def test_of_two_values_for_one_parameter_the_first_counts(name):
    twice = (
        f"<parameter={name}>\n1\n</parameter>\n<parameter={name}>\n2\n</parameter>\n<parameter=where>\n3\n</parameter>"
    )
    _, arguments = of(f"{OPEN}\n<function=weather>\n{twice}\n</function>\n{CLOSE}")
    pairs = json.loads(arguments.text, object_pairs_hook=list)
    assert [(key, str(value)) for key, value in pairs] == [(name, "1"), ("where", "3")]
    _, cut = of(f"{OPEN}\n<function=weather>\n<parameter={name}>\n1\n</parameter>\n<parameter={name}>\n2")
    assert list(json.loads(cut.text + "}")) == [name]


def test_strings_are_streamed_as_they_are_generated():
    calls = XmlToolCallStream(TOOLS)
    calls.add(f"{OPEN}\n<function=weather>\n<parameter=city>\n")
    assert calls.add("Ro") == [Arguments("Ro")] and calls.add('"me') == [Arguments('\\"me')]


CALL = f"{OPEN}\n<function=weather>\n"
VALUE = "<parameter=days>\n3\n</parameter>\n"
IN_JSON = f'{OPEN}{{"name": "weather", "arguments": {{"city": '
LONG = {  # the beginning of an answer, and what is repeated behind it
    "text": ("", "a "),
    "space before a call": ("text", " "),
    "marks": ("", OPEN),
    "the beginning of marks": ("", OPEN[:-1]),
    "ends of thoughts": ("", "</think>"),
    "thoughts": ("", "<think></think>"),
    "space before a thought": ("", " "),
    "thoughts in words": ("Here is my thought process:", "Here is my response:"),
    "marked answers": ("<think></think><response>", "</response"),
    "space behind a mark": (OPEN, " "),
    "a name in JSON": (f'{OPEN}{{"name": "', "a"),
    "space in JSON": (f'{OPEN}{{"name": "weather"', " "),
    "space before JSON": (OPEN, "\t"),
    "another order": (f'{OPEN}{{"arguments": {{"city": "', "a"),
    "calls in JSON": ("", f"{IN_JSON}1}}}}{CLOSE}\n"),
    "calls without an end": ("", f"{IN_JSON}1}}}}\n"),
    "constants": (f"{IN_JSON}[", "NaN,"),
    "control characters": (f'{IN_JSON}"', "\n"),
    "escapes": (f'{IN_JSON}"', "\\"),
    "objects": (IN_JSON, '{"x":'),
    "braces": (f"{IN_JSON}1}}", "}"),
    "listed calls": (f"{OPEN}[", '{"name": "weather", "arguments": {}}, '),
    "space in a list": (f"{OPEN}[", " "),
    "functions": ("", "<function=weather>"),
    "the name of a function": (f"{OPEN}<function=f", "f"),
    "the name of a known function": ("<function=w", "e"),
    "space in a call": (CALL, "\n"),
    "the name of a parameter": (f"{CALL}<parameter=p", "p"),
    "parameters": (CALL, VALUE),
    "a parameter in the value of another": (f"{CALL}{VALUE}<parameter=city>\n", "<parameter=days>"),
    "calls": ("", f"{CALL}{VALUE}</function>\n{CLOSE}\n"),
    "a text": (f"{CALL}<parameter=city>\n", "a\n"),
    "a value": (f"{CALL}<parameter=days>\n", "3"),
    "space behind a text": (f"{CALL}<parameter=city>\nx\n</parameter>", " "),
    "space behind a value": (f"{CALL}{VALUE}".rstrip(), " "),
    "ends in a text": (f"{CALL}<parameter=city>\n", "</parameter>"),
    "space behind a call": (f"{CALL}</function>", " "),
    "space behind a call in XML with JSON": (f"{CALL}{{}}", " "),
    "space behind all calls": (f"{CALL}</function>\n{CLOSE}", " "),
    "the end of a call in a text": (f"{CALL}<parameter=city>\n</function>", " "),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize(
    "format",
    [NEMOTRON, GRANITE, GRANITE_3, GRANITE_3_2, GRANITE_3_3, NEMOTRON_NANO_2],
    ids=["Nemotron", "Granite", "Granite 3", "Granite 3.2", "Granite 3.3", "Nemotron Nano 2"],
)
def test_the_work_grows_as_the_answer(format, is_thinking, monkeypatch):
    """Four times the answer takes some four times the steps, not sixteen, in small pieces and all at once."""
    monkeypatch.setattr(tool_calls, "_MOST_OBJECT", 300)
    monkeypatch.setattr(tool_calls, "_PART", 300)
    kinds = AnswerStream, ToolCallStream, _MarkedAnswer
    opening = format.marks.open + "[" * format.marks.is_list
    for name, parts in LONG.items():
        if "<function" in "".join(parts) and format is not NEMOTRON:
            continue
        start, repeated = (part.replace(OPEN, opening) for part in parts)
        for part in (3, 10_000):
            taken, pieces = [], []
            for length in (700, 2800):
                text, divided = start + repeated * (length // len(repeated)), format.stream(TOOLS, is_thinking)
                pieces = []

                def read(text=text, divided=divided, pieces=pieces, part=part):
                    for at in range(0, len(text), part):
                        pieces += divided.add(text[at : at + part])
                    pieces += divided.finish()

                taken.append(steps_of(read, *kinds))
            assert taken[1] < 6 * taken[0], (name, part, taken)
            assert joined(pieces) == joined(pieces_of(text, format.stream(TOOLS, is_thinking))), (name, part)
