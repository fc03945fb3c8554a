"""The formats of answers: how a model writes calls of tools, and whether it thinks before it answers. A checkpoint's
format is found here from its chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine.text import possible_start
from granite4_neuron.generation.parameter_calls import ParameterCallStream, parameter_call_rules
from granite4_neuron.generation.tool_calls import Content, Piece, Tool, ToolCallStream, call_rules

BEGIN_THOUGHT, END_THOUGHT = "<think>", "</think>"
# At the end of a prompt: enough for a mark and white space behind it, of which each character may be a token.
_TOKENS_OF_MARK = 16


@dataclass(frozen=True)
class Thought:
    """A piece of what a model thinks before it answers."""

    text: str


class AnswerStream:
    """Finds the pieces of an answer that comes part by part. What it finds does not depend on the parts.

    White space around the end of a thought belongs to neither side.

    is_plain: whether the answer is one text, whatever it looks like.
    is_thinking: whether the thought has not ended.

    Args:
        calls: finds its calls; None if it may not call tools.
        is_thinking: whether it begins within a thought.
    """

    def __init__(self, calls: ToolCallStream | None, is_thinking: bool = False):
        self._calls = calls
        self.is_plain = calls is None and not is_thinking
        self.is_thinking = is_thinking
        self._held = ""
        self._has_begun = False  # the thought
        self._follows_thought = False

    def add(self, text: str) -> list[Piece | Thought]:
        """Add a part of the answer; return what is now certain."""
        return self._add(text, is_last=False)

    def finish(self) -> list[Piece | Thought]:
        """Return what was held back; call it when nothing follows."""
        return self._add("", is_last=True)

    def _add(self, text: str, is_last: bool) -> list[Piece | Thought]:
        thought = ""
        if self.is_thinking:
            thought, text = self._divided(text, is_last)
        if self._follows_thought:
            text = text.lstrip()
            self._follows_thought = not text
        found: list[Piece | Thought] = [Thought(thought)] if thought else []
        if self._calls is None:
            return [*found, *([Content(text)] if text else [])]
        return [*found, *self._calls.add(text), *(self._calls.finish() if is_last else ())]

    def _divided(self, text: str, is_last: bool) -> tuple[str, str]:
        """Return what is now certain of the thought, and what is behind it."""
        self._held += text
        if not self._has_begun:
            self._held = self._held.lstrip()
        at, behind = self._held.find(END_THOUGHT), ""
        if at >= 0:
            certain, behind, self._held = self._held[:at].rstrip(), self._held[at + len(END_THOUGHT) :], ""
            self.is_thinking, self._follows_thought = False, True
        else:
            length = len(self._held) if is_last else len(self._held) - possible_start(self._held, [END_THOUGHT])
            certain = self._held[:length].rstrip()
            self._held = self._held[len(certain) :]
        self._has_begun = self._has_begun or bool(certain)
        return certain, behind


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers.

    call_stream: makes what finds the calls of an answer that may call these tools.
    call_rules: as `tool_calls.call_rules`.
    thinks: whether a prompt may end with `BEGIN_THOUGHT`; then the answer begins with a thought.
    """

    call_stream: Callable[[Sequence[Tool]], ToolCallStream]
    call_rules: Callable[[int, Tool, bool], Iterable[str]]
    thinks: bool

    def is_thinking_after(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Return whether an answer to a prompt begins within a thought."""
        if not self.thinks:
            return False
        end = tokenizer.decode(list(prompt[-_TOKENS_OF_MARK:]), skip_special_tokens=False)
        return end.rstrip().endswith(BEGIN_THOUGHT)

    def stream(self, tools: Sequence[Tool] | None, is_thinking: bool = False) -> AnswerStream:
        """Return what finds the pieces of an answer.

        Args:
            tools: that it may call; None if it may not call any.
            is_thinking: see `is_thinking_after`.
        """
        return AnswerStream(None if tools is None else self.call_stream(tools), is_thinking)


GRANITE = AnswerFormat(lambda tools: ToolCallStream(), call_rules, thinks=False)
NEMOTRON = AnswerFormat(ParameterCallStream, parameter_call_rules, thinks=True)


def answer_format(tokenizer: PreTrainedTokenizerFast) -> AnswerFormat:
    """Return the format of a checkpoint's answers, from its chat template: Nemotron's, if it shows calls so, or else
    Granite's.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get("default")
    return NEMOTRON if isinstance(template, str) and "<function=" in template else GRANITE
