"""The drawn tokens of a step: those of `ops.sampling`, bit by bit.

Nothing is sorted. A token's result in the race does not depend on what top_k and top_p keep. So the best result is
found first, and then whether its token is kept. If not, no token behind it in the order of scores is kept either, and
the best result before it is next. As tokens win with their probabilities, few attempts are expected.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.graphs import topk
from granite4_neuron.devices.graphs.topk import choice_of
from granite4_neuron.ops import sampling

# Tokens of a program of the race, and tokens that a row's program looks at together.
_PART, _BLOCK = 2048, 8192
_WARPS, _WARPS_OF_A_ROW = 4, 32
_MOST_STEPS = tl.constexpr(32)  # in which a score of a rank is looked for from below
_ROUNDS, _SHIFT = tl.constexpr(sampling.ROUNDS), tl.constexpr(sampling.WEIGHT_BITS - 30)
_FOLDED_LOG2, _LOG2, _EXP2 = map(tl.constexpr, (sampling.FOLDED_LOG2, sampling.LOG2, sampling.EXP2))
_TEMPERATURE, _TOP_K, _TOP_P = map(tl.constexpr, (topk.TEMPERATURE, topk.TOP_K, topk.TOP_P))
_SCALE, _CUTOFF, _SEED, _PLACE = map(tl.constexpr, (topk.SCALE, topk.CUTOFF, topk.SEED, topk.PLACE))
_COLUMNS = tl.constexpr(topk.COLUMNS)


def draw(draws: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """See `draw_tokens`."""
    return draw_tokens(draws, logits, tokens)


@operator()
def draw_tokens(draws: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the token that `ops.sampling.draw` draws for each row, [rows] in int32.

    Args:
        draws: [rows, `COLUMNS`] in float64, of `devices.graphs.topk.draws_of`.
        logits: [rows, vocab_size] in float32.
        tokens: [rows] in int32, `devices.graphs.topk.likeliest` of the logits: the result for a row that draws none,
            and where it is negative.
    """
    result = tokens.clone()
    for row, columns in enumerate(draws):
        choice = choice_of(columns)
        if choice.temperature > 0 and tokens[row] >= 0:
            result[row] = sampling.draw(logits[row], choice)
    return result


@draw_tokens.register_fake
def _(draws, logits, tokens):
    return torch.empty_like(tokens)


