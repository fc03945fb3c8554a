"""Calls of tools as Nemotron 3 writes them, in XML: a parameter is text between two lines, and the tool says its type.

<tool_call>
<function=weather>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import regex

from granite4_neuron.config.json_files import CONSTANTS, in_strict_json, strict_json
from granite4_neuron.errors import UserError
from granite4_neuron.generation.schema_references import DEFINITIONS
from granite4_neuron.generation.structured_outputs import schema_text
from granite4_neuron.generation.tool_calls import (
    CLOSE,
    MOST_NAME,
    OPEN,
    SPACE,
    Arguments,
    CallMarks,
    CallStart,
    Piece,
    Tool,
    ToolCallStream,
    text_rule,
)

END_THOUGHT = "</think>"
_END_OF_VALUE, _END_OF_CALL = "</parameter>", "</function>"
_NAME = rf"[^<>\n]{{1,{MOST_NAME}}}"
_FUNCTION = "<function="
_HEAD = regex.compile(rf"{SPACE}{_FUNCTION}({_NAME})>")
_BARE_HEAD = regex.compile(rf"({_NAME})>")  # behind `_FUNCTION`
_JSON = regex.compile(rf"{SPACE}[\[{{]")
_MARK = regex.compile(rf"(?:<parameter=(?P<name>{_NAME})>(?:\n|(?=.))|{_END_OF_CALL})", regex.DOTALL)
_TEXT = frozenset({"string"})
# As Python writes them, which templates show of earlier calls.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}}
_TYPES |= {dict: {"object"}, list: {"array"}, str: {"string"}}


class XmlToolCallStream(ToolCallStream):
    """Finds calls in this format, and gives out their arguments in JSON: a string as it comes, anything else whole.

    A call begins where its function's name has been read, as in `ToolCallStream`, and several may share an `OPEN`. A
    value that is not a string by the tool's schema is what it is in JSON, if that is of the right type, and otherwise a
    string. Of values for one parameter the first counts. `END_THOUGHT` behind a call is not part of the text, because a
    thought ends where a call in it begins.

    Models also write a call of a known tool without `OPEN`, one in Granite's format, and one whose arguments are an
    object in JSON behind the function's name.
    """

    def __init__(self, tools: Sequence[Tool]):
        super().__init__(CallMarks(others=(_FUNCTION,)))
        self._tools = {tool.name: _properties(tool) for tool in tools}
        self._ends: dict[str, regex.Pattern[str]] = {}  # of values, by the tool; "" for those that are unknown
        self._end_of_value: regex.Pattern[str]
        self._parameters: Mapping[str, Any] = {}  # schemas of the call that has begun, by name
        self._given: set[str] = set()  # its parameters up to now
        self._is_again = False  # whether the value that has begun is of a parameter that has one, and is left out
        self._types: frozenset[str] = frozenset()  # of the value that has begun; none for any
        self._value: list[str] = []  # the parts of it, unless it is a string

    def _in_text(self) -> list[Piece] | None:
        if self._follows_call:
            self._held = self._held.lstrip()
            if END_THOUGHT.startswith(self._held) and self._held != END_THOUGHT and not self._is_whole:
                return None
            self._held = self._held.removeprefix(END_THOUGHT)
        return super()._in_text()

    def _in_call(self) -> list[Piece] | None:
        if head := _HEAD.match(self._held, partial=not self._is_whole):
            return self._begin(head)
        if _JSON.match(self._held):
            return super()._in_call()
        if self._is_cut_head():
            return self._leave_out()
        return self._no_call()

    def _step_behind(self, mark: str) -> Callable[[], list[Piece] | None]:
        return self._in_call if mark == OPEN else self._in_bare_call

    def _in_bare_call(self) -> list[Piece] | None:
        head = _BARE_HEAD.match(self._held, partial=True)
        if head and ((not head.partial and head[1] in self._tools) or (head.partial and not self._is_whole)):
            return self._begin(head)
        if head and head.partial and self._is_cut:
            return self._leave_out()
        return self._no_call()

    def _after_call(self) -> list[Piece] | None:
        self._held = self._held.lstrip()
        # Behind arguments in JSON their end comes here.
        if self._held != _END_OF_CALL and _END_OF_CALL.startswith(self._held):
            if not self._is_whole:
                return None
            self._held = ""
        self._held = self._held.removeprefix(_END_OF_CALL).lstrip()
        if head := _HEAD.match(self._held, partial=not self._is_whole):
            return self._begin(head)
        return self._leave_out() if self._held and self._is_cut_head() else super()._after_call()

    def _is_cut_head(self) -> bool:
        return self._is_cut and _HEAD.match(self._held, partial=True) is not None

    def _begin(self, head: regex.Match[str]) -> list[Piece] | None:
        if head.partial:
            return None
        self._take(head.end())
        tool = head[1] if head[1] in self._tools else ""
        self._step, self._parameters, self._given = self._in_body, self._tools.get(tool, {}), set()
        if tool not in self._ends:
            self._ends[tool] = _end_of_value(self._parameters)
        self._end_of_value = self._ends[tool]
        return [CallStart(head[1])]

    def _in_body(self) -> list[Piece] | None:
        self._held = self._held.lstrip()
        if self._held.startswith("{"):
            self._begin_arguments()
            return []
        if not self._held and not self._is_whole:
            return None
        self._step = self._between_parameters
        return [Arguments("{")]

    def _between_parameters(self) -> list[Piece] | None:
        self._held = self._held.lstrip()
        mark = _MARK.match(self._held, partial=True)
        if mark and mark.partial:
            if not self._is_whole:
                return None
            self._held = ""  # it is cut off
            return self._end("")
        if not mark or mark["name"] is None:
            self._take(mark.end() if mark else 0)
            return self._end("}")
        self._take(mark.end())
        name, comma = mark["name"], ", " if self._given else ""
        self._is_again = name in self._given
        self._given.add(name)
        self._types, self._value = _types(self._parameters.get(name, {})), []
        self._step = self._in_text_value if self._types == _TEXT else self._in_value
        if self._is_again:
            self._step = self._in_value
            return []
        quote = '"' if self._types == _TEXT else ""
        return [Arguments(f"{comma}{json.dumps(name, ensure_ascii=False)}: {quote}")]

    def _in_text_value(self) -> list[Piece] | None:
        text, has_ended = self._take_value()
        if has_ended:
            return [Arguments(_escaped(text) + '"')]
        if self._is_whole:
            return self._end(_escaped(text))
        return [Arguments(_escaped(text))] if text else None

    def _in_value(self) -> list[Piece] | None:
        text, has_ended = self._take_value()
        self._value.append(text)
        if has_ended:
            return [] if self._is_again else [Arguments(_in_json("".join(self._value), self._types))]
        return self._end("" if self._is_again else "".join(self._value)) if self._is_whole else None

    def _take_value(self) -> tuple[str, bool]:
        """Take what is certain of a value, and its end; return the first, and whether there is an end."""
        # The end of the answer ends a call, too.
        text = self._held + (CLOSE if self._is_whole else "")
        end = self._end_of_value.search(text, partial=not self._is_whole)
        while end is not None and not end.partial and end["next"] in self._given:  # a value may spell it
            end = self._end_of_value.search(text, end.end() + 1, partial=not self._is_whole)
        value = self._take(len(self._held) if end is None else end.start())
        if end is None or end.partial:
            return value, False
        self._take(len(end[0]))
        self._step = self._between_parameters
        return value, True

    def _end(self, arguments: str) -> list[Piece]:
        """End the call with the last of its arguments."""
        self._step, self._may_have_brace = self._after_call, False
        return [Arguments(arguments)]


def _end_of_value(parameters: Collection[str]) -> regex.Pattern[str]:
    """Return what ends a value: its mark, if another one follows, because a text may spell it; or, where it is missing,
    the `next` one of these parameters, or the end of the call.
    """
    open_or_close = f"(?:{OPEN}|{CLOSE}|<function=)"
    return regex.compile(
        rf"\n?(?:{_END_OF_VALUE}{SPACE}(?=<parameter=|{_END_OF_CALL}|{open_or_close})"
        rf"|(?=<parameter=(?P<next>\L<parameters>)>)|(?={_END_OF_CALL}{SPACE}{open_or_close}))",
        parameters=parameters,
    )


def xml_call_rules(number: int, tool: Tool, disable_any_whitespace: bool) -> Iterator[str]:
    """Return rules as `tool_calls.call_rules`, of this format. Parameters are in the order of the schema. A string
    may be any, or one of its schema's `enum`; everything else follows its schema.

    Raises:
        UserError: as `schema_text`; also if a name cannot be written in this format.
    """
    parts, properties, required = [], _properties(tool), tool.parameters.get("required")
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    definitions = {name: tool.parameters[name] for name in DEFINITIONS if name in tool.parameters}
    for index, (name, schema) in enumerate(properties.items()):
        if not regex.fullmatch(_NAME, name):
            raise UserError(f"{tool.name} has a parameter {json.dumps(name)}, which this model's calls cannot have.")
        rule = f"parameter_{number}_{index}"
        parts.append(rule if name in needed else f"{rule}?")
        yield f"{rule}: {_mark('parameter', name)} {rule}_value"
        types = _types(schema)
        if types and "string" not in types:
            about = f"the schema of {name}, an argument of {tool.name},"
            text = schema_text({**definitions, **schema}, about, disable_any_whitespace=disable_any_whitespace)
            yield f"{rule}_value: {rule}_json END_{number}"
            yield f"{rule}_json: %json {text}"
        elif types == _TEXT and (choices := _choices(schema)):
            yield f"{rule}_value: ({' | '.join(map(_quoted, choices))}) END_{number}"
        else:
            yield f"{rule}_value: text_{number}"
    if tool.parameters.get("additionalProperties") or not _is_described(tool):
        parts.append(f"more_{number}*")
        yield f'more_{number}: "<parameter=" /[^<>\\n]+/ ">\\n" text_{number}'
    yield f"tool_{number}: {_mark('function', tool.name)} {' '.join(parts)} {json.dumps(_END_OF_CALL)}"
    end = _quoted(f"\n{_END_OF_VALUE}\n")
    yield f'text_{number}: until_{number} "\\n"'
    yield f"until_{number}[lazy]: VALUE_{number} {_quoted(_END_OF_VALUE)}"
    yield text_rule(f"VALUE_{number}", "<parameter=", _END_OF_CALL)
    yield f"END_{number}: {end}"


def _properties(tool: Tool) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name, as far as they are described here and not elsewhere."""
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _choices(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the only values that a schema allows, if it lists them."""
    return schema.get("enum") or ([schema["const"]] if "const" in schema else [])


def _is_described(tool: Tool) -> bool:
    return not tool.parameters.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}


def _types(schema: Any) -> frozenset[str]:
    """Return the names of the types that a value may have in JSON; none if any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(type for value in values for type in _types_of(value))
    parts = schema.get("allOf")
    if isinstance(parts, list) and (known := list(filter(None, map(_types, parts)))):
        return frozenset.intersection(*known)
    several = schema.get("anyOf") or schema.get("oneOf")
    each = list(map(_types, several)) if isinstance(several, list) else []
    return frozenset().union(*each) if all(each) else frozenset()


def _types_of(value: Any) -> set[str]:
    if isinstance(value, float) and value.is_integer():  # JSON Schema takes 3.0 for an integer
        return {"integer", "number"}
    return _TYPES.get(type(value), set())


def _in_json(text: str, types: frozenset[str]) -> str:
    """Return a value in JSON, if it can be of one of the types; of any, if there are none."""
    shown = _PYTHON.get(text.strip(), text)
    try:
        value = text if shown.strip() in CONSTANTS else strict_json(shown)
    except (ValueError, RecursionError):
        value = text
    is_right = not isinstance(value, str) and (not types or types & _types_of(value))
    return in_strict_json(shown.strip()) if is_right else json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _mark(kind: str, name: str) -> str:
    return _quoted(f"<{kind}={name}>\n")


def _quoted(text: Any) -> str:
    """Return a text as a terminal of Lark's syntax."""
    return json.dumps(text)
