"""Calls of tools in answers: what they are, and how models write them in JSON. Granite 4:

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>

Nemotron Nano v2, and Granite 3 with another mark and none at the end, as a list:

<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}]</TOOLCALL>

Other formats are in `answer_formats`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from granite4_neuron.config.json_files import CONSTANTS, escaped, in_strict_json, strict_json
from granite4_neuron.engine.request import check_text
from granite4_neuron.engine.text import possible_start
from granite4_neuron.errors import UserError
from granite4_neuron.generation.structured_outputs import MOST_CHARACTERS, schema_text, thought_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_CALLS = 16  # of an answer that is nothing but calls; a small model would go on for ever
# Bounds of what a stream holds and reads again with each piece, so that its work is linear: white space that belongs to
# marks, names in marks, and an object whose members are in another order.
MOST_SPACE, MOST_NAME, _MOST_OBJECT = 64, 256, 2**16
SPACE = rf"\s{{0,{MOST_SPACE}}}"
# Up to the arguments; what follows can be handed on as it comes.
_HEAD = re.compile(
    r'S\{S"name"S:S"([^"\\\x00-\x1f]{0,N})"S,S"arguments"S:S(?=\{)'.replace("S", SPACE).replace("N", str(MOST_NAME))
)
_BEGIN = re.compile(rf"{SPACE}(\S|\Z)")
_LIST = re.compile(rf"{SPACE}\[")
_PART = 4096  # characters
_WHAT_COUNTS = re.compile("|".join([r'["{}<]|\\.|[\x00-\x1f]', *CONSTANTS]), re.DOTALL)


@dataclass(frozen=True)
class CallMarks:
    """The marks of calls.

    open, close: what stands around a call, or around a list of calls in JSON; close is "" if nothing ends it.
    is_list: whether it is a list.
    others: with which calls also begin.
    """

    open: str = OPEN
    close: str = CLOSE
    is_list: bool = False
    others: Sequence[str] = ()

    def are_special(self, special: Collection[str]) -> bool:
        """Return whether they are among the special tokens of a vocabulary, which are given as texts."""
        return {self.open, self.close} - {""} <= {*special}


GRANITE_MARKS = CallMarks()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    arguments: an object in JSON, as the model wrote it.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class Tool:
    """A tool that an answer may call.

    parameters: the JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return an answer's text without its calls, and the calls, as `ToolCallStream` finds them.

    Raises:
        UserError: it is not text.
    """
    check_text(text, "the answer")
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for piece in pieces_of(text, ToolCallStream()):
        match piece:
            case Content():
                content.append(piece.text)
            case CallStart():
                calls.append((piece.name, []))
            case Arguments():
                calls[-1][1].append(piece.text)
    return "".join(content), [ToolCall(name, "".join(arguments)) for name, arguments in calls]


def without_space(text: str) -> str:
    """Return a text without the white space at its end, or without the last `MOST_SPACE` of it."""
    end = text[-MOST_SPACE:]
    return text[: len(text) - len(end) + len(end.rstrip())]


def _call_of(text: str) -> ToolCall | None:
    """Return the call that an object in JSON describes, with its members in any order; None if it describes none. The
    arguments are an object, or one in a text.
    """
    try:
        match strict_json(text):
            case {"name": str(name), "arguments": dict(arguments), **others} if name.isprintable() and not others:
                return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
            case {"name": str(name), "arguments": str(arguments), **others} if name.isprintable() and not others:
                if isinstance(strict_json(arguments), dict):
                    return ToolCall(name, in_strict_json(arguments))
    except (ValueError, RecursionError):
        pass
    return None


@dataclass(frozen=True)
class Content:
    """A piece of an answer's text."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the latest call's arguments."""

    text: str


Piece = Content | CallStart | Arguments


class PieceStream(Protocol):
    """Finds the pieces of an answer that comes part by part."""

    def add(self, text: str) -> list[Any]:
        """Add a part of the answer; return what is now certain."""

    def finish(self, is_cut: bool = False) -> list[Any]:
        """Return what was held back; call it when nothing follows.

        Args:
            is_cut: whether the model did not end the answer. Then a mark that has begun, or a call before its name is
                complete, is left out; otherwise it is text.
        """


def pieces_of(text: str, stream: PieceStream, is_cut: bool = False) -> list[Any]:
    """Return all pieces of a whole answer; see `PieceStream.finish`."""
    return [*stream.add(text), *stream.finish(is_cut)]


class _ObjectScan:
    """Finds the end of an object in JSON that comes piece by piece. Outside of strings it counts braces only.

    wrong: what JSON does not have in the text that was scanned last, but models write: `CONSTANTS`, and control
        characters in strings; where each begins and ends, and the right text.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self.wrong: list[tuple[int, int, str]] = []

    def end(self, text: str, start: int) -> tuple[int, bool]:
        """Scan what follows `start`; return how far the text was read, and whether the object ends there: with its last
        brace, or before a "<" outside of a string, where a mark of a call begins.
        """
        position, self.wrong = start, []
        for match in _WHAT_COUNTS.finditer(text, start):
            position = match.end()
            if match[0] == '"':
                self._is_string = not self._is_string
            elif self._is_string and match[0] < " ":
                self.wrong.append((*match.span(), escaped(match[0])))
            elif not self._is_string and match[0] in CONSTANTS:
                self.wrong.append((*match.span(), "null"))
            elif not self._is_string and match[0] == "<":
                return match.start(), True
            elif not self._is_string and match[0] in "{}":
                self._depth += 1 if match[0] == "{" else -1
                if self._depth == 0:
                    return position, True
        # A backslash belongs to the character after it.
        end = len(text) - text.endswith("\\", position)
        return end if self._is_string else end - possible_start(text[position:end], CONSTANTS), False


