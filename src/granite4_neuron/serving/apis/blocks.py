"""The parts of an answer in turn, thoughts, texts and calls of tools: for APIs whose answers are lists of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from granite4_neuron.engine import Output, TokenLogprob
from granite4_neuron.generation.answer_formats import AnswerStream, Thought
from granite4_neuron.generation.tool_calls import CallStart, Content, Piece
from granite4_neuron.serving.apis.identity import new_id


@dataclass
class Block:
    """A part of an answer.

    index: its place among all.
    tool: the name of the tool that it calls; None for a text or a thought.
    is_thought: whether it is what the model thinks before it answers.
    parts: of the text, or of the call's arguments in JSON.
    logprobs: of its tokens, if the request asks for them; a call's begin with those of the mark before it.
    has_ended: whether nothing more is added to it.
    is_cut: whether the answer ended within it before it was complete.
    id: 32 hexadecimal digits.
    """

    index: int
    tool: str | None = None
    is_thought: bool = False
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    has_ended: bool = False
    is_cut: bool = False
    id: str = field(default_factory=new_id)

    @property
    def text(self) -> str:
        """What there is of it."""
        return "".join(self.parts)


@dataclass(frozen=True)
class Begin:
    """A block begins."""

    block: Block


@dataclass(frozen=True)
class Delta:
    """A block goes on. The block has the text and the log-probabilities already."""

    block: Block
    text: str
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class End:
    """A block has ended."""

    block: Block


Change = Begin | Delta | End


class Blocks:
    """Finds the blocks of an answer as it comes. An answer has one block at least.

    thought_tokens: the number of tokens of a thought, with its marks. Its end may be the head of a call.

    Args:
        stream: finds its pieces.
    """

    def __init__(self, stream: AnswerStream):
        self.found: list[Block] = []
        self.thought_tokens = 0
        self._stream = stream
        self._tokens = 0
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text has not come out

    @property
    def have_call(self) -> bool:
        return any(block.tool is not None for block in self.found)

    def add(self, outputs: Sequence[Output]) -> Iterator[Change]:
        """Add the next outputs of the answer; yield what changes."""
        for output in outputs:
            yield from self._add(output)

    def _add(self, output: Output) -> Iterator[Change]:
        if output.logprob is not None:
            self._logprobs.append(output.logprob)
        has_ended = output.finish_reason is not None
        was_thinking, self._tokens = self._stream.is_thinking, self._tokens + 1
        pieces = [*self._stream.add(output.text), *(self._stream.finish(output.is_cut) if has_ended else ())]
        if was_thinking or self._stream.is_thinking:
            self.thought_tokens = self._tokens
        for piece in pieces:
            yield from self._add_piece(piece)
        if has_ended:
            yield from self._finish(is_cut=output.finish_reason == "length")

    def _add_piece(self, piece: Piece | Thought) -> Iterator[Change]:
        if isinstance(piece, CallStart):
            yield from self._begin(piece.name)
            return
        if isinstance(piece, Content | Thought) and not self._goes_on(is_thought := isinstance(piece, Thought)):
            if self.found:
                del self._logprobs[:-1]  # those of the mark behind the call or the thought
            yield from self._begin(is_thought=is_thought)
        yield self._continue(piece.text)

    def _finish(self, is_cut: bool) -> Iterator[Change]:
        """End the answer, which has at least one block."""
        if not self.found:
            yield from self._begin()
        if self._logprobs and self.found[-1].tool is None:
            yield self._continue("")
        yield self._end(is_cut=is_cut)

    def _goes_on(self, is_thought: bool) -> bool:
        """Return whether the last block is a text, or a thought."""
        return bool(self.found) and self.found[-1].tool is None and self.found[-1].is_thought == is_thought

    def _begin(self, tool: str | None = None, is_thought: bool = False) -> Iterator[Change]:
        if self.found:
            yield self._end()
        self.found.append(Block(len(self.found), tool, is_thought))
        yield Begin(self.found[-1])

    def _end(self, is_cut: bool = False) -> End:
        block = self.found[-1]
        block.has_ended, block.is_cut = True, is_cut
        return End(block)

    def _continue(self, text: str) -> Delta:
        block = self.found[-1]
        logprobs, self._logprobs = self._logprobs, []
        block.parts.append(text)
        block.logprobs += logprobs
        return Delta(block, text, logprobs)
