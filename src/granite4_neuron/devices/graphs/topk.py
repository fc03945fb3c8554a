"""The router's choice, the likeliest token and a sampled one, in plain torch and without a sort, which Trainium's
compiler does not support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from granite4_neuron.ops.moe import SMALLEST_SUM
from granite4_neuron.ops.sampling import FOLDED_LOG2, ROUNDS, Choice
from granite4_neuron.ops.stochastic_rounding import INCREMENTS, MULTIPLIERS
from granite4_neuron.runtime.interface import UNDECIDED

# Up to this many tokens, logits are compared in pairs: the fewest instructions, but num_experts ** 2 values per token.
_MOST_IN_PAIRS = 64
# For the candidates of a vocabulary: the number of groups of neighbouring tokens, and of candidates per group.
_GROUPS, _OF_A_GROUP = 64, 8
MOST_TOP_K = 63  # of `drawn`
# The columns of `draws_of`. A seed has four, its parts of 16 bits with the lowest first, and a place two.
TEMPERATURE, TOP_K, TOP_P, MIN_P, SCALE, CUTOFF, SEED = range(7)
PLACE = SEED + 4
COLUMNS = PLACE + 2
# How far two computations of a quantity may be apart, see `drawn`.
_ROUNDING, _ROUNDING_OF_LOGITS, _ROUNDING_OF_ORDER, _SMALLEST = 2e-4, 2.0**-19, 2.0**-20, 1e-30
_HIGHEST_TEMPERATURE = 1e6


def topk_softmax(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.topk_softmax`. Of equal logits the first is chosen; for a token with NaN logits the last expert."""
    logits, num_experts = router_logits.float(), router_logits.shape[-1]
    top_logits, experts = _largest(logits, top_k)
    return top_logits.softmax(-1), experts.int().clamp(max=num_experts - 1)


