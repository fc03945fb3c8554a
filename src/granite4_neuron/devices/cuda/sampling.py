"""The chosen tokens of a step: those of `ops.sampling`, bit by bit.

Nothing is sorted. Kernels of one program for each part of a row pass to the next one what a part has: its highest
score, its best result of the race, the sum of its weights, the tokens that may be among the top k.

A token's result in the race does not depend on what top_p keeps. So the best result is found first, and then whether
its token is kept. If not, no token behind it in the order of scores is kept either, and the best result before it is
next. As tokens win with their probabilities, few attempts are expected.

The tokens that may be among the top k have at least the score that has this rank among the highest scores of groups of
tokens. With luck they are few, and one program chooses among them.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda import choices
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.sampling_numbers import comes_before, exponentials, keys_of, log2, weights_of, word
from granite4_neuron.devices.cuda.sampling_rows import best_before, kept_or_before, score_of_rank, weight_before
from granite4_neuron.devices.cuda.triton_utils import LOG2_E, tl, triton
from granite4_neuron.devices.graphs import topk
from granite4_neuron.ops import sampling
from granite4_neuron.runtime.interface import UNDECIDED

# Tokens of a part, and of a group at most; groups of a row at least, if it has so many tokens; tokens of a row that may
# be among the top k; and tokens that a row's program looks at together.
_PART, _GROUP, _GROUPS, _MOST, _BLOCK = 1024, 256, 512, 1024, 4096
_WARPS, _WARPS_OF_A_ROW = 4, 8
_MASK, _ALLOWED = tl.constexpr(0), tl.constexpr(1)  # the two sets of bits of a slot
_ROUNDS = tl.constexpr(sampling.ROUNDS)
_TEMPERATURE, _TOP_K, _TOP_P = map(tl.constexpr, (topk.TEMPERATURE, topk.TOP_K, topk.TOP_P))
_SCALE, _CUTOFF, _SEED, _PLACE = map(tl.constexpr, (topk.SCALE, topk.CUTOFF, topk.SEED, topk.PLACE))
_FREQUENCY, _PRESENCE, _REPETITION = map(tl.constexpr, (choices.FREQUENCY, choices.PRESENCE, choices.REPETITION))
_NUM_LOGPROBS, _IS_CHOSEN, _SLOT, _TOKEN = map(
    tl.constexpr, (choices.NUM_LOGPROBS, choices.IS_CHOSEN, choices.SLOT, choices.TOKEN)
)
_HAS_PENALTIES, _HAS_BIASES, _HAS_MASK, _HAS_ALLOWED = map(
    tl.constexpr, (choices.HAS_PENALTIES, choices.HAS_BIASES, choices.HAS_MASK, choices.HAS_ALLOWED)
)
_FOUND, _RANK, _LOGIT, _HIGHEST = map(tl.constexpr, (choices.FOUND, choices.RANK, choices.LOGIT, choices.HIGHEST))
_TOTAL, _TOP, _TOP_LOGITS = map(tl.constexpr, (choices.TOTAL, choices.TOP, choices.TOP_LOGITS))
_COLUMNS, _ANSWERS = tl.constexpr(choices.COLUMNS), tl.constexpr(choices.ANSWERS)
_UNDECIDED = tl.constexpr(UNDECIDED)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@operator(mutates=("counts", "last", "chosen"))
def choose_tokens(
    options: torch.Tensor,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    biases: torch.Tensor,
    bits: torch.Tensor,
    last: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """Return the token that `ops.sampling.choose` chooses for each row, with its report: `choices.answer_of`'s
    [rows, `choices.ANSWERS`] in int32. The token is `UNDECIDED` where the options allow none.

    Args:
        options: [rows, `choices.COLUMNS`] in float64.
        logits: [rows, vocab_size] in float32.
        tokens: [rows] in int32, `devices.graphs.topk.likeliest` of the logits: the result for a row that takes it, and
            where it is negative.
        counts: of each slot [slots, vocab_size] in int32, how often the sequence generated a token before the one that
            the step runs, and 1 more; 0 for a token that it does not have. Of rows with penalties, the token that the
            step runs is counted.
        biases: [slots, vocab_size] in float32.
        bits: of tokens that the mask and the options allow, [slots, 2, vocab_size / 8, rounded up] in uint8.
        last, chosen: [slots] in int32, the tokens chosen last; updated.
    """
    tables, answers = (
        choices.Tables(counts, biases, bits, last),
        torch.full((len(tokens), choices.ANSWERS), -1, dtype=torch.int32),
    )
    answers[:, choices.FOUND] = tokens
    for row, columns in enumerate(options):
        if columns[choices.IS_CHOSEN] == 0 or tokens[row] < 0:
            continue
        slot, token = int(columns[choices.SLOT]), int(columns[choices.TOKEN])
        token = int(last[slot]) if token < 0 else token
        if columns[choices.HAS_PENALTIES] and token >= 0:
            counts[slot, token] = counts[slot, token].clamp(min=1) + 1
        answers[row] = choices.answer_of(logits[row], choices.choice_of(columns, tables))
        last[slot] = chosen[slot] = answers[row, choices.FOUND]
    return answers


@choose_tokens.register_fake
def _(options, logits, tokens, counts, biases, bits, last, chosen):
    return tokens.new_empty(len(tokens), choices.ANSWERS)


def _launch(
    options: torch.Tensor,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    biases: torch.Tensor,
    bits: torch.Tensor,
    last: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    part = min(_PART, max(16, triton.next_power_of_2(vocab_size)))
    parts = triton.cdiv(vocab_size, part)
    group = min(_GROUP, part, max(1, triton.next_power_of_2(vocab_size) // _GROUPS // 2))
    groups = parts * part // group
    scores, race = torch.empty_like(logits), torch.empty_like(logits)
    tops, peaks = logits.new_empty(2, rows, groups), logits.new_empty(2, rows)
    bests, sums = logits.new_empty(3, rows, parts), last.new_empty(3, rows, parts, dtype=torch.int64)
    winners, masked_sums = last.new_empty(3, rows, parts), last.new_empty(rows, parts, dtype=torch.int64)
    bounds, nums = last.new_empty(2, rows, dtype=torch.int64), last.new_empty(2, rows)
    found = last.new_empty(2, rows, _MOST)
    answers = last.new_empty(rows, choices.ANSWERS)
    # Products are rounded before they are added to something, as the definition says.
    of_all_kernels = dict(VOCAB=vocab_size, enable_fp_fusion=False)
    of_parts = dict(**of_all_kernels, PART=part, num_warps=_WARPS)
    of_groups = dict(GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups))
    after_parts = dict(PARTS=parts, PADDED_PARTS=triton.next_power_of_2(parts))
    grid = parts, rows
    _score_kernel[grid](
        options,
        logits,
        tokens,
        counts,
        biases,
        bits,
        last,
        scores,
        tops,
        GROUP=group,
        GROUPS=groups,
        BYTES=bits.shape[2],
        **of_parts,
    )
    _peak_kernel[(rows, 2)](options, tokens, tops, peaks, bounds, nums, **of_groups)
    _race_kernel[grid](
        options,
        logits,
        tokens,
        bits,
        scores,
        peaks,
        bounds,
        race,
        bests[0],
        winners[0],
        sums[0],
        masked_sums,
        found,
        nums,
        MOST=_MOST,
        BYTES=bits.shape[2],
        **of_parts,
    )
    for number in range(2):
        _attempt_kernel[grid](
            options,
            tokens,
            scores,
            peaks,
            race,
            bests[number],
            winners[number],
            sums[number + 1],
            bests[number + 1],
            winners[number + 1],
            **after_parts,
            **of_parts,
        )
    _choose_kernel[(rows,)](
        options,
        logits,
        tokens,
        scores,
        tops,
        peaks,
        race,
        sums,
        bests,
        winners,
        found,
        nums,
        last,
        chosen,
        answers,
        GROUP=group,
        MOST=_MOST,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=_WARPS_OF_A_ROW,
        **of_groups,
        **after_parts,
        **of_all_kernels,
    )
    _report_kernel[(parts + 1, rows)](
        options,
        logits,
        bits,
        peaks,
        masked_sums,
        found,
        nums,
        answers,
        MOST=_MOST,
        BYTES=bits.shape[2],
        **after_parts,
        **of_parts,
    )
    return answers


register_launch(choose_tokens, _launch)


@triton.jit
def _score_kernel(
    columns,
    logits,
    tokens,
    counts,
    biases,
    bits,
    last,
    scores,
    tops,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Compute `ops.sampling.scores`, and the highest score and masked logit of each group. Count the tokens that run.

    Grid: (parts of the vocabulary, rows). The kernels' arguments, beside those of `choose_tokens`, whose options are
    called columns:

        scores: [rows, VOCAB] in float32.
        tops: [2, rows, GROUPS] in float32, of scores and of masked logits.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns += row * _COLUMNS
    if (tl.load(columns + _IS_CHOSEN) > 0) & (tl.load(tokens + row) >= 0):
        slot = tl.load(columns + _SLOT).to(tl.int64)
        places = part * PART + tl.arange(0, PART)
        is_token = places < VOCAB
        values = _masked(columns, logits + row * VOCAB, bits + 2 * slot * BYTES, places, VOCAB, BYTES)
        if tl.load(columns + _NUM_LOGPROBS) >= 0:
            _store_tops(tops + (tl.num_programs(1) + row) * GROUPS, part, values, PART, GROUP)
        if tl.load(columns + _HAS_BIASES) > 0:
            added = tl.load(biases + slot * VOCAB + places, is_token, 0.0)
            values = _set(values, values + added, added != 0)
        if tl.load(columns + _HAS_ALLOWED) > 0:
            values = _only(values, bits + (2 * slot + _ALLOWED) * BYTES, places, VOCAB)
        if tl.load(columns + _HAS_PENALTIES) > 0:
            ptrs = counts + slot * VOCAB + places
            held = tl.load(ptrs, is_token, 0)
            token = tl.load(columns + _TOKEN).to(tl.int32)
            if token < 0:
                token = tl.load(last + slot)
            held = tl.where(places == token, tl.maximum(held, 1) + 1, held)
            tl.store(ptrs, held, is_token & (places == token))
            frequency, presence = _float32(columns + _FREQUENCY), _float32(columns + _PRESENCE)
            repetition = _float32(columns + _REPETITION)
            lower = values - frequency * (held - 1).to(tl.float32)
            lower = lower - presence * (held > 1).to(tl.float32)
            divided = tl.where(lower > 0, tl.div_rn(lower, repetition), lower * repetition)
            values = _set(values, divided, held > 0)
        tl.store(scores + row * VOCAB + places, values, is_token)
        _store_tops(tops + row * GROUPS, part, values, PART, GROUP)


@triton.jit
def _float32(option):
    return tl.load(option).to(tl.float32)


@triton.jit
def _masked(columns, logits, bits, places, VOCAB: tl.constexpr, BYTES: tl.constexpr):
    """Load `ops.sampling.masked` logits."""
    values = tl.load(logits + places, places < VOCAB, -float("inf"))
    if tl.load(columns + _HAS_MASK) > 0:
        values = _only(values, bits + _MASK * BYTES, places, VOCAB)
    return values


@triton.jit
def _only(values, bits, places, VOCAB: tl.constexpr):
    of_tokens = tl.load(bits + (places >> 3), places < VOCAB, 0).to(tl.int32) >> (places & 7)
    return tl.where((of_tokens & 1) > 0, values, -float("inf"))


@triton.jit
def _set(values, new, is_set):
    """Set finite values to finite ones."""
    new = tl.minimum(tl.maximum(new, -_LARGEST), _LARGEST)
    return tl.where(is_set & (values > -float("inf")), new, values)


@triton.jit
def _store_tops(tops, part, values, PART: tl.constexpr, GROUP: tl.constexpr):
    of_groups = tl.max(tl.reshape(values, [PART // GROUP, GROUP]), 1)
    tl.store(tops + part * (PART // GROUP) + tl.arange(0, PART // GROUP), of_groups)


@triton.jit
def _peak_kernel(
    columns,
    tokens,
    tops,
    peaks,
    bounds,
    nums,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
):
    """Find the highest score, and the key that tokens have at least which may be among the top k; and both of masked
    logits.

    Grid: (rows, 2: scores or masked logits).

    Args:
        peaks, bounds: [2, rows] in float32 and int64.
        nums: [2, rows] in int32, how many such tokens have been found: 0 so far.
    """
    row, which = tl.program_id(0), tl.program_id(1)
    of_row = which * tl.num_programs(0) + row
    columns += row * _COLUMNS
    if (tl.load(columns + _IS_CHOSEN) > 0) & (tl.load(tokens + row) >= 0):
        groups = tl.arange(0, PADDED_GROUPS)
        of_groups = tl.load(tops + of_row.to(tl.int64) * GROUPS + groups, groups < GROUPS, -float("inf"))
        tl.store(peaks + of_row, tl.max(of_groups))
        tl.store(nums + of_row, 0)
        rank = tl.load(columns + tl.where(which == 0, _TOP_K, _NUM_LOGPROBS)).to(tl.int32)
        if rank > 0:
            keys, bound = keys_of(of_groups), tl.zeros((), tl.int64)
            for bit in tl.static_range(31, 15, -1):
                higher = bound + (1 << bit)
                bound = tl.where(tl.sum((keys >= higher).to(tl.int32)) >= rank, higher, bound)
            tl.store(bounds + of_row, bound)


@triton.jit
def _race_kernel(
    columns,
    logits,
    tokens,
    bits,
    scores,
    peaks,
    bounds,
    race,
    bests,
    winners,
    sums,
    masked_sums,
    found,
    nums,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Run the race of all tokens that min_p keeps, -inf for the others; add up weights; find the tokens that may be
    among the top k, and among the likeliest of a report.

    Grid: (parts of the vocabulary, rows). The kernels' arguments, beside those of `_score_kernel`:

        race: [rows, VOCAB] in float32.
        bests, winners: [rows, parts], the best result of each part, in float32, and its token, in int32.
        sums, masked_sums: [rows, parts] in int64, of the weights of scores, and of masked logits.
        found: [2, rows, MOST] in int32, tokens that may be among the top k, and among the likeliest, in no order.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts, masked_row = tl.num_programs(0), tl.num_programs(1) + row
    columns += row * _COLUMNS
    if (tl.load(columns + _IS_CHOSEN) > 0) & (tl.load(tokens + row) >= 0):
        places = part * PART + tl.arange(0, PART)
        is_token = places < VOCAB
        of_part = row * parts + part
        top = tl.load(peaks + row)
        if (tl.load(columns + _TEMPERATURE) > 0) & (top > -float("inf")):
            values = tl.load(scores + row * VOCAB + places, is_token, -float("inf"))
            logs = (values - top) * _float32(columns + _SCALE)
            is_kept = (values > -float("inf")) & (logs >= _float32(columns + _CUTOFF))
            results = tl.where(is_kept, logs - log2(exponentials(_words(columns, part, PART))), -float("inf"))
            tl.store(race + row * VOCAB + places, results, is_token)
            _store_best(bests + of_part, winners + of_part, results, places, VOCAB)
            top_k = tl.load(columns + _TOP_K).to(tl.int32)
            if (top_k > 0) & (top_k < VOCAB):
                _find(values, places, tl.load(bounds + row), found + row * MOST, nums + row, MOST)
            elif tl.load(columns + _TOP_P) < 1:
                tl.store(sums + of_part, tl.sum(tl.where(is_token, weights_of(logs), 0)))
        num_logprobs = tl.load(columns + _NUM_LOGPROBS).to(tl.int32)
        if num_logprobs >= 0:
            slot = tl.load(columns + _SLOT).to(tl.int64)
            values = _masked(columns, logits + row * VOCAB, bits + 2 * slot * BYTES, places, VOCAB, BYTES)
            logs = (values - tl.load(peaks + masked_row)) * LOG2_E
            tl.store(masked_sums + of_part, tl.sum(tl.where(is_token, weights_of(logs), 0)))
            if num_logprobs > 0:
                _find(values, places, tl.load(bounds + masked_row), found + masked_row * MOST, nums + masked_row, MOST)


@triton.jit
def _words(columns, part, PART: tl.constexpr):
    """Return the random word of each token of a part."""
    counters = part * (PART // 4) + tl.arange(0, PART // 4)
    none = tl.zeros_like(counters).to(tl.uint32)
    a, b, c, d = tl.philox_impl(
        counters.to(tl.uint32),
        none + word(columns + _PLACE),
        none,
        none,
        none + word(columns + _SEED),
        none + word(columns + _SEED + 2),
        _ROUNDS,
    )
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _store_best(best, winner, results, places, VOCAB: tl.constexpr):
    """Store the best result, and its token, the first of equal ones."""
    highest = tl.max(results)
    tl.store(best, highest)
    tl.store(winner, tl.min(tl.where(results == highest, places, VOCAB)))


@triton.jit
def _find(values, places, bound, found, num, MOST: tl.constexpr):
    """Append the tokens of a part whose keys are at least the bound."""
    is_found = (values > -float("inf")) & (keys_of(values) >= bound)
    count = tl.sum(is_found.to(tl.int32))
    if count > 0:
        at = tl.atomic_add(num, count) + tl.cumsum(is_found.to(tl.int32)) - 1
        tl.store(found + at, places, is_found & (at < MOST))


@triton.jit
def _attempt_kernel(
    columns,
    tokens,
    scores,
    peaks,
    race,
    bests,
    winners,
    sums,
    next_bests,
    next_winners,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
):
    """Add up the weights of the tokens before the winner of the race, if top_p decides whether it is kept, and find the
    best result of these tokens.

    Grid: (parts of the vocabulary, rows).

    Args:
        bests, winners: among which the winner is.
        sums, next_bests, next_winners: of the tokens before the winner.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns += row * _COLUMNS
    if (tl.load(columns + _IS_CHOSEN) > 0) & (tl.load(tokens + row) >= 0):
        top = tl.load(peaks + row)
        if _is_by_share(columns, VOCAB) & (top > -float("inf")):
            scores += row * VOCAB
            end = _winner(bests + row * PARTS, winners + row * PARTS, PARTS, PADDED_PARTS, VOCAB)
            places = part * PART + tl.arange(0, PART)
            values = tl.load(scores + places, places < VOCAB, -float("inf"))
            is_before = (places < VOCAB) & comes_before(values, places, tl.load(scores + end), end)
            logs = (values - top) * _float32(columns + _SCALE)
            of_part = row * PARTS + part
            tl.store(sums + of_part, tl.sum(tl.where(is_before, weights_of(logs), 0)))
            results = tl.load(race + row * VOCAB + places, is_before, -float("inf"))
            _store_best(next_bests + of_part, next_winners + of_part, results, places, VOCAB)


