"""Drafts from the text itself, compared with a search that follows the definition word by word."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite4_neuron.engine.drafting.ngram import ngram_propose


def by_definition(tokens, min_n, max_n, max_model_len, k):
    k = max(0, min(k, max_model_len - len(tokens)))
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + k]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    min_n=st.integers(1, 4),
    more=st.integers(0, 4),
    max_model_len=st.integers(0, 50),
    k=st.integers(0, 6),
)
def test_by_definition(tokens, min_n, more, max_model_len, k):
    proposed = ngram_propose(tokens, min_n, min_n + more, max_model_len, k)
    assert proposed.tolist() == by_definition(tokens, min_n, min_n + more, max_model_len, k)


@pytest.mark.parametrize(
    "tokens, min_n, max_n, expected",
    [
        ([1, 2, 3, 4, 5], 2, 2, []),
        ([1, 2, 3, 4, 1, 2, 3], 4, 4, []),
        ([1, 2, 3, 4, 1, 2, 3], 3, 4, [4, 1]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, [1, 2]),  # the longer suffix, though a shorter one comes earlier
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 2, [9, 1]),  # the earliest match wins
        ([7, 7, 7], 1, 3, [7]),  # the match overlaps the suffix
        ([], 1, 3, []),
    ],
)
def test_examples(tokens, min_n, max_n, expected):
    assert ngram_propose(tokens, min_n, max_n, 100, 2).tolist() == expected


def test_the_dtype_stays():
    tokens = np.array([5, 6, 5], dtype=np.int32)
    assert ngram_propose(tokens, 1, 1, 100, 1).dtype == ngram_propose(tokens, 2, 2, 100, 1).dtype == np.int32
