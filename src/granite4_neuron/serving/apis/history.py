"""A conversation of an API whose messages are lists of items, as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from granite4_neuron.serving.apis.chat.protocol import Message
from granite4_neuron.serving.apis.tools import FunctionCall, ToolCall


class History:
    """Collects the messages. Calls, and what the model said just before them, are one message, as in a chat's answer.

    Raises:
        ValidationError: something is not as in a chat.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._thoughts: list[str] = []  # before the model's next message

    def think(self, text: str) -> None:
        """Add what the model thought before it said what follows."""
        self._thoughts.append(text)

    def say(self, role: str, text: str) -> None:
        """Add a text of the role."""
        thought, self._thoughts = "".join(self._thoughts), []
        self._messages.append({"role": role, "content": text, "reasoning_content": thought or None})

    def call(self, id: str, name: str, arguments: Mapping[str, Any]) -> None:
        """Add a call of the model."""
        if self._thoughts or not self._messages or self._messages[-1]["role"] != "assistant":
            self.say("assistant", "")
        call = ToolCall(id=id, function=FunctionCall(name=name, arguments=dict(arguments)))
        self._messages[-1].setdefault("tool_calls", []).append(call)

    def answer(self, id: str, text: str) -> None:
        """Add the result of a call."""
        self._messages.append({"role": "tool", "tool_call_id": id, "content": text})

    def messages(self) -> list[Message]:
        return [Message(**message) for message in self._messages]