def _launch(draws: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    rows, vocab_size = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    race, tops, result = torch.empty_like(logits), logits.new_empty(rows, block), torch.empty_like(tokens)
    # Products are rounded before they are added to something, as the definition says.
    options = dict(VOCAB=vocab_size, enable_fp_fusion=False)
    parts = triton.cdiv(vocab_size, _PART)
    _race_kernel[parts, rows](draws, logits, tokens, race, COUNTERS=_PART // 4, num_warps=_WARPS, **options)
    _draw_kernel[rows,](draws, logits, tokens, race, tops, result, BLOCK=block, num_warps=_WARPS_OF_A_ROW, **options)
    return result


register_launch(draw_tokens, _launch)


@triton.jit
def _race_kernel(draws, logits, tokens, race, VOCAB: tl.constexpr, COUNTERS: tl.constexpr):
    """Run the race of all tokens that min_p keeps: -inf for the others.

    Grid: (parts of the vocabulary, rows).

    Args:
        draws, logits, tokens: of `draw_tokens`.
        race: [rows, VOCAB] in float32.
    """
    row = tl.program_id(1).to(tl.int64)
    draws += row * _COLUMNS
    logits += row * VOCAB
    race += row * VOCAB
    token = tl.load(tokens + row)
    if (tl.load(draws + _TEMPERATURE) > 0) & (token >= 0):
        scale, cutoff = tl.load(draws + _SCALE).to(tl.float32), tl.load(draws + _CUTOFF).to(tl.float32)
        top = tl.load(logits + token)
        counters = tl.program_id(0) * COUNTERS + tl.arange(0, COUNTERS)
        none = tl.zeros_like(counters).to(tl.uint32)
        a, b, c, d = tl.philox_impl(
            counters.to(tl.uint32),
            none + _word(draws + _PLACE),
            none,
            none,
            none + _word(draws + _SEED),
            none + _word(draws + _SEED + 2),
            _ROUNDS,
        )
        first = 4 * counters
        _store_race(a, first, logits, race, top, scale, cutoff, VOCAB)
        _store_race(b, first + 1, logits, race, top, scale, cutoff, VOCAB)
        _store_race(c, first + 2, logits, race, top, scale, cutoff, VOCAB)
        _store_race(d, first + 3, logits, race, top, scale, cutoff, VOCAB)


@triton.jit
def _word(halves):
    """Load a word of 32 bits from its halves."""
    return tl.load(halves).to(tl.uint32) | (tl.load(halves + 1).to(tl.uint32) << 16)


@triton.jit
def _store_race(words, places, logits, race, top, scale, cutoff, VOCAB: tl.constexpr):
    is_token = places < VOCAB
    scores = tl.load(logits + places, is_token, -float("inf"))
    logs = (scores - top) * scale
    results = logs - _log2(_exponentials(words))
    results = tl.where((scores > -float("inf")) & (logs >= cutoff), results, -float("inf"))
    tl.store(race + places, results, is_token)


@triton.jit
def _exponentials(words):
    """Compute `ops.sampling.exponentials` of random words."""
    is_high = words >= 0x80000000
    folded = tl.where(is_high, words ^ 0xFFFFFFFF, words).to(tl.float32) + 0.5
    exponents, mantissas = _parts(folded)
    y = tl.where(is_high, folded * 2.0**-31, 2 - mantissas)
    return tl.where(is_high, 0, 31 - exponents).to(tl.float32) + y * _polynomial(y, _FOLDED_LOG2, 7)


@triton.jit
def _log2(values):
    exponents, mantissas = _parts(values)
    fractions = mantissas - 1
    return exponents.to(tl.float32) + fractions * _polynomial(fractions, _LOG2, 8)


@triton.jit
def _parts(values):
    bits = values.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127, ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    result = tl.zeros_like(x) + COEFFICIENTS[COUNT - 1]
    for number in tl.static_range(2, COUNT + 1):
        result = result * x + COEFFICIENTS[COUNT - number]
    return result


@triton.jit
def _draw_kernel(draws, logits, tokens, race, tops, result, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Find the best result of the race among the tokens that are kept.

    Grid: (rows,).

    Args:
        draws, logits, tokens, race: of `_race_kernel`.
        tops: [rows, BLOCK] in float32, for its own use.
        result: [rows] in int32.
    """
    row = tl.program_id(0).to(tl.int64)
    draws += row * _COLUMNS
    logits += row * VOCAB
    race += row * VOCAB
    token = tl.load(tokens + row)
    if (tl.load(draws + _TEMPERATURE) > 0) & (token >= 0):
        top, scale = tl.load(logits + token), tl.load(draws + _SCALE).to(tl.float32)
        top_k, top_p = tl.load(draws + _TOP_K).to(tl.int32), tl.load(draws + _TOP_P)
        lowest = tl.full((), -float("inf"), tl.float32)
        if (top_k > 0) & (top_k < VOCAB):
            lowest = _bound_of_rank(logits, tops + row * BLOCK, top_k, VOCAB, BLOCK)
            count, _ = _count_above(logits, lowest, True, VOCAB, BLOCK)
            if count > top_k + _MOST_STEPS:
                lowest = _score_of_rank(logits, top_k, lowest, VOCAB, BLOCK)
            else:
                while count > top_k:  # one score after another is left out
                    above, following = _count_above(logits, lowest, False, VOCAB, BLOCK)
                    lowest = tl.where(above >= top_k, following, lowest)
                    count = tl.where(above >= top_k, above, 0)
        limit = tl.full((), 1, tl.int64)
        if top_p < 1:
            total = _weight_before(logits, lowest, VOCAB, top, scale, VOCAB, BLOCK)
            limit = tl.maximum(limit, (top_p * total.to(tl.float64)).to(tl.int64))
        # Tokens before this one are left to choose from.
        end_score, end = tl.full((), -float("inf"), tl.float32), tl.full((), VOCAB, tl.int32)
        before = limit
        while before >= limit:
            token = _best(logits, race, lowest, end_score, end, VOCAB, BLOCK)
            before = tl.zeros_like(limit)
            if top_p < 1:
                end_score, end = tl.load(logits + token), token
                before = _weight_before(logits, end_score, end, top, scale, VOCAB, BLOCK)
    tl.store(result + row, token)


@triton.jit
def _is_before(scores, places, end_score, end):
    """Return which tokens have a higher score than the end, or the same one and a lower number."""
    return (scores > end_score) | ((scores == end_score) & (places < end))


@triton.jit
def _best(logits, race, lowest, end_score, end, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the token with the best result, the first of equal ones, of those before the end with scores from `lowest`
    on.
    """
    bests = tl.full((BLOCK,), -float("inf"), tl.float32)
    firsts = tl.full((BLOCK,), VOCAB, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        places = start + tl.arange(0, BLOCK)
        scores = tl.load(logits + places, places < VOCAB, -float("inf"))
        is_left = (scores >= lowest) & _is_before(scores, places, end_score, end)
        results = tl.load(race + places, is_left & (places < VOCAB), -float("inf"))
        firsts = tl.where(results > bests, places, firsts)
        bests = tl.maximum(bests, results)
    return tl.min(tl.where(bests == tl.max(bests), firsts, VOCAB))


@triton.jit
def _weight_before(logits, end_score, end, top, scale, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of `ops.sampling.weights` of the tokens before the end, in int64."""
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        places = start + tl.arange(0, BLOCK)
        scores = tl.load(logits + places, places < VOCAB, -float("inf"))
        is_before = (scores > -float("inf")) & _is_before(scores, places, end_score, end)
        sums += tl.where(is_before, _weights((scores - top) * scale), 0)
    return tl.sum(sums)


@triton.jit
def _weights(logs):
    exponents = tl.minimum(-logs, 63.0)
    whole = exponents.to(tl.int32)
    fractions = (_polynomial(exponents - whole.to(tl.float32), _EXP2, 6) * 2.0**30).to(tl.int32)
    return (fractions.to(tl.int64) << _SHIFT) >> whole.to(tl.int64)


@triton.jit
def _bound_of_rank(logits, tops, rank, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return a score that as many tokens as a rank have or exceed; with luck the score of that rank.

    It has this rank among the highest scores of BLOCK groups of tokens, which are written to `tops`.
    """
    bests = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        places = start + tl.arange(0, BLOCK)
        bests = tl.maximum(bests, tl.load(logits + places, places < VOCAB, -float("inf")))
    bound = tl.full((), -float("inf"), tl.float32)
    if rank <= BLOCK:
        tl.store(tops + tl.arange(0, BLOCK), bests)
        tl.debug_barrier()
        bound = _score_of_rank(tops, rank, bound, BLOCK, BLOCK)
    return bound


@triton.jit
def _count_above(logits, score, COUNTS_EQUAL: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many tokens have a higher score, or with `COUNTS_EQUAL` at least this one; and the lowest of them."""
    counts = tl.zeros((BLOCK,), tl.int32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        places = start + tl.arange(0, BLOCK)
        scores = tl.load(logits + places, places < VOCAB, -float("inf"))
        is_counted = (scores > score) | ((scores == score) & (places < VOCAB) & COUNTS_EQUAL)
        counts += is_counted.to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(is_counted, scores, float("inf")))
    return tl.sum(counts), tl.min(lowest)


@triton.jit
def _score_of_rank(logits, rank, lowest, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the score that has a rank, counted from 1 for the highest, and is not below `lowest`. It is found digit by
    digit of 8 bits.
    """
    digits = tl.arange(0, 256)
    key = tl.zeros((), tl.int64)
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, VOCAB, BLOCK):
            places = start + tl.arange(0, BLOCK)
            scores = tl.load(logits + places, places < VOCAB, -float("inf"))
            keys = _keys(scores)
            is_counted = (places < VOCAB) & (scores >= lowest) & ((keys >> (shift + 8)) == key)
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, is_counted)
        above = tl.sum(counts) - tl.cumsum(counts)
        is_digit = (above < rank) & (above + counts >= rank)
        key = (key << 8) + tl.sum(tl.where(is_digit, digits, 0))
        rank -= tl.sum(tl.where(is_digit, above, 0))
    bits = tl.where(key < 2**31, -1 - key, key - 2**31)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _keys(scores):
    """Return whole numbers from 0 to 2**32 in the order of scores, in int64."""
    bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2**31)
