"""Adapters: small additions to a model's projections, which leave its own weights as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """The term that an adapter adds to a projection, up @ down @ x, or that of each routed expert.

    down: [rank, columns], or [experts, rank, columns], float32.
    up: [rows, rank], or [experts, rows, rank], float32, with the adapter's scale in it.
    """

    down: torch.Tensor
    up: torch.Tensor

    def merged_into(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sum of `weight` and the addition in the shape of `weight`, in float32."""
        add = torch.baddbmm if weight.dim() == 3 else torch.addmm
        return add(weight.float(), self.up, self.down)


@dataclass(frozen=True)
class Adapter:
    """Additions to the projections of a model, each by the name of its weight.

    invocation: the tokens that activate it, for an activated LoRA; None for an adapter that always applies.
    number: from 1 on; a runtime gives each number once.
    """

    additions: Mapping[str, LowRank]
    invocation: tuple[int, ...] | None = None
    number: int = 0

    def start(self, prompt: Sequence[int]) -> int | None:
        """Return the first position where it applies: for an activated LoRA the start of the last invocation in a
        prompt, or None if the prompt has no invocation. Generated tokens activate nothing, as with PEFT.
        """
        if self.invocation is None:
            return 0
        size = len(self.invocation)
        for start in range(len(prompt) - size, -1, -1):
            if prompt[start] == self.invocation[0] and tuple(prompt[start : start + size]) == self.invocation:
                return start
        return None


def adapter_weights(adapters: Mapping[str, Adapter]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the additions of all adapters by names of their own. An adapter is known by its number, not its name."""
    for number, adapter in enumerate(adapters.values(), start=1):
        for name, addition in adapter.additions.items():
            yield f"adapter {number} {name} down", addition.down
            yield f"adapter {number} {name} up", addition.up
