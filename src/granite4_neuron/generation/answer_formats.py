"""The formats of answers: how a model writes calls of tools, and whether it thinks before it answers. A checkpoint's
format is found here from its chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine.text import possible_start
from granite4_neuron.generation.tool_calls import (
    CLOSE,
    GRANITE_MARKS,
    MOST_SPACE,
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


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks of thoughts.

    begin, end: with which a thought begins and ends, each in one of these spellings.
    by_model: whether the model writes the first, if it wants to think; otherwise the prompt does.
    answer: marks that may stand around the answer; None if there are none.
    """

    begin: Sequence[str] = (BEGIN_THOUGHT,)
    end: Sequence[str] = (END_THOUGHT,)
    by_model: bool = False
    answer: tuple[str, str] | None = None

    @property
    def written(self) -> Set[str]:
        """The marks that the model writes."""
        return {*(self.begin if self.by_model else ()), *self.end, *(self.answer or ())}


class AnswerStream:
    """Finds the pieces of an answer that comes part by part. What it finds does not depend on the parts.

    A thought ends with its mark, or where a call begins. White space around marks of thoughts belongs to neither side.

    is_plain: whether the answer is one text, whatever it looks like.
    is_thinking: whether the thought has begun and not ended.

    Args:
        new_calls: makes what finds calls; None if the answer may not call tools.
        is_thinking: whether it begins within a thought.
        marks: of thoughts.
    """

    def __init__(
        self,
        new_calls: Callable[[], ToolCallStream] | None,
        is_thinking: bool = False,
        marks: ThoughtMarks = ThoughtMarks(),
    ):
        self._marks = marks
        self._new_stream: Callable[[], PieceStream] = new_calls or _TextStream
        self._may_begin = marks.by_model and not is_thinking  # whether a thought may begin with what comes next
        self._stream: PieceStream = self._new_stream() if is_thinking else self._answer_stream()
        self.is_plain = new_calls is None and not is_thinking and not marks.by_model
        self.is_thinking = is_thinking
        self._held = ""  # what may be the beginning of a mark
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

    def _answer_stream(self) -> PieceStream:
        stream = self._new_stream()
        return stream if self._marks.answer is None else _MarkedAnswer(stream, *self._marks.answer)

    def _add(self, text: str, is_last: bool) -> list[Piece | Thought]:
        if self._may_begin:
            text, self._held = self._held + text, ""
            begun = text.lstrip()
            mark = next(filter(begun.startswith, self._marks.begin), None)
            if mark is not None:
                self.is_thinking, text, self._stream = True, begun.removeprefix(mark), self._new_stream()
            elif len(text) - len(begun) <= MOST_SPACE and any(each.startswith(begun) for each in self._marks.begin):
                if not is_last:
                    self._held = text
                    return []
                text = "" if self._is_cut else text
            self._may_begin = False
        return self._in_thought(text, is_last) if self.is_thinking else self._in_answer(text, is_last)

    def _in_answer(self, text: str, is_last: bool) -> list[Piece | Thought]:
        if self._follows_thought:
            text = text.lstrip()
            self._follows_thought = not text
        return [*self._stream.add(text), *(self._stream.finish(self._is_cut) if is_last else ())]

    def _in_thought(self, text: str, is_last: bool) -> list[Piece | Thought]:
        text = self._held + text
        at, mark = min(((at, mark) for mark in self._marks.end if (at := text.find(mark)) >= 0), default=(-1, ""))
        is_end = is_last and not self._is_cut
        certain = at if at >= 0 else len(text) - (0 if is_end else possible_start(text, self._marks.end))
        pieces, self._held = self._stream.add(text[:certain]), text[certain:]
        if any(isinstance(piece, CallStart) for piece in pieces):
            self.is_thinking = False
            return [*self._as_thought(pieces), *self._in_answer(self._held, is_last)]
        if at < 0 and not is_last:
            return self._as_thought(pieces)
        thought = self._as_thought([*pieces, *self._stream.finish(self._is_cut and at < 0)])
        if at < 0:
            return thought
        self.is_thinking, self._follows_thought, self._stream = False, True, self._answer_stream()
        return [*thought, *self._in_answer(self._held.removeprefix(mark), is_last)]

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


