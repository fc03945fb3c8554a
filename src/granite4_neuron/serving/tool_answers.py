"""The calls of tools in an answer, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from granite4_neuron.generation.tool_calls import Arguments, CallStart, Content, ToolCallStream, parse_tool_calls
from granite4_neuron.serving.identity import new_id


class CallsOfAnswer:
    """The calls of one choice: whole with `message`, or as they come with `delta`.

    number: of calls so far.
    """

    def __init__(self) -> None:
        self.number = 0
        self._stream = ToolCallStream()

    def message(self, text: str) -> dict[str, Any]:
        """Return content and calls of a whole answer."""
        content, calls = parse_tool_calls(text)
        self.number = len(calls)
        if not calls:
            return {"content": text}
        described = [{**_new_call(), "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        return {"content": content or None, "tool_calls": described}

    def delta(self, text: str, is_last: bool) -> dict[str, Any]:
        """Return the content and calls that a piece of the answer adds. A call has one entry, because some clients read
        only the first.
        """
        pieces = [*self._stream.add(text), *(self._stream.finish() if is_last else ())]
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
        return ({"content": content} if content else {}) | ({"tool_calls": list(calls.values())} if calls else {})


def _new_call() -> dict[str, Any]:
    return {"id": f"call_{new_id()[:24]}", "type": "function"}
