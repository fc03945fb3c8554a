"""The formats of answers: how a model writes calls of tools, and whether it thinks before it answers. A checkpoint's
format is found here from its chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine.text import possible_start
from granite4_neuron.generation.tool_calls import (
    CLOSE,
    GRANITE_MARKS,
    OPEN,
    CallMarks,
    CallStart,
    Content,
    Piece,
    PieceStream,
    Tool,
    ToolCallStream,
    call_rules,
    without_space,
)
from granite4_neuron.generation.xml_tool_calls import END_THOUGHT, XmlToolCallStream, xml_call_rules

BEGIN_THOUGHT = "<think>"
# At the end of a prompt: enough for a mark and white space behind it, of which each character may be a token.
_TOKENS_OF_MARK = 16
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True)
class Thought:
    """A piece of what a model thinks before it answers."""

    text: str


class AnswerStream:
    """Finds the pieces of an answer that comes part by part. What it finds does not depend on the parts.

    A thought ends with `END_THOUGHT`, or where a call begins. White space around its end belongs to neither side.

    is_plain: whether the answer is one text, whatever it looks like.
    is_thinking: whether the thought has not ended.

    Args:
        new_calls: makes what finds calls; None if the answer may not call tools.
        is_thinking: whether it begins within a thought.
    """

    def __init__(self, new_calls: Callable[[], ToolCallStream] | None, is_thinking: bool = False):
        self._new_stream: Callable[[], PieceStream] = new_calls or _TextStream
        self._stream: PieceStream = self._new_stream()
        self.is_plain = new_calls is None and not is_thinking
        self.is_thinking = is_thinking
        self._held = ""  # what may be the beginning of `END_THOUGHT`
        self._is_cut = False
        self._space = ""  # after the thought up to now
        self._has_begun = False  # the thought
        self._follows_thought = False

    def add(self, text: str) -> list[Piece | Thought]:
        """Add a part of the answer; return what is now certain."""
        return self._add(text, is_last=False)

    def finish(self, is_cut: bool = False) -> list[Piece | Thought]:
        """See `PieceStream.finish`."""
        self._is_cut = is_cut
        return self._add("", is_last=True)

    def _add(self, text: str, is_last: bool) -> list[Piece | Thought]:
        return self._in_thought(text, is_last) if self.is_thinking else self._in_answer(text, is_last)

    def _in_answer(self, text: str, is_last: bool) -> list[Piece | Thought]:
        if self._follows_thought:
            text = text.lstrip()
            self._follows_thought = not text
        return [*self._stream.add(text), *(self._stream.finish(self._is_cut) if is_last else ())]

    def _in_thought(self, text: str, is_last: bool) -> list[Piece | Thought]:
        text = self._held + text
        at = text.find(END_THOUGHT)
        is_end = is_last and not self._is_cut
        certain = at if at >= 0 else len(text) - (0 if is_end else possible_start(text, [END_THOUGHT]))
        pieces, self._held = self._stream.add(text[:certain]), text[certain:]
        if any(isinstance(piece, CallStart) for piece in pieces):
            self.is_thinking = False
            return [*self._as_thought(pieces), *self._in_answer(self._held, is_last)]
        if at < 0 and not is_last:
            return self._as_thought(pieces)
        thought = self._as_thought([*pieces, *self._stream.finish(self._is_cut and at < 0)])
        if at < 0:
            return thought
        self.is_thinking, self._follows_thought, self._stream = False, True, self._new_stream()
        return [*thought, *self._in_answer(self._held.removeprefix(END_THOUGHT), is_last)]

    def _as_thought(self, pieces: Sequence[Piece]) -> list[Piece | Thought]:
        """Return pieces whose texts before a call are of the thought."""
        call = next((index for index, piece in enumerate(pieces) if isinstance(piece, CallStart)), len(pieces))
        text = self._space + "".join(piece.text for piece in pieces[:call] if isinstance(piece, Content))
        text = text if self._has_begun else text.lstrip()
        thought = without_space(text)
        self._has_begun, self._space = self._has_begun or bool(thought), text[len(thought) :]
        return [*([Thought(thought)] if thought else []), *pieces[call:]]


class _TextStream:
    """A stream of an answer that is text, whatever it looks like."""

    def add(self, text: str) -> list[Content]:
        return [Content(text)] if text else []

    def finish(self, is_cut: bool = False) -> list[Content]:
        return []


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers.

    spelled: texts that a chat template of this format has, all of them.
    marks: of calls.
    call_stream: makes what finds the calls of an answer that may call these tools.
    call_rules: as `tool_calls.call_rules`.
    thinks: whether a prompt may end with `BEGIN_THOUGHT`; then the answer begins with a thought.
    """

    spelled: Sequence[str]
    marks: CallMarks
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
        return AnswerStream(None if tools is None else partial(self.call_stream, tools), is_thinking)


def _in_json(spelled: Sequence[str], marks: CallMarks, thinks: bool = False) -> AnswerFormat:
    return AnswerFormat(spelled, marks, lambda tools: ToolCallStream(marks), call_rules, thinks)


GRANITE = _in_json((OPEN, CLOSE, '"arguments":'), GRANITE_MARKS)
# Some models of this family write the other mark.
GRANITE_3 = _in_json(("<|start_of_role|>", "<|tool_call|>"), CallMarks("<|tool_call|>", "", True, others=(OPEN,)))
NEMOTRON = AnswerFormat(
    (OPEN, "<function=", "<parameter="), CallMarks(), XmlToolCallStream, xml_call_rules, thinks=True
)
NEMOTRON_NANO_2 = _in_json(("<TOOLCALL>", "</TOOLCALL>"), CallMarks("<TOOLCALL>", "</TOOLCALL>", True), thinks=True)
_FORMATS = (NEMOTRON, NEMOTRON_NANO_2, GRANITE_3, GRANITE)


def shows_unknown_calls(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether a checkpoint's chat templates show tools, but calls in no format that is known here."""
    return _shown_format(tokenizer) is None and any("tools" in each for each in _templates(tokenizer))


def answer_format(tokenizer: PreTrainedTokenizerFast) -> AnswerFormat:
    """Return the format of a checkpoint's answers, from its chat templates; Granite 4's, if these show none."""
    return _shown_format(tokenizer) or GRANITE


def _shown_format(tokenizer: PreTrainedTokenizerFast) -> AnswerFormat | None:
    shown = [_COMMENT.sub("", template).replace("\\", "") for template in _templates(tokenizer)]
    each_format = (each for each in _FORMATS if any(all(text in one for text in each.spelled) for one in shown))
    return next(each_format, None)


def _templates(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    template = tokenizer.chat_template
    return list(template.values()) if isinstance(template, dict) else [template or ""]