class ToolCallStream:
    """Finds the calls in an answer that comes piece by piece, and gives out their arguments as they come: in JSON.

    What it finds does not depend on the pieces. A call begins where its name has been read and its arguments begin:
    then it is one even if its arguments turn out to be malformed or are cut off, or the mark of its end is missing.
    Anything else behind the mark of its beginning is text, but for a whole object with these members in another order,
    or with the arguments in a text. Behind any mark there may be a list of calls.
    """

    def __init__(self, marks: CallMarks = GRANITE_MARKS) -> None:
        self._opening: Sequence[str] = (marks.open, *marks.others)
        self._close = marks.close
        self._held = ""
        self._is_whole = False  # whether nothing follows what is held
        self._is_cut = False  # and whether the model did not end it
        self._step = self._in_text
        self._before = ""  # the call that has begun: what is text if it is none, from the space before its mark
        self._is_list = False  # whether it is in a list
        self._object = _ObjectScan()
        self._scanned = 0  # characters of what is held
        self._may_have_brace = False  # the call's own, behind its arguments
        self._follows_call = False

    def add(self, text: str) -> list[Piece]:
        """Add a piece of the answer; return what is now certain."""
        pieces: list[Piece] = []
        for start in range(0, len(text), _PART):  # because each step copies what is held
            self._held += text[start : start + _PART]
            pieces += self._steps()
        return pieces

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """See `PieceStream.finish`."""
        self._is_whole, self._is_cut = True, is_cut
        return self._steps()

    def _steps(self) -> list[Piece]:
        pieces: list[Piece] = []
        while (found := self._step()) is not None:
            pieces += found
        return [piece for piece in pieces if isinstance(piece, CallStart) or piece.text]

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    # Each step returns what it found, or None if it needs more text. What it decides is certain with any text that may
    # follow, and is decided at the first character that makes it so.

    def _in_text(self) -> list[Piece] | None:
        if self._follows_call:
            self._held = self._held.lstrip()
        found = [(at, mark) for mark in self._opening if (at := self._held.find(mark)) >= 0]
        if not found:
            certain = self._held
            begun = possible_start(certain, self._opening)
            if not self._is_whole or (self._is_cut and begun):
                # Space before a call is not part of the text.
                certain = without_space(certain[: len(certain) - begun])
            if self._is_cut:
                self._held = certain
            if not certain:
                return None
            self._follows_call = False
            return [Content(self._take(len(certain)))]
        at, mark = min(found)
        text = self._take(at + len(mark))[:at]
        self._follows_call = self._follows_call and not text
        content = without_space(text)
        self._before = text[len(content) :] + mark
        self._step, self._is_list = self._step_behind(mark), False
        self._object, self._scanned = _ObjectScan(), 0
        return [Content(content)]

    def _step_behind(self, mark: str) -> Callable[[], list[Piece] | None]:
        """Return the step that follows one of the marks with which a call may begin."""
        return self._in_call

    def _in_call(self) -> list[Piece] | None:
        if not self._is_list and (begin := _LIST.match(self._held)):
            self._before, self._is_list = self._before + self._take(begin.end()), True
            return []
        head = _HEAD.match(self._held)
        if head:
            self._take(head.end())
            self._begin_arguments()
            return [CallStart(head[1])]
        begin = _BEGIN.match(self._held)
        if begin and begin[1] in ("", "{"):
            self._scanned, has_ended = self._object.end(self._held, self._scanned)
            is_long = self._scanned > _MOST_OBJECT
            if not has_ended and not self._is_whole and not is_long:
                return None
            if not has_ended and self._is_cut:
                return self._leave_out()
            if has_ended and not is_long and (call := _call_of(self._held[: self._scanned])) is not None:
                self._take(self._scanned)
                self._step, self._may_have_brace = self._after_call, False
                return [CallStart(call.name), Arguments(call.arguments)]
        return self._no_call()

    def _no_call(self) -> list[Piece]:
        """Return what seemed to begin a call as text."""
        self._step, self._follows_call = self._in_text, False
        return [Content(self._before)]

    def _leave_out(self) -> list[Piece]:
        """Leave out the beginning of a call that is cut off before its name is complete."""
        self._held, self._step, self._follows_call = "", self._in_text, False
        return []

    def _begin_arguments(self) -> None:
        self._step, self._object = self._in_arguments, _ObjectScan()

    def _in_arguments(self) -> list[Piece] | None:
        length, has_ended = self._object.end(self._held, 0)
        if has_ended or (self._is_whole and not self._held):
            self._step, self._may_have_brace = self._after_call, True
        elif self._is_whole:
            length = len(self._held)
        elif not length:
            return None
        text, parts, at = self._take(length), [], 0
        for begin, end, right in self._object.wrong:
            parts += [text[at:begin], right]
            at = end
        return [Arguments("".join([*parts, text[at:]]))]

    def _after_call(self) -> list[Piece] | None:
        self._held = self._held.lstrip()
        if self._may_have_brace and self._held.startswith("}"):
            self._may_have_brace, self._held = False, self._held[1:].lstrip()
        if not self._held and not self._is_whole and (self._may_have_brace or self._is_list):
            return None
        if self._is_list:
            if self._held.startswith(","):
                self._before, self._object, self._scanned = self._take(1), _ObjectScan(), 0
                self._step = self._in_call
                return []
            self._is_list, self._held = False, self._held.removeprefix("]").lstrip()
        is_part = self._close.startswith(self._held) and self._held != self._close
        if is_part and not self._is_whole:
            return None
        self._held = "" if is_part else self._held.removeprefix(self._close)
        self._step, self._follows_call = self._in_text, True
        return []


