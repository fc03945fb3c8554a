"""What one program finds in a whole row of scores: the way to choose a token where the parts of the row do not suffice.

The arguments of these functions:

    scores, race: [VOCAB] in float32, of `devices.cuda.sampling`.
    lowest: the lowest score that top_k keeps.
    top, scale: the highest score, and `Choice.scale`.
"""

from __future__ import annotations

from granite4_neuron.devices.cuda.sampling_numbers import comes_before, keys_of, weights_of
from granite4_neuron.devices.cuda.triton_utils import tl, triton


@triton.jit
def kept_or_before(scores, race, token, lowest, limit, top_p, top, scale, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the token if top_p keeps it, or else the one with the best result before it that it keeps.

    Args:
        limit: the sum of weights that a kept token's predecessors do not make up.
    """
    before = tl.zeros_like(limit)
    if top_p < 1:
        before = weight_before(scores, tl.load(scores + token), token, top, scale, VOCAB, BLOCK)
    while before >= limit:
        token = best_before(scores, race, lowest, tl.load(scores + token), token, VOCAB, BLOCK)
        before = weight_before(scores, tl.load(scores + token), token, top, scale, VOCAB, BLOCK)
    return token


@triton.jit
def best_before(logits, race, lowest, end_score, end, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the token with the best result, the first of equal ones, of those before the end with scores from `lowest`
    on.
    """
    bests = tl.full((BLOCK,), -float("inf"), tl.float32)
    firsts = tl.full((BLOCK,), VOCAB, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        places = start + tl.arange(0, BLOCK)
        scores = tl.load(logits + places, places < VOCAB, -float("inf"))
        is_left = (scores >= lowest) & comes_before(scores, places, end_score, end)
        results = tl.load(race + places, is_left & (places < VOCAB), -float("inf"))
        firsts = tl.where(results > bests, places, firsts)
        bests = tl.maximum(bests, results)
    return tl.min(tl.where(bests == tl.max(bests), firsts, VOCAB))


@triton.jit
def weight_before(logits, end_score, end, top, scale, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of `ops.sampling.weights` of the tokens before the end, in int64."""
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        places = start + tl.arange(0, BLOCK)
        scores = tl.load(logits + places, places < VOCAB, -float("inf"))
        is_before = (scores > -float("inf")) & comes_before(scores, places, end_score, end)
        sums += tl.where(is_before, weights_of((scores - top) * scale), 0)
    return tl.sum(sums)


@triton.jit
def score_of_rank(logits, rank, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the score that has a rank, counted from 1 for the highest. It is found digit by digit of 8 bits."""
    digits = tl.arange(0, 256)
    key = tl.zeros((), tl.int64)
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, VOCAB, BLOCK):
            places = start + tl.arange(0, BLOCK)
            scores = tl.load(logits + places, places < VOCAB, -float("inf"))
            keys = keys_of(scores)
            is_counted = (places < VOCAB) & ((keys >> (shift + 8)) == key)
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, is_counted)
        above = tl.sum(counts) - tl.cumsum(counts)
        is_digit = (above < rank) & (above + counts >= rank)
        key = (key << 8) + tl.sum(tl.where(is_digit, digits, 0))
        rank -= tl.sum(tl.where(is_digit, above, 0))
    bits = tl.where(key < 2**31, -1 - key, key - 2**31)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)
