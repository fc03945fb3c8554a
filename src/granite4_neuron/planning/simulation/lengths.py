"""Distributions of the lengths of prompts and answers."""

from __future__ import annotations

import random
import reprlib
from dataclasses import dataclass

from granite4_neuron.errors import UserError

MOST_TOKENS = 2**24  # of a prompt or an answer


@dataclass(frozen=True)
class Lengths:
    """The distribution of the lengths of prompts or answers, in tokens.

    kind: "fixed" (always first), "uniform" (first to second) or "normal" (mean first, standard deviation second).
    """

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse 512, uniform:128:1024 or normal:512:64; raise UserError if it has none of these forms, or a number is
        more than `MOST_TOKENS`.
        """
        parts = text.split(":")
        kind, numbers = ("fixed", parts) if len(parts) == 1 else (parts[0], parts[1:])
        wrong = UserError(f"{reprlib.repr(text)} is no length; write 512, uniform:128:1024 or normal:512:64.")
        if not all(number.isdecimal() for number in numbers) or len(numbers) != {"fixed": 1}.get(kind, 2):
            raise wrong
        lengths = cls(kind, *map(float, numbers))
        if kind not in ("fixed", "uniform", "normal") or lengths.first < 1 or (kind == "uniform" and lengths.is_empty):
            raise wrong
        if max(lengths.first, lengths.second) > MOST_TOKENS:
            raise UserError(f"{reprlib.repr(text)} is too long; a length is at most {MOST_TOKENS:,} tokens.")
        return lengths

    @property
    def is_empty(self) -> bool:
        return self.second < self.first

    def draw(self, chance: random.Random) -> int:
        """Draw a length of at least 1."""
        if self.kind == "uniform":
            return chance.randint(int(self.first), int(self.second))
        return max(1, round(chance.normalvariate(self.first, self.second) if self.second else self.first))