def topk_sigmoid(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.topk_sigmoid`. Of equal sums the first is chosen; for a token with NaN sums the last expert."""
    scores = router_logits.float().sigmoid()
    choice = scores + correction_bias.float()
    num_experts = choice.shape[-1]
    if n_group > 1:
        size = num_experts // n_group
        best_two = _largest(choice.reshape(-1, size), 2)[0].sum(-1).view(-1, n_group)
        best_groups = _largest(best_two, topk_group)[1]
        groups = torch.arange(num_experts, dtype=torch.float32, device=choice.device).div(size, rounding_mode="floor")
        is_open = (best_groups[..., None] == groups).float().amax(1) > 0
        choice = torch.where(is_open, choice, torch.full_like(choice, -math.inf))
    experts = _largest(choice, top_k)[1].clamp(max=num_experts - 1)
    numbers = torch.arange(num_experts, dtype=torch.float32, device=choice.device)
    weights = torch.where(experts[..., None] == numbers, scores[:, None], 0.0).sum(-1)
    if norm_topk_prob:
        # Term by term: a compiler may order a sum over an axis by the number of tokens. In slices: TorchNeuron makes a
        # gather of a split.
        total = weights[:, :1]
        for place in range(1, top_k):
            total = total + weights[:, place : place + 1]
        weights = weights / (total + SMALLEST_SUM)
    return weights * scaling_factor, experts.int()


def _largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of each row and their indices, each [rows, count] in float32."""
    return (_by_comparison if len(values) <= _MOST_IN_PAIRS else _one_after_another)(values, count)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the token of each row's highest logit, of equal ones the first: [rows, vocab_size] to [rows] in int32.

    It is -1 for a row with a NaN, or with a highest logit that is not finite.
    """
    vocab_size = logits.shape[-1]
    top = logits.amax(-1, keepdim=True)
    tokens = torch.arange(vocab_size, dtype=torch.float32, device=logits.device)
    first = torch.where(logits == top, tokens, float(vocab_size)).amin(-1)
    # Whether a maximum with a NaN is NaN depends on the device; a comparison with NaN is false on every device.
    none = torch.full_like(top, math.inf)
    is_finite = ((logits <= top) & (top.abs() < none)).float().amin(-1)
    return (is_finite * (first + 1) - 1).int()


def candidates(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return high logits of each row, with their tokens: [rows, vocab_size] to [rows, 2 * count + 1] in float32.

    A row has the logits from the highest down, their tokens, and a bound that no other logit of the row exceeds. They
    are the row's highest logits, unless more than 8 of these are in one 64th of the vocabulary; then the bound is as
    high as one of them. If a row has too few tokens, the missing logits are -inf.
    """
    rows, vocab_size = logits.shape
    padding = -vocab_size % _GROUPS
    left = torch.nn.functional.pad(logits, (0, padding), value=-math.inf).view(rows, _GROUPS, -1)
    tokens = torch.arange(vocab_size + padding, dtype=torch.float32, device=logits.device).view(1, _GROUPS, -1)
    tops, firsts = [], []
    for _ in range(_OF_A_GROUP):
        tops.append(left.amax(-1, keepdim=True))
        firsts.append(torch.where(left == tops[-1], tokens, float(vocab_size + padding)).amin(-1, keepdim=True))
        left = torch.where(tokens == firsts[-1], -math.inf, left)
    found, of_tokens = (torch.cat(each, -1).view(rows, -1) for each in (tops, firsts))
    places = torch.arange(found.shape[1], dtype=torch.int32, device=logits.device)
    this, other = found[:, :, None], found[:, None]
    rank = torch.where(places[:, None] > places, other >= this, other > this).float().sum(-1)
    is_chosen = rank[:, None] == torch.arange(count, dtype=torch.float32, device=logits.device)[:, None]
    highest, of_highest = (torch.where(is_chosen, each[:, None], 0.0).sum(-1) for each in (found, of_tokens))
    bound = torch.maximum(tops[-1].amax(1), highest[:, -1:])
    return torch.cat([highest, of_highest, bound], -1)


def draws_of(choices: Sequence[Choice | None]) -> torch.Tensor:
    """Return how the tokens of rows are drawn, [rows, `COLUMNS`] in float64; zeros for a row without a choice."""
    return torch.tensor([_columns(choice) for choice in choices], dtype=torch.float64)


def _columns(choice: Choice | None) -> list[float]:
    if choice is None:
        return [0.0] * COLUMNS
    options = choice.temperature, choice.top_k, choice.top_p, choice.min_p, choice.scale, choice.cutoff
    parts = [choice.seed >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
    return [*options, *parts, choice.place & 0xFFFF, choice.place >> 16]


def choice_of(draw: torch.Tensor) -> Choice:
    """Return the choice of a row of `draws_of`."""
    columns = draw.tolist()
    parts = columns[SEED:PLACE], columns[PLACE:]
    seed, place = (sum(int(part) << 16 * at for at, part in enumerate(each)) for each in parts)
    return Choice(columns[TEMPERATURE], int(columns[TOP_K]), columns[TOP_P], columns[MIN_P], seed=seed, place=place)


def exponentials(draws: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return `ops.sampling.exponentials` of rows of `draws_of` in float32, but for rounding: [rows, vocab_size]."""
    parts = draws[:, SEED:].int()
    key_low, key_high, place = ((parts[:, at : at + 1], parts[:, at + 1 : at + 2]) for at in (0, 2, 4))
    counter = torch.arange(-(-vocab_size // 4), dtype=torch.int32, device=draws.device)[None]
    none = place[0] & 0, place[1] & 0
    words = _philox(((counter & 0xFFFF, _quotient(counter, 65536)), place, none, none), (key_low, key_high))
    by_counter = (torch.stack(torch.broadcast_tensors(*halves), -1) for halves in zip(*words, strict=True))
    lows, highs = (halves.flatten(1)[:, :vocab_size] for halves in by_counter)
    is_high = highs >= 2**15
    high, low = (torch.where(is_high, 65535 - each, each).float() for each in (highs, lows))
    numbers = high * 65536 + low + 0.5
    y = numbers * 2.0**-31
    factor = torch.full_like(y, FOLDED_LOG2[-1])
    for each in FOLDED_LOG2[-2::-1]:
        factor = factor * y + each
    return torch.where(is_high, y * factor, 32 - numbers.log2())


def drawn(draws: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the token that a host draws for each row, wherever it cannot depend on how numbers are rounded.

    A host keeps the tokens that temperature, top_k, top_p and min_p leave, in this order and as transformers' logits
    warpers do, and takes the highest p / noise of their probabilities p (`ops.sampling.draw`). A factor common to
    all tokens does not change the highest p / noise, so exp((logit - highest) / temperature) can replace p. Rounding is
    handled as follows:

    * Two tokens' p / noise are compared up to a factor of 1 + `slack`. Both sides compute logit / temperature with a
      relative error of at most 4 * 2**-24 and take a difference of two; tokens that matter are within 104 of the
      highest, since exp(-104) is 0 in float32. For two tokens on both sides together this is 32 * 2**-24, which is
      `_ROUNDING_OF_LOGITS`, times (the highest + 52). `_ROUNDING` is for exp, products and sums; sums over a whole
      vocabulary, which top_p is compared with, get 4 * `slack`.
    * The division may make two logits equal or change their order if they are as near as `_ROUNDING_OF_ORDER`; equal
      ones may be in any order. Up to `_HIGHEST_TEMPERATURE`, quotients are subnormal only for logits nearer than
      `_SMALLEST`.
    * So there are two sets of tokens: `loose` has all tokens that a host may keep, and `strict` those that it certainly
      keeps. The best token of `loose` must be in `strict`.

    Args:
        draws: of `draws_of`, in float32.
        logits: [rows, vocab_size] in float32.
        tokens: `likeliest` of the logits; the result for a row that draws none.

    Returns:
        [rows] in int32; -1 for logits that are not finite, `UNDECIDED` where the host must choose.
    """
    temperature, top_k, top_p, min_p = (draws[:, each : each + 1] for each in (TEMPERATURE, TOP_K, TOP_P, MIN_P))
    noise = exponentials(draws, logits.shape[1])
    is_drawn = temperature > 0
    temperature = torch.where(is_drawn, temperature, torch.ones_like(temperature))
    found = candidates(logits, MOST_TOP_K + 1)
    values, bound = found[:, : MOST_TOP_K + 1], found[:, -1:]
    top = values[:, :1]
    slack = _ROUNDING + _ROUNDING_OF_LOGITS * (top.abs() / temperature + 52)
    near = _ROUNDING_OF_ORDER * torch.maximum(top.abs(), bound.abs()) + _SMALLEST

    weights = ((logits - top) / temperature).exp()
    loose, strict, is_covered = _kept(values, bound, near, temperature, slack, top_k, top_p, weights)
    may_stay = (logits >= loose) & (weights >= min_p * (1 - slack))
    stays = (logits >= strict) & ((weights >= min_p * (1 + slack)) | (logits == top))

    zeros = torch.zeros_like(weights)
    scores = torch.where(may_stay, weights / noise, zeros)
    best = scores.amax(-1, keepdim=True)
    places = torch.arange(logits.shape[1], dtype=torch.float32, device=logits.device)
    first = torch.where(scores == best, places, float(logits.shape[1])).amin(-1, keepdim=True)
    second = torch.where(places == first, zeros, scores).amax(-1, keepdim=True)
    best_that_stays = torch.where(stays, scores, zeros).amax(-1, keepdim=True)
    is_covered = is_covered & (temperature < torch.full_like(temperature, _HIGHEST_TEMPERATURE))
    is_decided = is_covered & (best_that_stays >= best) & (best * (1 - slack) > second)
    choice = torch.where(is_decided, first, torch.full_like(first, UNDECIDED))[:, 0].int()
    return torch.where(is_drawn[:, 0] & (tokens >= 0), choice, tokens)


def _kept(
    values: torch.Tensor,
    bound: torch.Tensor,
    near: torch.Tensor,
    temperature: torch.Tensor,
    slack: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the lowest logit that top_k and top_p may keep, the lowest that they certainly keep, and whether these are
    known.

    Args:
        values, bound: from `candidates`; the others as in `drawn`, each [rows, 1] except `weights`.

    Returns:
        Each [rows, 1]; the logits are -inf where neither top_k nor top_p is given.
    """
    has_k, has_p, edge = top_k > 0, top_p < 1, 4 * slack
    ranks = torch.arange(values.shape[1], dtype=torch.float32, device=values.device)
    lowest = torch.full_like(top_k, -math.inf)
    last = torch.where(has_k, torch.where(ranks == top_k - 1, values, lowest).amax(-1, keepdim=True), lowest)
    is_covered = ~has_k | ((top_k <= MOST_TOP_K) & (last > bound + near))
    # Rounding may make a host's k-th logit equal to a lower one; then the host keeps both.
    kept, kept_for_sure = values >= last - near, values >= last
    of_candidates = ((values - values[:, :1]) / temperature).exp()
    none = torch.zeros_like(of_candidates)
    total = torch.where(has_k, torch.where(kept, of_candidates, none).sum(-1, keepdim=True), _sum_of_groups(weights))

    # The least and the most that a host has added up before a token: other tokens' weights, never the token's own.
    this, other, is_other = values[:, :, None], values[:, None], ranks[:, None] != ranks
    before = torch.where(other > this + near[:, None], of_candidates[:, None], 0.0).sum(-1)
    before_at_most = torch.where(is_other & (other >= this - near[:, None]), of_candidates[:, None], 0.0).sum(-1)
    sure_total = torch.where(has_k, torch.where(kept_for_sure, of_candidates, none).sum(-1, keepdim=True), total)
    loose = kept & (~has_p | (before < (top_p + edge) * total))
    strict = kept_for_sure & (~has_p | (before_at_most < (top_p - edge) * sure_total) | (before_at_most <= 0))
    # Without top_k, tokens beyond the candidates may be kept, unless the candidates suffice.
    above = torch.where(values > bound + near, of_candidates, none).sum(-1, keepdim=True)
    is_covered = is_covered & (has_k | ~has_p | (above >= (top_p + edge) * total))

    has_either = has_k | has_p
    highest = torch.full_like(lowest, math.inf)
    lowest_kept, lowest_for_sure = (
        torch.where(has_either, torch.where(each, values, highest).amin(-1, keepdim=True), lowest)
        for each in (loose, strict)
    )
    return lowest_kept, lowest_for_sure, is_covered


_Word = tuple[torch.Tensor, torch.Tensor]  # the low and the high 16 bits of words, in int32


def _philox(counter: tuple[_Word, _Word, _Word, _Word], key: tuple[_Word, _Word]) -> tuple[_Word, _Word, _Word, _Word]:
    """Compute `ops.stochastic_rounding.philox_4x32`. No sum or product exceeds 2**24: Trainium's vector engine adds and
    multiplies whole numbers in float32.
    """
    (a, b, c, d), (low, high) = counter, key
    for _ in range(ROUNDS):
        (a_low, a_high), (c_low, c_high) = _product(a, MULTIPLIERS[0]), _product(c, MULTIPLIERS[1])
        a, b, c, d = _xor(c_high, b, low), c_low, _xor(a_high, d, high), a_low
        low, high = _sum(low, INCREMENTS[0]), _sum(high, INCREMENTS[1])
    return a, b, c, d


def _product(word: _Word, factor: int) -> tuple[_Word, _Word]:
    """Return the low and the high word of a product with a word."""

    def product(half: torch.Tensor, factor: int) -> _Word:
        low = half * (factor & 255)
        rest = _quotient(low, 256) + half * (factor >> 8)
        return (rest & 255) * 256 + (low & 255), _quotient(rest, 256)

    (low, low_high), (middle, middle_high) = (product(half, factor & 0xFFFF) for half in word)
    (other, other_high), (high, highest) = (product(half, factor >> 16) for half in word)
    second = low_high + middle + other
    third = _quotient(second, 65536) + middle_high + other_high + high
    return (low, second & 0xFFFF), (third & 0xFFFF, _quotient(third, 65536) + highest)


def _sum(word: _Word, constant: int) -> _Word:
    low = word[0] + (constant & 0xFFFF)
    return low & 0xFFFF, word[1] + (constant >> 16) + _quotient(low, 65536) & 0xFFFF


def _quotient(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Divide numbers of at least 0, rounding down; torch-mlir lowers neither a shift nor `//` to whole numbers."""
    return numbers.div(by, rounding_mode="trunc")


def _xor(a: _Word, b: _Word, c: _Word) -> _Word:
    return a[0] ^ b[0] ^ c[0], a[1] ^ b[1] ^ c[1]


def _sum_of_groups(values: torch.Tensor) -> torch.Tensor:
    """Add up values of [rows, vocab_size] in groups, whose sums round less than one long sum: [rows, 1]."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % _GROUPS))
    return padded.view(len(values), _GROUPS, -1).sum(-1).sum(-1, keepdim=True)


def _by_comparison(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits of the chosen experts, the experts), each [tokens, top_k] in float32.

    An expert's rank is the number of experts above it.
    """
    experts = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    this, other = logits[:, :, None], logits[:, None]
    is_above = torch.where(experts[:, None] > experts, other >= this, other > this)
    rank = is_above.float().sum(-1)
    is_chosen = (rank[:, None] == torch.arange(top_k, dtype=torch.float32, device=logits.device)[:, None]).float()
    return (is_chosen * logits[:, None]).sum(-1), (is_chosen * experts.float()).sum(-1)


def _one_after_another(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `_by_comparison`, by taking the largest remaining logit top_k times."""
    num_experts = logits.shape[-1]
    experts = torch.arange(num_experts, dtype=torch.float32, device=logits.device).expand(logits.shape)
    nobody, lowest = torch.full_like(logits, num_experts), torch.full_like(logits, -math.inf)
    top_logits, chosen = [], []
    for _ in range(top_k):
        top = logits.amax(-1, keepdim=True)
        first = torch.where(logits == top, experts, nobody).amin(-1, keepdim=True)
        logits = torch.where(experts == first, lowest, logits)
        top_logits.append(top)
        chosen.append(first)
    return torch.cat(top_logits, -1), torch.cat(chosen, -1)