@triton.jit
def _is_by_share(columns, VOCAB: tl.constexpr):
    """Return whether the token is drawn with a top_p, and from all tokens."""
    top_k = tl.load(columns + _TOP_K)
    is_from_all = (top_k == 0) | (top_k >= VOCAB)
    return is_from_all & (tl.load(columns + _TOP_P) < 1) & (tl.load(columns + _TEMPERATURE) > 0)


@triton.jit
def _winner(bests, winners, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, VOCAB: tl.constexpr):
    """Return the token with the best result of all parts, the first of equal ones."""
    parts = tl.arange(0, PADDED_PARTS)
    results = tl.load(bests + parts, parts < PARTS, -float("inf"))
    of_parts = tl.load(winners + parts, parts < PARTS, VOCAB)
    return tl.min(tl.where(results == tl.max(results), of_parts, VOCAB))


@triton.jit
def _sum_of_parts(sums, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr):
    parts = tl.arange(0, PADDED_PARTS)
    return tl.sum(tl.load(sums + parts, parts < PARTS, 0))


@triton.jit
def _choose_kernel(
    columns,
    logits,
    tokens,
    scores,
    tops,
    peaks,
    race,
    sums,
    bests,
    winners,
    found,
    nums,
    last,
    chosen,
    answers,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose the token of each row.

    Grid: (rows,).

    Args:
        sums: [3, rows, parts], of all tokens, and of those before the first and the second winner.
        bests, winners: [3, rows, parts], of the first, the second and the third winner.
        answers: [rows, _ANSWERS] in int32.
    """
    row = tl.program_id(0).to(tl.int64)
    columns += row * _COLUMNS
    token = tl.load(tokens + row)
    if (tl.load(columns + _IS_CHOSEN) > 0) & (token >= 0):
        scores += row * VOCAB
        race += row * VOCAB
        top, scale = tl.load(peaks + row), _float32(columns + _SCALE)
        top_k, top_p = tl.load(columns + _TOP_K).to(tl.int32), tl.load(columns + _TOP_P)
        if top == -float("inf"):
            token = tl.full((), _UNDECIDED, tl.int32)
        elif tl.load(columns + _TEMPERATURE) <= 0:
            groups = tl.arange(0, PADDED_GROUPS)
            of_groups = tl.load(tops + row * GROUPS + groups, groups < GROUPS, -float("inf"))
            group = tl.min(tl.where(of_groups == top, groups, GROUPS - 1))
            places = group * GROUP + tl.arange(0, GROUP)
            values = tl.load(scores + places, places < VOCAB, -float("inf"))
            token = tl.min(tl.where(values == top, places, VOCAB))
        elif (top_k > 0) & (top_k < VOCAB):
            num = tl.load(nums + row)
            if num <= MOST:
                token = _choose_among(scores, race, found + row * MOST, num, top_k, top_p, top, scale, VOCAB, MOST)
            else:
                lowest = score_of_rank(scores, top_k, VOCAB, BLOCK)
                limit = tl.full((), 1, tl.int64)
                if top_p < 1:
                    limit = _limit(top_p, weight_before(scores, lowest, VOCAB, top, scale, VOCAB, BLOCK))
                token = best_before(scores, race, lowest, -float("inf"), VOCAB, VOCAB, BLOCK)
                token = kept_or_before(scores, race, token, lowest, limit, top_p, top, scale, VOCAB, BLOCK)
        else:
            of_row, of_all = row * PARTS, tl.num_programs(0) * PARTS
            token = _winner(bests + of_row, winners + of_row, PARTS, PADDED_PARTS, VOCAB)
            if top_p < 1:
                limit = _limit(top_p, _sum_of_parts(sums + of_row, PARTS, PADDED_PARTS))
                of_row += of_all
                if _sum_of_parts(sums + of_row, PARTS, PADDED_PARTS) >= limit:
                    token = _winner(bests + of_row, winners + of_row, PARTS, PADDED_PARTS, VOCAB)
                    of_row += of_all
                    if _sum_of_parts(sums + of_row, PARTS, PADDED_PARTS) >= limit:
                        token = _winner(bests + of_row, winners + of_row, PARTS, PADDED_PARTS, VOCAB)
                        lowest = tl.full((), -float("inf"), tl.float32)
                        token = kept_or_before(scores, race, token, lowest, limit, top_p, top, scale, VOCAB, BLOCK)
        slot = tl.load(columns + _SLOT).to(tl.int64)
        tl.store(last + slot, token)
        tl.store(chosen + slot, token)
        tl.store(answers + row * _ANSWERS + _RANK, 0)
    tl.store(answers + row * _ANSWERS + _FOUND, token)


@triton.jit
def _limit(top_p, total):
    """Return the sum of weights that a kept token's predecessors do not make up."""
    return tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _choose_among(scores, race, found, num, top_k, top_p, top, scale, VOCAB: tl.constexpr, MOST: tl.constexpr):
    """Return the token with the best result among the tokens that top_k and top_p keep.

    Args:
        found: the top k are among these, of which there are `num`.
    """
    numbers = tl.arange(0, MOST)
    places = tl.load(found + numbers, numbers < num, VOCAB)
    values = tl.load(scores + places, numbers < num, -float("inf"))
    results = tl.load(race + places, numbers < num, -float("inf"))
    keys, lowest = keys_of(values), tl.zeros((), tl.int64)
    for bit in tl.static_range(31, -1, -1):
        higher = lowest + (1 << bit)
        lowest = tl.where(tl.sum((keys >= higher).to(tl.int32)) >= top_k, higher, lowest)
    is_left = (numbers < num) & (keys >= lowest)
    weights = weights_of((values - top) * scale)
    limit = _limit(top_p, tl.sum(tl.where(is_left, weights, 0)))
    token = tl.full((), VOCAB, tl.int32)
    before = limit
    while before >= limit:
        best = tl.max(tl.where(is_left, results, -float("inf")))
        token = tl.min(tl.where(is_left & (results == best), places, VOCAB))
        before = tl.zeros_like(limit)
        if top_p < 1:
            is_left = is_left & comes_before(values, places, tl.load(scores + token), token)
            before = tl.sum(tl.where(is_left, weights, 0))
    return token


@triton.jit
def _report_kernel(
    columns,
    logits,
    bits,
    peaks,
    masked_sums,
    found,
    nums,
    answers,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Report on the chosen token and on the likeliest.

    Grid: (parts of the vocabulary, which find the token's rank, and one that does the rest; rows).
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns += row * _COLUMNS
    answers += row * _ANSWERS
    token = tl.load(answers + _FOUND)
    num_logprobs = tl.load(columns + _NUM_LOGPROBS).to(tl.int32)
    if (tl.load(columns + _IS_CHOSEN) > 0) & (token >= 0) & (num_logprobs >= 0):
        logits += row * VOCAB
        bits += 2 * tl.load(columns + _SLOT).to(tl.int64) * BYTES
        logit = tl.load(logits + token)
        if part < PARTS:
            places = part * PART + tl.arange(0, PART)
            values = _masked(columns, logits, bits, places, VOCAB, BYTES)
            tl.atomic_add(answers + _RANK, tl.sum(((places < VOCAB) & (values >= logit)).to(tl.int32)))
        else:
            tl.store(answers + _LOGIT, logit.to(tl.int32, bitcast=True))
            masked_row = tl.num_programs(1) + row
            top = tl.load(peaks + masked_row)
            tl.store(answers + _HIGHEST, top.to(tl.int32, bitcast=True))
            total = _sum_of_parts(masked_sums + row * PARTS, PARTS, PADDED_PARTS)
            tl.store(answers + _TOTAL, total.to(tl.int32))
            tl.store(answers + _TOTAL + 1, (total >> 32).to(tl.int32))
            num = tl.load(nums + masked_row)
            if num <= MOST:
                numbers = tl.arange(0, MOST)
                places = tl.load(found + masked_row * MOST + numbers, numbers < num, VOCAB)
                values = tl.load(logits + places, numbers < num, -float("inf"))
                for number in range(0, num_logprobs):
                    best = tl.max(values)
                    place = tl.min(tl.where(values == best, places, VOCAB))
                    _store_top(answers, number, best, place)
                    values = tl.where(places == place, -float("inf"), values)
            else:
                best, place = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
                for number in range(0, num_logprobs):
                    best, place = _next(columns, logits, bits, best, place, VOCAB, PART, BYTES)
                    _store_top(answers, number, best, place)


@triton.jit
def _store_top(answers, number, logit, token):
    tl.store(answers + _TOP + number, tl.where(logit > -float("inf"), token, -1))
    tl.store(answers + _TOP_LOGITS + number, logit.to(tl.int32, bitcast=True))


@triton.jit
def _next(columns, logits, bits, last_logit, last, VOCAB: tl.constexpr, PART: tl.constexpr, BYTES: tl.constexpr):
    """Return the masked logit that follows another one in their order, and its token."""
    bests = tl.full((PART,), -float("inf"), tl.float32)
    firsts = tl.full((PART,), VOCAB, tl.int32)
    for start in range(0, VOCAB, PART):
        places = start + tl.arange(0, PART)
        values = _masked(columns, logits, bits, places, VOCAB, BYTES)
        values = tl.where(comes_before(last_logit, last, values, places), values, -float("inf"))
        firsts = tl.where(values > bests, places, firsts)
        bests = tl.maximum(bests, values)
    best = tl.max(bests)
    return best, tl.min(tl.where(bests == best, firsts, VOCAB))
