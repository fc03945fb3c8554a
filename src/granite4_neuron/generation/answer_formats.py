"""The formats of answers: how a model writes calls of tools. A checkpoint's is found here from its chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from granite4_neuron.generation.tool_calls import Content, Piece, Tool, ToolCallStream, call_rules


class AnswerStream:
    """Finds the pieces of an answer that comes part by part. What it finds does not depend on the parts.

    is_plain: whether the answer is one text, whatever it looks like.

    Args:
        calls: finds its calls; None if it may not call tools.
    """

    def __init__(self, calls: ToolCallStream | None):
        self._calls = calls
        self.is_plain = calls is None

    def add(self, text: str) -> list[Piece]:
        """Add a part of the answer; return what is now certain."""
        if self._calls is not None:
            return self._calls.add(text)
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """Return what was held back; call it when nothing follows."""
        return [] if self._calls is None else self._calls.finish()


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers.

    call_stream: makes what finds the calls of an answer that may call these tools.
    call_rules: as `tool_calls.call_rules`.
    """

    call_stream: Callable[[Sequence[Tool]], ToolCallStream]
    call_rules: Callable[[int, Tool, bool], Iterable[str]]

    def stream(self, tools: Sequence[Tool] | None) -> AnswerStream:
        """Return what finds the pieces of an answer.

        Args:
            tools: that it may call; None if it may not call any.
        """
        return AnswerStream(None if tools is None else self.call_stream(tools))


GRANITE = AnswerFormat(lambda tools: ToolCallStream(), call_rules)


def answer_format(tokenizer: PreTrainedTokenizerFast) -> AnswerFormat:
    """Return the format of a checkpoint's answers, from its chat template."""
    return GRANITE
