"""How a token is chosen from logits: the one definition, which every device's own form follows.

A row of logits becomes a token in these steps, in the order of transformers' generate:

1. `mask`, a constraint's, forbids tokens. Log-probabilities are those of what is left.
2. `scores` adds biases, forbids tokens that are not `allowed`, subtracts penalties, and forbids `forbidden` tokens.
3. The scores are divided by the temperature. With 0 the token is the one with the highest score.
4. `kept` leaves the `top_k` highest scores, of these the likeliest tokens that make up `top_p`, of these the ones at
   least `min_p` times as likely as the likeliest, and of these the ones nearest to the mean surprise that make up
   `typical_p`.
5. `draw` chooses one of the kept tokens with its probability, by a random number that depends on the seed, the place
   in the sequence and the token, and on nothing else.

Of equal scores and of equal results the lowest token counts first. As in transformers and vLLM, all tokens whose score
equals the k-th one are among the top k; llama.cpp takes exactly k. As in transformers, all tokens as near to the mean
surprise as the last typical one are typical. vLLM applies min_p before top_k and top_p, and
llama.cpp the temperature last.

Devices must agree bit by bit. So a number is computed in float32 by additions and multiplications alone, each rounded,
in the order written here (no product is fused with a sum), or in integers: a probability is a whole number of 2**-44ths
of the likeliest token's, and sums of these do not depend on an order. Functions such as the logarithm are polynomials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from granite4_neuron.ops.stochastic_rounding import philox_4x32

# In place of a token: the logits are not finite (the highest is not, or one is NaN), the mask forbids all tokens, or
# the options leave none with a finite score.
NOT_FINITE, ALL_MASKED, NONE_LEFT = -1, -2, -3

MAX_LOGPROBS = 20  # of the likeliest tokens, in a report
ROUNDS = 10
WEIGHT_BITS = 44
_SURPRISE_BITS = 18  # of a fraction of a bit
# Minimax polynomials, lowest power first, all within 1e-6 (relative for the first): -log2(1 - y / 2) / y and
# log2(1 + t) / t from 0 to 1, and 2**-x from 0 to 1.
FOLDED_LOG2 = 0.721348345, 0.180261046, 0.061231792, 0.0164246596, 0.0245026015, -0.0152112301, 0.0114419432
LOG2 = 1.44269478, -0.721314311, 0.480131418, -0.353800535, 0.257167667, -0.157048762, 0.0648411289, -0.0126716197
EXP2 = 1.0, -0.693144441, 0.240186706, -0.0553166941, 0.00922837947, -0.000954034273


class Penalties(NamedTuple):
    """What makes tokens of a sequence less likely.

    tokens: [n], int64, each token of the sequence once.
    counts: [n], float32, how often each was generated; 0 for a token that only the prompt has.
    frequency: subtracted for each time. presence: subtracted once if the token was generated. As OpenAI's.
    repetition: then divides positive scores and multiplies others.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0


@dataclass(frozen=True)
class Choice:
    """How the token of one row is chosen.

    temperature: 0 takes the highest score; otherwise it counts as within 2**-100 to 2**100.
    top_k, min_p: 0 for none. top_p, typical_p: 1 for none; at least one token is kept.
    seed: 64 bits. place: the length of the sequence before the token.
    mask, allowed: bits of tokens that may be chosen, uint8 [at least vocab_size / 8], lowest bit first; None for all.
    biases: tokens [n] int64 and what is added to their logits [n] float32.
    penalties: None for none.
    forbidden: tokens [n], int64, that are not chosen.
    num_logprobs: how many of the likeliest tokens are reported with the chosen one; None for no report.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    place: int = 0
    mask: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    penalties: Penalties | None = None
    forbidden: torch.Tensor | None = None
    num_logprobs: int | None = None

    @property
    def scale(self) -> float:
        """What turns a difference of scores into the logarithm to base 2 of a ratio of probabilities, in float32."""
        return math.log2(math.e) / min(max(self.temperature, 2.0**-100), 2.0**100)

    @property
    def cutoff(self) -> float:
        """The lowest logarithm to base 2 that `min_p` keeps; the likeliest token's is 0."""
        return math.log2(self.min_p) if self.min_p > 0 else -math.inf


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities under the masked logits, in float32.

    rank: how many tokens are at least as likely as the one reported, itself among them.
    top: the likeliest tokens [n], int64; without those of probability 0.
    values: theirs.
    """

    logprob: float
    rank: int
    top: torch.Tensor
    values: torch.Tensor


class Chosen(NamedTuple):
    """A row's token, or one of `NOT_FINITE`, `ALL_MASKED` and `NONE_LEFT`; and its report, if there is one."""

    token: int
    logprobs: Logprobs | None = None