class _MarkedAnswer:
    """Leaves out the marks around an answer, if it begins with the first of them, and white space around these.

    Args:
        stream: finds the answer's pieces.
        open, close: the marks.
    """

    def __init__(self, stream: PieceStream, open: str, close: str):
        self._stream = stream
        self._open, self._close = open, close
        self._mark = open  # that may come next; "" for none
        self._follows_mark = False
        self._held = ""  # what may be the beginning of the mark, with white space before it

    def add(self, text: str) -> list[Piece]:
        return self._without_marks(self._stream.add(text))

    def finish(self, is_cut: bool = False) -> list[Piece]:
        pieces, held = self._without_marks(self._stream.finish(is_cut)), self._held
        is_mark = is_cut and possible_start(held, [self._mark])
        return [*pieces, *([Content(held)] if held and not is_mark else [])]

    def _without_marks(self, pieces: Sequence[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content):
                found += map(Content, filter(None, self._texts(piece.text)))
                continue
            if isinstance(piece, CallStart) and self._held:
                found.append(Content(self._held))
                self._held = ""
            if self._mark == self._open:
                self._mark = ""
            self._follows_mark = False
            found.append(piece)
        return found

    def _texts(self, text: str) -> Iterator[str]:
        """Yield what is certain of the text."""
        text, self._held = self._held + text, ""
        if self._follows_mark:
            text = text.lstrip()
            self._follows_mark = not text
        if self._mark == self._open:
            begun = text.lstrip()
            if not begun.startswith(self._open):
                if len(text) - len(begun) <= MOST_SPACE and self._open.startswith(begun):
                    self._held = text
                else:
                    self._mark = ""
                    yield text
                return
            text, self._mark = begun.removeprefix(self._open).lstrip(), self._close
            self._follows_mark = not text
        if not self._mark:
            yield text
            return
        said, mark, text = text.partition(self._mark)
        if mark:
            yield without_space(said)
            text, self._mark = text.lstrip(), ""
            self._follows_mark = not text
            yield text
            return
        certain = without_space(said[: len(said) - possible_start(said, [self._mark])])
        self._held = said[len(certain) :]
        yield certain


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers.

    spelled: texts that a chat template of this format has, all of them.
    marks: of calls.
    call_stream: makes what finds the calls of an answer that may call these tools.
    call_rules: as `tool_calls.call_rules`.
    thoughts: the marks of thoughts; None if the model has none.
    """

    spelled: Sequence[str]
    marks: CallMarks
    call_stream: Callable[[Sequence[Tool]], ToolCallStream]
    call_rules: Callable[[int, Tool, bool], Iterable[str]]
    thoughts: ThoughtMarks | None

    @property
    def ends_thought(self) -> str:
        """The mark with which a thought ends, as the model writes it first of all."""
        return (self.thoughts or ThoughtMarks()).end[0]

    def is_thinking_after(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Return whether an answer to a prompt begins within a thought."""
        if self.thoughts is None:
            return False
        end = tokenizer.decode(list(prompt[-_TOKENS_OF_MARK:]), skip_special_tokens=False)
        return end.rstrip().endswith(tuple(self.thoughts.begin))

    def stream(self, tools: Sequence[Tool] | None, is_thinking: bool = False) -> AnswerStream:
        """Return what finds the pieces of an answer.

        Args:
            tools: that it may call; None if it may not call any.
            is_thinking: see `is_thinking_after`.
        """
        new_calls = None if tools is None else partial(self.call_stream, tools)
        return AnswerStream(new_calls, is_thinking, self.thoughts or ThoughtMarks())


def _in_json(spelled: Sequence[str], marks: CallMarks, thoughts: ThoughtMarks | None = None) -> AnswerFormat:
    return AnswerFormat(spelled, marks, lambda tools: ToolCallStream(marks), call_rules, thoughts)


_THINK = ThoughtMarks()
GRANITE = _in_json((OPEN, CLOSE, '"arguments":'), GRANITE_MARKS)
# Some models of this family write the other mark.
_GRANITE_3_MARKS = CallMarks("<|tool_call|>", "", True, others=(OPEN,))
_GRANITE_3_SPELLED = ("<|start_of_role|>", "<|tool_call|>")
GRANITE_3 = _in_json(_GRANITE_3_SPELLED, _GRANITE_3_MARKS)
GRANITE_3_2 = _in_json(
    (*_GRANITE_3_SPELLED, "Here is my thought process:", "Here is my response:"),
    _GRANITE_3_MARKS,
    ThoughtMarks(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        by_model=True,
    ),
)
GRANITE_3_3 = _in_json(
    (*_GRANITE_3_SPELLED, "<think></think>", "<response></response>"),
    _GRANITE_3_MARKS,
    ThoughtMarks(by_model=True, answer=("<response>", "</response>")),
)
NEMOTRON = AnswerFormat((OPEN, "<function=", "<parameter="), CallMarks(), XmlToolCallStream, xml_call_rules, _THINK)
NEMOTRON_NANO_2 = _in_json(("<TOOLCALL>", "</TOOLCALL>"), CallMarks("<TOOLCALL>", "</TOOLCALL>", True), _THINK)
_FORMATS = (NEMOTRON, NEMOTRON_NANO_2, GRANITE_3_3, GRANITE_3_2, GRANITE_3, GRANITE)


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