def call_rules(number: int, tool: Tool, disable_any_whitespace: bool) -> Iterable[str]:
    """Return the rules, in Lark's syntax, of `tool_NUMBER`: a call of this tool, without marks around it.

    Raises:
        UserError: as `schema_text`.
    """
    begin = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    yield f'tool_{number}: {begin} arguments_{number} "}}"'
    name = f"the schema of the arguments of {tool.name}"
    schema = schema_text(tool.parameters, name, disable_any_whitespace=disable_any_whitespace)
    yield f"arguments_{number}: %json {schema}"


def text_rule(terminal: str, *without: str) -> str:
    """Return the rule, in Lark's syntax, of any text without these marks."""
    marks = "|".join(re.escape(mark).replace("/", r"\/") for mark in without)
    return rf"{terminal}: /(.|\n)*/ & ~/(.|\n)*({marks})(.|\n)*/"


def calls_grammar(
    tools: Sequence[Tool],
    *,
    required: bool,
    several: bool,
    answer: Mapping[str, Any] | None = None,
    special: Collection[str] = (),
    disable_any_whitespace: bool = True,
    rules: Callable[[int, Tool, bool], Iterable[str]] = call_rules,
    marks: CallMarks = GRANITE_MARKS,
    ends_thought: str | None = None,
) -> str:
    """Return the grammar, in Lark's syntax, of answers that call these tools with arguments by their schemas.

    Args:
        required: whether an answer is nothing but calls, at least one; otherwise text may come before them, or take
            their place.
        several: whether there may be several calls.
        answer: the JSON schema of the text, which then comes before no call; None for any text.
        special: the special tokens of the vocabulary, as texts.
        disable_any_whitespace: of arguments and of a JSON answer, see `schema_text`.
        rules, marks: of the format of calls; rules as `call_rules`.
        ends_thought: what ends the thought that the answer begins with, unless its first call does; None if it begins
            with none.

    Raises:
        UserError: as `schema_text`, or the schemas are too long together.
    """
    is_free = not required and answer is None
    are_special = marks.are_special(special)
    opening, close = (f"{marks.open} ", marks.close) if are_special else map(json.dumps, (marks.open, marks.close))
    lines = [*_after_open(marks, len(tools), several, close if marks.close else ""), f"call: {opening} after_open"]
    lines += _rules_of_tools(tools, rules, disable_any_whitespace)
    start, more = _start(is_free, repeats=several and not marks.is_list)
    if answer is not None and not required:
        schema = schema_text(answer, "the JSON schema", disable_any_whitespace=disable_any_whitespace)
        start += " | answer"
        lines.append(f"answer: %json {schema}")
    if ends_thought is not None:
        start = f"thought ({start}) | called {more}"
        lines += thought_rules(ends_thought, special)
    if is_free or ends_thought is not None:
        lines += [
            "called: opened after_open",
            f"opened: TEXT {marks.open}" if are_special else f"opened[lazy]: TEXT {json.dumps(marks.open)}",
            text_rule("TEXT", marks.open, *marks.others),
        ]
    return "\n".join(["%llguidance {}", f"start: {start}", *lines]) + "\n"


