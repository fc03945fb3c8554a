"""The adapter of a sequence: the position from which it applies, and the prefix-cache keys that result."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter

_TOKEN_BITS = 32  # more than any token id has


@dataclass(frozen=True)
class AppliedAdapter:
    """An adapter of the runtime, or none, in one sequence.

    number: in the runtime, from 1 on; 0 for none.
    start: the position from which it applies. Before it, the state is that of the model without adapters.
    """

    number: int = 0
    start: int = 0

    @classmethod
    def of(cls, name: str | None, prompt: Sequence[int], adapters: Mapping[str, Adapter]) -> AppliedAdapter:
        """Return the adapter of this name for a prompt and its continuation.

        Raises:
            UserError: there is no such adapter.
        """
        if name is None:
            return cls()
        if name not in adapters:
            there_are = f"there are {', '.join(adapters)}" if adapters else "none is loaded"
            raise UserError(f"there is no adapter {reprlib.repr(name)}; {there_are}.")
        start = adapters[name].start(prompt)
        return cls() if start is None else cls(adapters[name].number, start)

    def at(self, position: int) -> int:
        """Return the number of the adapter that applies to the token at a position; 0 for none."""
        return self.number if position >= self.start else 0

    def keys(self, tokens: Sequence[int], start: int = 0) -> list[int]:
        """Return prefix-cache keys of tokens from `start` on; tokens under an adapter have keys of their own."""
        return [(self.at(position) << _TOKEN_BITS) + token for position, token in enumerate(tokens, start)]
