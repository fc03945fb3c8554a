"""How likely the model holds tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model holds a token, by its logits before any sampling option.

    logprob: natural logarithm of the probability.
    top: the likeliest tokens and theirs, likeliest first; as many as were asked for.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Of one token after each row of logits, [tokens, vocab_size], float32."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    values, ids = (tensor.tolist() for tensor in logprobs.topk(num_top))
    tops = [list(zip(*of_one, strict=True)) for of_one in zip(ids, values, strict=True)]
    return [TokenLogprob(*of_one) for of_one in zip(tokens, chosen, tops, strict=True)]