def _rules_of_tools(
    tools: Sequence[Tool], rules: Callable[[int, Tool, bool], Iterable[str]], disable_any_whitespace: bool
) -> list[str]:
    """Return the rules of all tools; raise UserError if they are too long together."""
    lines, length = [], 0
    for rule in chain.from_iterable(rules(number, each, disable_any_whitespace) for number, each in enumerate(tools)):
        lines.append(rule)
        length += len(rule)
        if length > MOST_CHARACTERS:
            raise UserError(f"the schemas of the tools have more than {MOST_CHARACTERS:,} characters together.")
    return lines


def _start(is_free: bool, repeats: bool) -> tuple[str, str]:
    """Return what an answer may be, and what may come after its first call.

    Args:
        is_free: whether text may come before calls, or take their place.
        repeats: whether a call may follow another one.
    """
    if is_free:
        return ("called* TEXT", "called* TEXT") if repeats else ("called | TEXT", "")
    more = f'("\\n" call){{0,{MOST_CALLS - 1}}}' if repeats else ""
    return f"call {more}", more


def _after_open(marks: CallMarks, num_tools: int, several: bool, closing: str) -> list[str]:
    """Return the rules of what comes after the opening mark: a call of one tool, or a list of calls."""
    tool = " | ".join(f"tool_{number}" for number in range(num_tools))
    if not marks.is_list:
        return [f'after_open: "\\n" ({tool}) "\\n" {closing}']
    further = f'(", " any_tool){{0,{MOST_CALLS - 1}}}' if several else ""
    return [f'after_open: "[" any_tool {further} "]" {closing}', f"any_tool: {tool}"]
