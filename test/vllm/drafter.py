"""Drafts whose acceptance a test chooses."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

NAME = f"{__name__}.KnownTexts"
# The number of right drafts, given the number of drafts and the random choice.
ACCEPTANCE = {
    "all": lambda drafts, chance: drafts,
    "none": lambda drafts, chance: 0,
    "some": lambda drafts, chance: chance.randint(0, drafts),
}


class KnownTexts:
    """A proposer for vLLM's speculative method "custom_class". It drafts nothing before `learn` is called.

    With "some", the number of drafts and how many of them are right depend on the text so far.
    """

    _continuations: ClassVar[dict[tuple[int, ...], Sequence[int]]] = {}
    _acceptance: ClassVar[str] = "all"

    def __init__(self, vllm_config):
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    @classmethod
    def learn(cls, texts: Mapping[tuple[int, ...], Sequence[int]], acceptance: str) -> None:
        """Learn the tokens that follow each prompt, and how many drafts are to be right."""
        cls._acceptance = acceptance
        for prompt, tokens in texts.items():
            for length in range(len(tokens)):
                cls._continuations[(*prompt, *tokens[:length])] = tokens[length:]

    def load_model(self, *_, **__) -> None:
        """Do nothing: vLLM calls this, and there is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        return [
            self._drafts(token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _drafts(self, text: list[int]) -> list[int]:
        right = list(self._continuations.get(tuple(text), ())[: self._most])
        chance = random.Random(str(text))
        if self._acceptance == "some":
            right = right[: chance.randint(0, len(right))]
        accepted = ACCEPTANCE[self._acceptance](len(right), chance)
        wrong = [(token + chance.randint(1, self._vocab_size - 1)) % self._vocab_size for token in right[accepted:]]
        return right[:accepted] + wrong