def choose(logits: Sequence[torch.Tensor], choices: Sequence[Choice]) -> list[Chosen]:
    """Choose a token from each of some rows of logits, [vocab_size] in float32 each."""
    return [_choose(row, choice) for row, choice in zip(logits, choices, strict=True)]


def _choose(logits: torch.Tensor, choice: Choice) -> Chosen:
    if not _is_finite(logits):
        return Chosen(NOT_FINITE)
    allowed = masked(logits, choice)
    if not _is_finite(allowed):
        return Chosen(ALL_MASKED)
    adjusted = scores(allowed, choice)
    if not _is_finite(adjusted):
        return Chosen(NONE_LEFT)
    token = draw(adjusted, choice) if choice.temperature > 0 else int(adjusted.argmax())
    report = None if choice.num_logprobs is None else logprobs(allowed, token, choice.num_logprobs)
    return Chosen(token, report)


def masked(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return logits [vocab_size] with -inf for tokens that the mask forbids; without one, the same tensor."""
    return logits if choice.mask is None else _only(logits, choice.mask)


def scores(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return masked logits [vocab_size] after biases, allowed tokens, penalties and forbidden tokens. Biases and
    penalties leave finite scores finite.
    """
    result = logits.clone()
    if choice.biases is not None:
        _set(result, choice.biases[0], result[choice.biases[0]] + choice.biases[1])
    if choice.allowed is not None:
        result = _only(result, choice.allowed)
    if choice.penalties is not None:
        tokens, counts, frequency, presence, repetition = choice.penalties
        values = result[tokens] - frequency * counts - presence * (counts > 0)
        _set(result, tokens, torch.where(values > 0, values / repetition, values * repetition))
    if choice.forbidden is not None:
        result[choice.forbidden] = -math.inf
    return result


def draw(scores: torch.Tensor, choice: Choice) -> int:
    """Draw one of the `kept` tokens of finite scores [vocab_size].

    With probabilities p and independent numbers E of an exponential distribution, the token with the highest p / E is
    each token with its probability. Its logarithm to base 2 is compared.
    """
    logs = log2_weights(scores, choice.scale)
    race = logs - _log2(exponentials(choice.seed, choice.place, len(scores)))
    return int(torch.where(kept(scores, logs, choice), race, -math.inf).argmax())


def log2_weights(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """Return log2(p / the highest p) of probabilities p, 0 for the likeliest token."""
    return (scores - scores.max()) * scale


def kept(scores: torch.Tensor, logs: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return which tokens top_k, top_p, min_p and typical_p keep.

    Args:
        scores, logs: scores and their `log2_weights`, [vocab_size].
    """
    stays = scores > -math.inf
    if 0 < choice.top_k < len(scores):
        stays &= scores >= scores.topk(choice.top_k).values[-1]
    if choice.top_p < 1:
        # A token stays if those before it do not make up top_p yet.
        order = torch.where(stays, scores, -math.inf).sort(stable=True, descending=True).indices
        stays[order] &= _make_up(choice.top_p, torch.where(stays, weights(logs), 0)[order])
    stays &= logs >= torch.tensor(choice.cutoff, dtype=torch.float32)
    return stays & _are_typical(logs, stays, choice.typical_p) if choice.typical_p < 1 else stays


def _make_up(share: float, weights: torch.Tensor) -> torch.Tensor:
    """Return which of some tokens in order, at least the first, make up a share of all weights, [tokens] in int64."""
    up_to = weights.cumsum(0)
    return up_to - weights < max(1, int(share * float(up_to[-1])))


def _are_typical(logs: torch.Tensor, stays: torch.Tensor, share: float) -> torch.Tensor:
    """Return which tokens' surprise is as near to the mean one, the entropy, as that of those which make up a share of
    the probability of the tokens that stay. (Locally Typical Sampling, arXiv:2202.00666.)

    The surprise -log2 p of a token and the entropy both have the logarithm of the sum of all weights. It cancels.
    """
    masses = torch.where(stays, weights(logs), 0)
    surprises = ((-logs).clamp(max=63) * 2.0**_SURPRISE_BITS).long()
    mean = float((masses * surprises >> _SURPRISE_BITS).sum()) / float(masses.sum())
    distances = torch.where(stays, (logs + torch.tensor(mean, dtype=torch.float32)).abs(), math.inf)
    nearest = distances.sort(stable=True)
    last = int(_make_up(share, masses[nearest.indices]).sum()) - 1
    return distances <= nearest.values[last]


def weights(logs: torch.Tensor) -> torch.Tensor:
    """Return 2**44 * 2**logs of float32 logs up to 0, rounded down, in int64."""
    exponent = (-logs).clamp(max=63)
    whole = exponent.int()
    fraction = (_polynomial(exponent - whole, EXP2) * 2.0**30).int()
    return fraction.long() << WEIGHT_BITS - 30 >> whole


def exponentials(seed: int, place: int, vocab_size: int) -> torch.Tensor:
    """Return random numbers [vocab_size] of an exponential distribution with the mean 1 / ln 2, in float32.

    Token 4 i + j has word j of Philox-4x32-10's counter (i, place, 0, 0) under the seed as its key. A word r stands for
    u = (r + 1/2) / 2**32 and gives -log2(u). Above and below 1/2, u is 1 - y / 2 and (1 - y / 2) / 2**n with y from 0
    to 1, which keeps small results precise: a token's share is right down to probabilities of about 1e-10.
    """
    counter = torch.zeros(-(-vocab_size // 4), 4, dtype=torch.int64)
    counter[:, 0], counter[:, 1] = torch.arange(len(counter)), place
    words = philox_4x32(counter, seed, ROUNDS).flatten()[:vocab_size]
    is_high = words >= 2**31
    folded = torch.where(is_high, 2**32 - 1 - words, words).float() + 0.5
    exponent, mantissa = _parts(folded)
    y = torch.where(is_high, folded * 2.0**-31, 2 - mantissa)
    n = torch.where(is_high, 0, 31 - exponent)
    return n + y * _polynomial(y, FOLDED_LOG2)


def logprobs(logits: torch.Tensor, token: int, num_top: int) -> Logprobs:
    """Return the log-probability of a token under masked logits [vocab_size], and those of the likeliest."""
    total = weights(log2_weights(logits, math.log2(math.e))).sum()
    normalizer = logits.max().double() + (total.double() * 2.0**-WEIGHT_BITS).log()
    values = (logits.double() - normalizer).float()
    top = logits.sort(stable=True, descending=True).indices[:num_top]
    top = top[logits[top] > -math.inf]
    return Logprobs(float(values[token]), int((logits >= logits[token]).sum()), top, values[top])


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """Return the `logprobs` of a token after each row of logits [rows, vocab_size]."""
    return [logprobs(row, token, num_top) for row, token in zip(logits, tokens, strict=True)]


def _set(scores: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> None:
    limits = torch.finfo(torch.float32)
    scores[tokens] = torch.where(scores[tokens] > -math.inf, values.clamp(limits.min, limits.max), -math.inf)


def _only(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(len(scores))
    return torch.where((bits[tokens >> 3] >> (tokens & 7) & 1).bool(), scores, -math.inf)


def _is_finite(scores: torch.Tensor) -> bool:
    return math.isfinite(scores.max())  # it is NaN if there is one


def _parts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e, m) of positive float32 values 2**e * m with m from 1 to 2."""
    bits = values.view(torch.int32)
    return (bits >> 23) - 127, (bits & 0x7FFFFF | 0x3F800000).view(torch.float32)


def _log2(values: torch.Tensor) -> torch.Tensor:
    exponent, mantissa = _parts(values)
    fraction = mantissa - 1
    return exponent + fraction * _polynomial(fraction, LOG2)


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    result = torch.full_like(x, coefficients[-1])
    for each in coefficients[-2::-1]:
        result = result * x + each
    return result
