"""Calls of tools, as Granite 4 writes them in its answers:

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from granite4_neuron.engine.text import possible_start
from granite4_neuron.generation.structured_outputs import schema_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Up to the arguments; what follows can be handed on as it comes.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_END = re.compile(r"\s*\}\s*" + CLOSE)
_CLOSE = re.compile(r"\s*" + CLOSE)
_SPACE = re.compile(r"\s*")
_CHARACTERS_THAT_COUNT = re.compile(r'["{}]|\\.', re.DOTALL)


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
    """Return an answer's text without its calls, and the calls. A call that is malformed or cut off stays text."""
    content, calls, end = "", [], 0
    while (start := text.find(OPEN, end)) >= 0:
        content += text[end:start]
        call, after = _call_at(text, start + len(OPEN))
        if call is None:
            end = start + len(OPEN)
            content += OPEN
        else:
            calls.append(call)
            content, end = content.rstrip(), _SPACE.match(text, after).end()
    return content + text[end:], calls


def _call_at(text: str, start: int) -> tuple[ToolCall | None, int]:
    """Return the call whose JSON begins at `start`, and where it ends; None if there is none."""
    head = _HEAD.match(text, start)
    try:
        begin = (head or _SPACE.match(text, start)).end()
        value, end = json.JSONDecoder().raw_decode(text, begin)
        name, arguments = (head[1], text[begin:end]) if head else _members(value)
    except (ValueError, RecursionError):
        return None, start
    closing = (_END if head else _CLOSE).match(text, end)
    return (ToolCall(name, arguments), closing.end()) if closing else (None, start)


def _members(value: object) -> tuple[str, str]:
    """Return name and arguments of a call with its members in another order.

    Raises:
        ValueError: it is no call.
    """
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        raise ValueError
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError
    return name, json.dumps(arguments, ensure_ascii=False)


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


class ToolCallStream:
    """Finds the calls in an answer that comes piece by piece, and gives out their arguments as they come.

    All pieces together are what `parse_tool_calls` finds, but for a call whose arguments turn out to be malformed or
    cut off: the beginning of such a call has been given out already.
    """

    def __init__(self) -> None:
        self._held = ""
        self._step = self._in_text
        self._space = ""  # before the call that has begun
        self._depth = 0
        self._is_string = False
        self._follows_call = False

    def add(self, text: str) -> list[Piece]:
        """Add a piece of the answer; return what is now certain."""
        self._held += text
        pieces: list[Piece] = []
        while (found := self._step()) is not None:
            pieces += found
        return [piece for piece in pieces if isinstance(piece, CallStart) or piece.text]

    def finish(self) -> list[Piece]:
        """Return what was held back; call it when nothing follows."""
        held, self._held = self._held, ""
        if self._step == self._in_arguments:
            return [Arguments(held)] if held else []
        if self._step == self._after_arguments and f"}}{CLOSE}".startswith("".join(held.split())):
            return []
        if self._step == self._in_call:
            held = self._space + OPEN + held
        if self._follows_call:
            held = held.lstrip()
        return [Content(held)] if held else []

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    # Each step returns what it found, or None if it needs more text.

    def _in_text(self) -> list[Piece] | None:
        if self._follows_call:
            self._held = self._held.lstrip()
        at = self._held.find(OPEN)
        if at < 0:
            # Space before a call is no part of the text.
            certain = self._held[: len(self._held) - possible_start(self._held, [OPEN])].rstrip()
            if not certain:
                return None
            self._follows_call = False
            return [Content(self._take(len(certain)))]
        text = self._take(at + len(OPEN))[:at]
        self._follows_call = self._follows_call and not text
        self._step, self._space = self._in_call, text[len(text.rstrip()) :]
        return [Content(text.rstrip())]

    def _in_call(self) -> list[Piece] | None:
        head = _HEAD.match(self._held)
        if head:
            self._take(head.end())
            self._step, self._depth, self._is_string = self._in_arguments, 0, False
            return [CallStart(head[1])]
        at = self._held.find(CLOSE)
        if at < 0:
            return None
        self._step = self._in_text
        body = self._take(at + len(CLOSE))
        call, end = _call_at(body, 0)
        if call is None or end < len(body):
            self._held, self._follows_call = body + self._held, False
            return [Content(self._space + OPEN)]
        self._follows_call = True
        return [CallStart(call.name), Arguments(call.arguments)]

    def _in_arguments(self) -> list[Piece] | None:
        for match in _CHARACTERS_THAT_COUNT.finditer(self._held):
            if match[0] == '"':
                self._is_string = not self._is_string
            elif not self._is_string and match[0] in "{}":
                self._depth += 1 if match[0] == "{" else -1
                if self._depth == 0:
                    self._step = self._after_arguments
                    return [Arguments(self._take(match.end()))]
        # A backslash belongs to the character after it.
        is_open = len(self._held) - len(self._held.rstrip("\\"))
        text = self._take(len(self._held) - is_open % 2)
        return [Arguments(text)] if text else None

    def _after_arguments(self) -> list[Piece] | None:
        end = _END.match(self._held)
        if not end and CLOSE not in self._held:
            return None
        self._step, self._follows_call = self._in_text, True
        if end:
            self._take(end.end())
            return []
        return [Content(self._take(self._held.index(CLOSE) + len(CLOSE)))]


def calls_grammar(
    tools: Sequence[Tool],
    *,
    required: bool,
    several: bool,
    answer: Mapping[str, Any] | None = None,
    special: bool = False,
) -> str:
    """Return the grammar, in Lark's syntax, of answers that call these tools with arguments by their schemas.

    Args:
        required: whether an answer is nothing but calls, at least one; otherwise text may come before them, or take
            their place.
        several: whether there may be several calls.
        answer: the JSON schema of the text, which then comes before no call; None for any text.
        special: whether `OPEN` and `CLOSE` are special tokens of the vocabulary.

    Raises:
        UserError: as `schema_text`.
    """
    opening, closing = (f"{OPEN} ", CLOSE) if special else (json.dumps(OPEN), json.dumps(CLOSE))
    calls = 'call ("\\n" call)*' if several else "call"
    lines = [
        f"call: {opening} after_open",
        f'after_open: "\\n" ({" | ".join(f"tool_{number}" for number in range(len(tools)))}) "\\n" {closing}',
    ]
    for number, tool in enumerate(tools):
        begin = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        lines.append(f'tool_{number}: {begin} arguments_{number} "}}"')
        schema = schema_text(tool.parameters, f"the schema of the arguments of {tool.name}")
        lines.append(f"arguments_{number}: %json {schema}")
    if required:
        lines.insert(0, f"start: {calls}")
    elif answer is not None:
        lines[:0] = [f"start: {calls} | answer", f"answer: %json {schema_text(answer, 'the JSON schema')}"]
    else:
        opened = f"TEXT {OPEN}" if special else "opened"
        lines[:0] = [
            "start: called* TEXT" if several else "start: called | TEXT",
            f"called: {opened} after_open",
            *([] if special else [f"opened[lazy]: TEXT {json.dumps(OPEN)}"]),
            r"TEXT: /(.|\n)*/",
        ]
    return "%llguidance {}\n" + "\n".join(lines) + "\n"
