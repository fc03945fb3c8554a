"""Which tokens a request's options allow. Nothing else decides it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from granite4_neuron.engine.sampling_params import SamplingParams


class TokenRules:
    """Decides which tokens may come next. All other options only choose among these, and always leave one.

    A token may come next if every rule allows it. No rule wins over another, with one exception:

    * `constraint`: tokens that may follow, a stop token where its text may end.
    * `allowed_token_ids`: these.
    * `bad_words_ids`: not the last token of a list, behind the others of it.
    * `suppress_tokens`, `begin_suppress_tokens`: not these, and not these first.
    * `no_repeat_ngram_size`: not the last of so many tokens in a row that the prompt or the text has already.
    * `min_tokens`: no stop token before this many new ones; except where the constraint allows nothing but stop tokens,
      because its text is complete.
    * `logits_processors`: tokens with scores above -inf. They see the scores of tokens that the other rules allow, and
      cannot allow others.

    If no token is left, the sequence ends with `NoTokenLeft`. So a token that is the constraint's only one comes next,
    or none does, whatever the logits and all other options are; see `allows`.

    Args:
        params: the options, of which `constraint` and `logits_processors` are applied by `Sampler`.
        prompt_length: how many of the sequence's tokens are the prompt's.
    """

    def __init__(self, params: SamplingParams, prompt_length: int):
        self._allowed_bits: torch.Tensor | None = None
        self._bits: tuple[frozenset[int], torch.Tensor] | None = None  # of the tokens forbidden last
        self._allowed = None if params.allowed_token_ids is None else frozenset(map(int, params.allowed_token_ids))
        self._bad_words = [(list(before), last) for *before, last in params.bad_words_ids or ()]
        self._suppressed = frozenset(params.suppress_tokens or ())
        self._not_first = frozenset(params.begin_suppress_tokens or ())
        self._ngram_size = params.no_repeat_ngram_size or 0
        self._prompt_length = prompt_length
        self._stops = frozenset(params.stop_token_ids or ()) if params.min_tokens else frozenset()
        self._min_tokens = params.min_tokens or 0

    @property
    def forbid_any(self) -> bool:
        """Whether they may ever forbid a token, beside the constraint and processors."""
        lists = self._bad_words, self._suppressed, self._not_first, self._stops
        return self._allowed is not None or self._ngram_size > 0 or any(map(bool, lists))

    @property
    def depend_on_tokens(self) -> bool:
        """Whether what they forbid depends on the tokens before, and not on their number alone."""
        return self._ngram_size > 0 or any(before for before, _ in self._bad_words)

    def bits(
        self, by_constraint: np.ndarray | None, tokens: Sequence[int], ahead: int, vocab_size: int
    ) -> torch.Tensor | None:
        """Return bits of the tokens that all rules but the constraint allow; None if they allow all. It is the same
        tensor until other tokens are allowed.

        Args:
            by_constraint, tokens, ahead: as `forbidden` takes them.
        """
        if not self.forbid_any:
            return None
        forbidden = frozenset(self.forbidden(by_constraint, tokens, vocab_size, ahead))
        if not forbidden:
            return self.allowed_bits(vocab_size)
        if self._bits is None or self._bits[0] != forbidden:
            is_allowed = np.ones(vocab_size, bool)
            is_allowed[list(forbidden)] = False
            bits = torch.from_numpy(bits_of(is_allowed))
            allowed = self.allowed_bits(vocab_size)
            self._bits = forbidden, bits if allowed is None else bits & allowed
        return self._bits[1]

    def allowed_bits(self, vocab_size: int) -> torch.Tensor | None:
        """Return bits of `allowed_token_ids` (see `bits_of`); None if all are allowed."""
        if self._allowed is not None and self._allowed_bits is None:
            is_allowed = np.zeros(vocab_size, bool)
            is_allowed[_within(vocab_size, self._allowed)] = True
            self._allowed_bits = torch.from_numpy(bits_of(is_allowed))
        return self._allowed_bits

    def forbidden(
        self, by_constraint: np.ndarray | None, tokens: Sequence[int], vocab_size: int, ahead: int = 0
    ) -> list[int]:
        """Return the tokens that other rules than `constraint` and `allowed_token_ids` forbid, before processors.

        Args:
            by_constraint: bits of the tokens that the constraint allows; None without one.
            tokens: the sequence so far, prompt included.
            ahead: how many further tokens are not known; 0 if the rules `depend_on_tokens`.
        """
        result = _within(vocab_size, self._forbidden(tokens, ahead))
        if len(tokens) + ahead - self._prompt_length < self._min_tokens:
            stops = _within(vocab_size, self._stops)
            if by_constraint is None or not _are_all(by_constraint, stops):
                result += stops
        return result

    def allows(self, token: int, tokens: Sequence[int]) -> bool:
        """Return whether a token may come next if it is the only one that the constraint allows.

        Args:
            tokens: the sequence so far, prompt included.
        """
        return (self._allowed is None or token in self._allowed) and token not in self._forbidden(tokens)

    def _forbidden(self, tokens: Sequence[int], ahead: int = 0) -> set[int]:
        """Return the tokens that other rules than `constraint`, `allowed_token_ids` and `min_tokens` forbid."""
        bad_ends = {last for before, last in self._bad_words if list(tokens[len(tokens) - len(before) :]) == before}
        first = self._not_first if len(tokens) + ahead == self._prompt_length else ()
        return bad_ends.union(self._suppressed, first, self._repeated(tokens))

    def _repeated(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield what followed earlier occurrences of the last tokens, one less than `no_repeat_ngram_size`."""
        length = self._ngram_size - 1
        if 0 <= length <= len(tokens):
            last = tokens[len(tokens) - length :]
            for end in range(length, len(tokens)):
                if tokens[end - length : end] == last:
                    yield tokens[end]


def _within(vocab_size: int, tokens: Iterable[int]) -> list[int]:
    return [token for token in tokens if token < vocab_size]


def bits_of(is_set: np.ndarray) -> np.ndarray:
    """Return a bit for each token, lowest bit first: [vocab_size] bool to [vocab_size / 8, rounded up] uint8."""
    return np.packbits(is_set, bitorder="little")


def _are_all(bits: np.ndarray, tokens: Sequence[int]) -> bool:
    """Return whether no bits of other tokens are set."""
    others = bits.copy()
    for token in tokens:
        others[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return not others.any()
