"""Where a prompt may be cut so that its numbers stay the same bit by bit: at its places.

A prompt's places follow from its length alone. Whatever was cached, whoever else runs and however long a step may be,
its pieces begin and end at places, so each token gets the numbers that it gets when the prompt runs alone. A state that
a prompt leaves at one of its places is the one that any prompt with the same tokens leaves there, if the place is one
of its own too: `last` never has a place of one prompt that another one reaches by other pieces.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class PromptCuts(Protocol):
    """The places of prompts.

    keeps_answers: whether tokens of an answer leave the states that a prompt's pieces leave, as far as the runtime
        promises that.
    """

    @property
    def keeps_answers(self) -> bool: ...

    def last(self, most: int, length: int) -> int:
        """Return the last place of a prompt of `length` tokens that is at most `most`. Its end is one, and so is 0."""


@dataclass(frozen=True)
class Anywhere:
    """Every length is a place, in answers too.

    is_exact: whether numbers stay the same bit by bit; otherwise they do within rounding.
    """

    is_exact: bool
    keeps_answers: ClassVar[bool] = True

    def last(self, most: int, length: int) -> int:
        """Implement `PromptCuts.last`."""
        return min(most, length)


ANYWHERE = Anywhere(True)


@dataclass(frozen=True)
class Multiples:
    """Places are the multiples of a number, in pieces of any length, and the prompt's end."""

    number: int
    keeps_answers: ClassVar[bool] = False

    def last(self, most: int, length: int) -> int:
        """Implement `PromptCuts.last`."""
        return length if most >= length else most // self.number * self.number


@dataclass(frozen=True)
class Pieces:
    """Places are the ends of the pieces that `pieces` returns for the whole prompt.

    What `pieces` returns for the rest of a prompt behind one of its places is the rest of what it returns for the
    prompt; and for the tokens up to that place, the beginning.

    buckets: ascending.
    """

    buckets: Sequence[int]
    keeps_answers: ClassVar[bool] = False

    def last(self, most: int, length: int) -> int:
        """Implement `PromptCuts.last`."""
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


# A piece of a prompt takes as long as if it had about this many tokens more, because it reads all weights. With 167
# TFLOPS and 725 GB/s a core of a Trainium2 multiplies 230 tokens by a weight in bfloat16 while it reads the weight; an
# H200 multiplies 206.
_TOKENS_PER_PIECE = 256


def pieces(tokens: int, buckets: Sequence[int]) -> list[int]:
    """Return the buckets that the pieces of a prompt take, in its order; only the last piece is padded.

    After as many of the largest bucket as the prompt fills, each time the better of two: the smallest bucket that holds
    the rest; or the largest one that the rest fills, and then the pieces of what remains. What costs less is better,
    where a piece costs the tokens of its bucket, padding too, and `_TOKENS_PER_PIECE` more. So 600 tokens are 512 and
    128 even if there is a bucket of 1,024; and 130 are one piece of 512, not two of 128.

    Args:
        tokens: at least 1.
        buckets: ascending.
    """
    whole, rest = divmod(tokens, buckets[-1])
    return [buckets[-1]] * whole + (_pieces_of_rest(rest, buckets) if rest else [])


def _pieces_of_rest(tokens: int, buckets: Sequence[int]) -> list[int]:
    holding = bisect.bisect_left(buckets, tokens)
    padded = [buckets[holding]]
    if holding == 0:
        return padded
    filled = buckets[holding - 1]
    cut = [filled, *_pieces_of_rest(tokens - filled, buckets)]
    return min(padded, cut, key=cost)


def cost(pieces: Sequence[int]) -> int:
    """Return how many tokens of a long piece take as long as these pieces, as far as `pieces` knows."""
    return sum(pieces) + len(pieces) * _TOKENS_PER_PIECE


def as_json(cuts: PromptCuts) -> list[Any]:
    """Return cuts for a file of JSON; `from_json` reads them.

    Raises:
        TypeError: they are not of this module.
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
    """Return what `as_json` was given.

    Raises:
        ValueError: it has not returned this.
    """
    match value:
        case ["anywhere", bool(is_exact)]:
            return Anywhere(is_exact)
        case ["multiples", int(number)] if number > 0:
            return Multiples(number)
        case ["pieces", *buckets] if buckets and all(type(each) is int and each > 0 for each in buckets):
            return Pieces(tuple(sorted(buckets)))
    raise ValueError(f"{value!r} are no cuts of prompts.")
