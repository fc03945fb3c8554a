"""What is in an answer, its text and its calls of tools, in the form of OpenAI's chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from granite4_neuron.generation.answer_formats import AnswerStream
from granite4_neuron.generation.tool_calls import Arguments, CallStart, Content, Piece, pieces_of
from granite4_neuron.serving.identity import new_id


class CallsOfAnswer:
    """The parts of one choice: whole with `message`, or as they come with `delta`.

    number: of calls so far.
    """

    def __init__(self, stream: AnswerStream) -> None:
        self.number = 0
        self._stream = stream

    def message(self, text: str) -> dict[str, Any]:
        """Return content and calls of a whole answer."""
        content, calls = self._parts(pieces_of(text, self._stream))
        if not calls:
            return {"content": content}
        described = [{name: part for name, part in call.items() if name != "index"} for call in calls]
        return {"content": content or None, "tool_calls": described}

    def delta(self, text: str, is_last: bool) -> dict[str, Any]:
        """Return what a piece of the answer adds. A call has one entry, because some clients read only the first."""
        if self._stream.is_plain:
            return {"content": text}
        content, calls = self._parts([*self._stream.add(text), *(self._stream.finish() if is_last else ())])
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def _parts(self, pieces: Sequence[Piece]) -> tuple[str, list[dict[str, Any]]]:
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, CallStart):
                function = {"name": piece.name, "arguments": ""}
                calls[self.number] = {"index": self.number, **_new_call(), "function": function}
                self.number += 1
            elif isinstance(piece, Arguments):
                index = self.number - 1
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return content, list(calls.values())


def _new_call() -> dict[str, Any]:
    return {"id": f"call_{new_id()[:24]}", "type": "function"}
