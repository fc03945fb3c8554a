"""Log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from granite4_neuron.ops.sampling import Logprobs


class TopLogprobs(Sequence[tuple[int, float]]):
    """Pairs of a token and its log-probability, likeliest first: one row of two arrays that all tokens of a step share.
    As Python's tuples they would take ten times the memory.

    Args:
        ids, values: [tokens, top].
        row: of the arrays.
        length: how many of the row's pairs there are.
    """

    __slots__ = ("_ids", "_length", "_row", "_values")

    def __init__(self, ids: np.ndarray, values: np.ndarray, row: int, length: int):
        self._ids = ids
        self._values = values
        self._row = row
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        return list(self)[index]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        ids, values = (array[self._row, : self._length].tolist() for array in (self._ids, self._values))
        return zip(ids, values, strict=True)

    def __reduce__(self) -> tuple:
        """Pickle it as bytes. Arrays would take ten times the time, and a prompt may have 100,000 such reports."""
        ids, values = (array[self._row, : self._length].tobytes() for array in (self._ids, self._values))
        return _of_bytes, (ids, values)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(list(self))


def _of_bytes(ids: bytes, values: bytes) -> TopLogprobs:
    arrays = np.frombuffer(ids, np.int32)[None], np.frombuffer(values, np.float32)[None]
    return TopLogprobs(*arrays, 0, arrays[0].shape[1])


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under the model's logits, among the tokens that the sequence's constraint allows,
    before any other sampling option.

    logprob: natural logarithm of the probability.
    rank: how many tokens are at least as likely, itself among them.
    top: the requested number of top tokens with their log-probabilities, likeliest first; fewer if a constraint forbids
        all others.
    """

    token: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]]

    def __reduce__(self) -> tuple:
        """Pickle it without `fields`, which dataclasses go through for each object."""
        return TokenLogprob, (self.token, self.logprob, self.rank, self.top)


def certain_logprob(token: int, num_top: int) -> TokenLogprob:
    """Return the report of a token that is the only one allowed."""
    top = TopLogprobs(np.array([[token]], np.int32), np.zeros((1, 1), np.float32), 0, min(num_top, 1))
    return TokenLogprob(token, 0.0, 1, top)


def reported(token: int, report: Logprobs) -> TokenLogprob:
    """Return a report of `ops.sampling` about a token."""
    ids, values = report.top.numpy().astype(np.int32)[None], report.values.numpy()[None]
    return TokenLogprob(token, report.logprob, report.rank, TopLogprobs(ids, values, 0, ids.shape[1]))
