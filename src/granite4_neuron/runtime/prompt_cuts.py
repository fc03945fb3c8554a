"""Where a prompt may be cut so that its numbers stay bit-identical: at its cut points.

A prompt's cut points depend on its length alone. Its pieces begin and end at cut points, whatever was cached, whoever
else runs and however long a step may be. So each token gets the numbers that it gets when the prompt runs alone. All
prompts with the same tokens up to a cut point that they share leave the same state there, because they reach it by the
same pieces.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class PromptCuts(Protocol):
    """The cut points of prompts.

    keeps_answers: whether the runtime promises that generated tokens leave the same states as a prompt's pieces.
    """

    @property
    def keeps_answers(self) -> bool: ...

    def last(self, most: int, length: int) -> int:
        """Return a prompt's last cut point up to `most`; `length` is its tokens. 0 and its end are cut points."""

    def is_shared(self, place: int) -> bool:
        """Return whether all prompts that are longer than `place` have a cut point there."""


@dataclass(frozen=True)
class Anywhere:
    """Every length is a cut point, in answers too.

    is_exact: whether numbers stay bit-identical; otherwise they agree within rounding.
    """

    is_exact: bool
    keeps_answers: ClassVar[bool] = True

    def last(self, most: int, length: int) -> int:
        return min(most, length)

    def is_shared(self, place: int) -> bool:
        return True


ANYWHERE = Anywhere(True)


@dataclass(frozen=True)
class Multiples:
    """Cut points are the multiples of a number, with pieces of any length between them, and the prompt's end."""

    number: int
    keeps_answers: ClassVar[bool] = False

    def last(self, most: int, length: int) -> int:
        return length if most >= length else most // self.number * self.number

    def is_shared(self, place: int) -> bool:
        return place % self.number == 0


@dataclass(frozen=True)
class Pieces:
    """Cut points are the ends of the pieces that `pieces` returns for the whole prompt.

    For the tokens up to a cut point `pieces` returns the beginning of what it returns for the whole prompt, and for the
    tokens after it the rest.

    buckets: ascending.
    """

    buckets: Sequence[int]
    keeps_answers: ClassVar[bool] = False

    def last(self, most: int, length: int) -> int:
        if most >= length:
            return length
        largest = self.buckets[-1]
        place, whole = most // largest * largest, length // largest * largest
        if place < whole:
            return place
        for piece in pieces(length - whole, self.buckets):
            if whole + piece > most:
                break
            whole += piece
        return whole

    def is_shared(self, place: int) -> bool:
        return place % self.buckets[-1] == 0


# A piece of a prompt takes as long as if it had about this many more tokens, because it reads all weights. With 167
# TFLOPS and 725 GB/s a core of a Trainium2 multiplies 230 tokens by a weight in bfloat16 while it reads the weight; an
# H200 multiplies 206.
_TOKENS_PER_PIECE = 256


def pieces(tokens: int, buckets: Sequence[int]) -> list[int]:
    """Return the buckets of the pieces of a prompt, in order. Only the last piece is padded.

    First come as many of the largest bucket as the prompt fills. For the rest, the cheaper of two choices is taken: the
    smallest bucket that holds the rest; or the largest bucket that the rest fills, followed by the pieces of the
    remainder. A piece costs the tokens of its bucket, with padding, and `_TOKENS_PER_PIECE` more. So 600 tokens are 512
    and 128 even if there is a bucket of 1,024; and 130 are one piece of 512, not two of 128.

    Args:
        tokens: at least 1.
        buckets: ascending.
    """
    whole, rest = divmod(tokens, buckets[-1])
    return [buckets[-1]] * whole + (_pieces_of_rest(rest, buckets) if rest else [])


def used_buckets(longest: int, buckets: Sequence[int]) -> list[int]:
    """Return the buckets that `pieces` of up to `longest` tokens have, ascending."""
    lengths = range(1, min(longest, buckets[-1]) + 1)
    return sorted({piece for tokens in lengths for piece in pieces(tokens, buckets)})


def _pieces_of_rest(tokens: int, buckets: Sequence[int]) -> list[int]:
    holding = bisect.bisect_left(buckets, tokens)
    padded = [buckets[holding]]
    if holding == 0:
        return padded
    filled = buckets[holding - 1]
    cut = [filled, *_pieces_of_rest(tokens - filled, buckets)]
    return min(padded, cut, key=cost)


def cost(pieces: Sequence[int]) -> int:
    """Return the cost of pieces in tokens, as `pieces` compares it."""
    return sum(pieces) + len(pieces) * _TOKENS_PER_PIECE


def as_json(cuts: PromptCuts) -> list[Any]:
    """Return cuts as JSON values; `from_json` reads them.

    Raises:
        TypeError: they are not a class of this module.
    """
    match cuts:
        case Anywhere(is_exact):
            return ["anywhere", is_exact]
        case Multiples(number):
            return ["multiples", number]
        case Pieces(buckets):
            return ["pieces", *buckets]
    raise TypeError(f"{cuts} cannot be written.")


def from_json(value: Any) -> PromptCuts:
    """Return the cuts that `as_json` wrote; raise ValueError if the value is not from `as_json`."""
    match value:
        case ["anywhere", bool(is_exact)]:
            return Anywhere(is_exact)
        case ["multiples", int(number)] if number > 0:
            return Multiples(number)
        case ["pieces", *buckets] if buckets and all(type(each) is int and each > 0 for each in buckets):
            return Pieces(tuple(sorted(buckets)))
    raise ValueError(f"{value!r} are no cuts of prompts.")
