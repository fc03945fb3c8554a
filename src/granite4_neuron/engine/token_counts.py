"""How often a sequence has its tokens, for penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class TokenCounts:
    """Counts the tokens of a sequence as it grows, so that a step costs what it adds.

    Args:
        begin: the place of the first token that counts as one of the sequence.
        prompt_length: the place of the first generated token.
    """

    def __init__(self, begin: int, prompt_length: int):
        self._prompt_length = prompt_length
        self._length = begin
        self._places: dict[int, int] = {}
        self._tokens = np.empty(64, np.int64)
        self._counts = np.empty(64, np.float32)

    def of(
        self, tokens: Sequence[int], drafts: Sequence[int] = (), length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token once, [n] int64, and how often it was generated, [n] float32.

        Args:
            tokens: the sequence so far, as in earlier calls and perhaps longer.
            drafts: further tokens, which only this call counts.
            length: of the tokens that count, as in earlier calls or more; None for all.
        """
        length = len(tokens) if length is None else length
        for place in range(self._length, length):
            self._add(tokens[place], place >= self._prompt_length)
        self._length = max(self._length, length)
        ids, counts = self._tokens[: len(self._places)], self._counts[: len(self._places)]
        if not drafts:
            return torch.from_numpy(ids), torch.from_numpy(counts)
        of_token = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        for token in drafts:
            of_token[token] = of_token.get(token, 0) + 1
        return torch.tensor(list(of_token)), torch.tensor(list(of_token.values()), dtype=torch.float32)

    def _add(self, token: int, is_generated: bool) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._tokens[place], self._counts[place] = token, 0
        self._counts[place] += is_generated
