"""Drafts from the text itself (prompt lookup decoding): the tokens after an earlier occurrence of its last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ngram_propose(tokens: Sequence[int] | np.ndarray, min_n: int, max_n: int, max_model_len: int, k: int) -> np.ndarray:
    """Propose the tokens after the earliest other occurrence of the longest suffix of `tokens` that occurs again.

    Args:
        tokens: [length], integer.
        min_n, max_n: shortest and longest suffix to look for, at least 1. Occurrences may overlap the suffix.
        max_model_len: drafts end there.
        k: the most drafts.

    Returns:
        0 to k tokens, of the dtype of `tokens`; none if no suffix occurs twice.
    """
    tokens = np.asarray(tokens)
    k = min(k, max_model_len - len(tokens))
    if k <= 0 or len(tokens) < min_n:
        return tokens[:0]
    # Positions of the last token; each longer suffix keeps fewer of them.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    found = ends[:0]
    for n in range(1, max_n + 1):
        if n > 1:
            ends = ends[ends >= n - 1]
            ends = ends[tokens[ends - n + 1] == tokens[-n]] if len(ends) else ends
        if not len(ends):
            break
        if n >= min_n:
            found = ends
    if not len(found):
        return tokens[:0]
    start = found[0] + 1
    return tokens[start : start + k]
