"""What is in an answer, its thought, its text and its calls of tools, in the form of OpenAI's chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from granite4_neuron.engine import Output
from granite4_neuron.generation.answer_formats import AnswerStream, Thought
from granite4_neuron.generation.tool_calls import Arguments, CallStart, Content, Piece, pieces_of
from granite4_neuron.serving.apis.identity import new_id


class CallsOfAnswer:
    """The parts of one choice: whole with `message`, or as they come with `delta`.

    number: of calls so far.
    """

    def __init__(self, stream: AnswerStream) -> None:
        self.number = 0
        self._stream = stream

    def message(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return thought, content and calls of a whole answer."""
        text = "".join(output.text for output in outputs)
        thought, content, calls = self._parts(pieces_of(text, self._stream, outputs[-1].is_cut))
        said = {"reasoning_content": thought} if thought else {}
        if not calls:
            return {"content": content, **said}
        described = [{name: part for name, part in call.items() if name != "index"} for call in calls]
        return {"content": content or None, **said, "tool_calls": described}

    def delta(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return what new outputs add. A call has one entry, because some clients read only the first."""
        text, last = "".join(output.text for output in outputs), outputs[-1]
        if self._stream.is_plain:
            return {"content": text}
        pieces = self._stream.add(text)
        if last.finish_reason is not None:
            pieces += self._stream.finish(last.is_cut)
        thought, content, calls = self._parts(pieces)
        parts = {"reasoning_content": thought, "content": content, "tool_calls": calls}
        return {name: part for name, part in parts.items() if part}

    def _parts(self, pieces: Sequence[Piece | Thought]) -> tuple[str, str, list[dict[str, Any]]]:
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        calls: dict[int, dict[str, Any]] = {}
        arguments: dict[int, list[str]] = {}
        for piece in pieces:
            if isinstance(piece, CallStart):
                calls[self.number] = {"index": self.number, **_new_call(), "function": {"name": piece.name}}
                arguments[self.number] = []
                self.number += 1
            elif isinstance(piece, Arguments):
                index = self.number - 1
                calls.setdefault(index, {"index": index, "function": {}})
                arguments.setdefault(index, []).append(piece.text)
        for index, parts in arguments.items():
            calls[index]["function"]["arguments"] = "".join(parts)
        return thought, content, list(calls.values())


def _new_call() -> dict[str, Any]:
    return {"id": f"call_{new_id()[:24]}", "type": "function"}
