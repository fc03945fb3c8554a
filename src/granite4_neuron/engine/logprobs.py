"""Log-probabilities of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token under the model's logits, among the tokens that the sequence's constraint allows,
    before any other sampling option.

    logprob: natural logarithm of the probability.
    top: the requested number of top tokens with their log-probabilities, likeliest first; fewer if a constraint forbids
        all others.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probability of one token after each row of logits.

    Args:
        logits: [tokens, vocab_size], float32.
        tokens: the token that follows each row.
        num_top: how many top tokens to report with each.
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    values, ids = (tensor.tolist() for tensor in logprobs.topk(num_top))
    pairs = [zip(*top, strict=True) for top in zip(ids, values, strict=True)]
    tops = [[(id, value) for id, value in top if value > -math.inf] for top in pairs]
    return [TokenLogprob(*fields) for fields in zip(tokens, chosen, tops, strict=True)]
