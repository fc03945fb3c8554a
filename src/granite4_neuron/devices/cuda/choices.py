"""How the tokens of a step are chosen, as the kernels of `devices.cuda.sampling` read it, and what they answer.

What rarely changes stays on the device, by slot: biases, allowed tokens, and how often a sequence has its tokens, which
the kernels count on. The rest is a row of numbers for each slot and step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from granite4_neuron.devices.graphs import topk
from granite4_neuron.ops import sampling
from granite4_neuron.ops.sampling import MAX_LOGPROBS, WEIGHT_BITS, Choice, Logprobs, Penalties
from granite4_neuron.runtime.interface import UNDECIDED, Row

# The columns after those of `topk.draws_of`. IS_CHOSEN is 1 for a row whose token is chosen, and 0 for one whose
# likeliest token is taken. TOKEN is the one that the step runs; -1 for the one that was chosen last for its slot, which
# counts from 0 here. NUM_LOGPROBS is -1 for no report.
_FIRST = topk.COLUMNS
IS_CHOSEN, SLOT, TOKEN, NUM_LOGPROBS, FREQUENCY, PRESENCE, REPETITION = range(_FIRST, _FIRST + 7)
HAS_PENALTIES, HAS_BIASES, HAS_MASK, HAS_ALLOWED = range(_FIRST + 7, _FIRST + 11)
COLUMNS = _FIRST + 11
# The columns of answers, in int32: the token, its rank, the bits of its logit and of the highest one; the low and the
# high half of the sum of all weights; the likeliest tokens, -1 for none; and the bits of their logits.
FOUND, RANK, LOGIT, HIGHEST, TOTAL = range(5)
TOP = TOTAL + 2
TOP_LOGITS = TOP + MAX_LOGPROBS
ANSWERS = TOP_LOGITS + MAX_LOGPROBS
# The two sets of bits of a slot.
MASK, ALLOWED = range(2)


class Tables(NamedTuple):
    """What stays on the device.

    counts: [slots, vocab_size] in int32, how often a sequence generated a token before the one that the next step runs,
        and 1 more; 0 for a token that it does not have.
    biases: [slots, vocab_size] in float32.
    bits: [slots, 2, vocab_size / 8, rounded up] in uint8: `Choice.mask` and `Choice.allowed`.
    last: [slots] in int32, the tokens chosen last.
    """

    counts: torch.Tensor
    biases: torch.Tensor
    bits: torch.Tensor
    last: torch.Tensor


@dataclass
class _Known:
    """What a slot's tables are of.

    sequence: `Row.sequence`.
    length: how many of its tokens are counted.
    bits: the sets, as `Choice` has them.
    """

    sequence: int = -1
    length: int = -1
    has_biases: bool = False
    bits: list[torch.Tensor | None] = field(default_factory=lambda: [None, None])


class ChoiceTables:
    """The tables of a state, which follow the rows of its steps.

    Args:
        slots, vocab_size: numbers.
        device: of the tables.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device):
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tables = Tables(
            zeros(slots, vocab_size, dtype=torch.int32),
            zeros(slots, vocab_size, dtype=torch.float32),
            zeros(slots, 2, -(-vocab_size // 8), dtype=torch.uint8),
            zeros(slots, dtype=torch.int32),
        )
        self._device = device
        self._columns = np.zeros((slots, COLUMNS))
        self._known = [_Known() for _ in range(slots)]

    def forget(self, slots: Collection[int]) -> None:
        """Let nothing be known of slots, counted from 1, whose sequences ran tokens that the tables did not see."""
        for slot in slots:
            self._known[slot - 1] = _Known(has_biases=self._known[slot - 1].has_biases)

    def options_of(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return how the tokens after rows of one token are chosen, [rows, `COLUMNS`] in float64 on the host, and make
        the tables those of the rows.
        """
        self._columns[:, IS_CHOSEN] = 0
        changed: list[tuple[int, torch.Tensor]] = []
        for row in rows:
            if row.draw is not None:
                changed += self._follow(row, row.draw)
        if changed:
            places = torch.tensor([place for place, _ in changed])
            sets = torch.stack([bits for _, bits in changed])
            self.tables.bits.flatten(0, 1).index_copy_(0, self._moved(places), self._moved(sets))
        return torch.from_numpy(self._columns[[row.slot - 1 for row in rows]])

    def _follow(self, row: Row, choice: Choice) -> list[tuple[int, torch.Tensor]]:
        """Return the sets of bits that have changed, each with its place."""
        slot = row.slot - 1
        columns, known = self._columns[slot], self._known[slot]
        if known.sequence != row.sequence or row.sequence < 0:
            columns[:] = _columns_of(choice, slot)
            known = self._known[slot] = _Known(row.sequence, has_biases=self._set_biases(slot, choice))
        if row.counts is not None and known.length != row.start:
            tokens, counts = row.counts()
            self.tables.counts[slot].zero_().index_copy_(0, self._moved(tokens), self._moved(counts.int() + 1))
        known.length = row.start + 1
        columns[IS_CHOSEN], columns[TOKEN] = 1, row.tokens[0]
        columns[topk.PLACE], columns[topk.PLACE + 1] = known.length & 0xFFFF, known.length >> 16
        return [*self._change(slot, MASK, choice.mask), *self._change(slot, ALLOWED, choice.allowed)]

    def _change(self, slot: int, number: int, bits: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
        known = self._known[slot].bits
        if bits is not known[number]:
            self._columns[slot, HAS_MASK + number] = bits is not None
            known[number] = bits
            if bits is not None:
                yield 2 * slot + number, bits

    def _set_biases(self, slot: int, choice: Choice) -> bool:
        """Return whether the slot has biases now."""
        biases = self.tables.biases[slot]
        if self._known[slot].has_biases:
            biases.zero_()
        if choice.biases is not None:
            biases.index_copy_(0, *map(self._moved, choice.biases))
        return choice.biases is not None

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, without waiting for it."""
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _columns_of(choice: Choice, slot: int) -> list[float]:
    [draws] = topk.draws_of([choice]).tolist()
    penalties, num_logprobs = choice.penalties, -1 if choice.num_logprobs is None else choice.num_logprobs
    weights = [0.0] * 3 if penalties is None else [penalties.frequency, penalties.presence, penalties.repetition]
    return [*draws, 1, slot, -1, num_logprobs, *weights, penalties is not None, choice.biases is not None, 0, 0]


def choice_of(columns: torch.Tensor, tables: Tables) -> Choice:
    """Return the choice of a row of `ChoiceTables.options_of`, whose token is counted already."""
    slot = int(columns[SLOT])
    held = tables.counts[slot].nonzero()[:, 0]
    penalties = Penalties(held, (tables.counts[slot][held] - 1).float(), *columns[FREQUENCY : REPETITION + 1].tolist())
    biases = tables.biases[slot]
    return replace(
        topk.choice_of(columns[: topk.COLUMNS]),
        mask=tables.bits[slot, MASK] if columns[HAS_MASK] else None,
        allowed=tables.bits[slot, ALLOWED] if columns[HAS_ALLOWED] else None,
        biases=(torch.arange(len(biases)), biases) if columns[HAS_BIASES] else None,
        penalties=penalties if columns[HAS_PENALTIES] else None,
        num_logprobs=None if columns[NUM_LOGPROBS] < 0 else int(columns[NUM_LOGPROBS]),
    )


def answer_of(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return the answer to a choice from finite logits [vocab_size]: [`ANSWERS`] in int32."""
    [chosen] = sampling.choose([logits], [choice])
    answer = torch.full((ANSWERS,), -1, dtype=torch.int32)
    answer[FOUND] = chosen.token if chosen.token >= 0 else UNDECIDED
    if chosen.logprobs is not None:
        masked = sampling.masked(logits, choice)
        total = sampling.weights(sampling.log2_weights(masked, math.log2(math.e))).sum()
        top = chosen.logprobs.top
        answer[RANK] = chosen.logprobs.rank
        answer[LOGIT], answer[HIGHEST] = torch.stack([logits[chosen.token], masked.max()]).view(torch.int32)
        answer[TOTAL], answer[TOTAL + 1] = total[None].view(torch.int32)
        answer[TOP : TOP + len(top)] = top
        answer[TOP_LOGITS : TOP_LOGITS + len(top)] = logits[top].view(torch.int32)
    return answer


def reports_of(answers: torch.Tensor, nums: Sequence[int | None]) -> list[Logprobs | None]:
    """Return the reports of answers, [rows, `ANSWERS`] on the host: `ops.sampling.logprobs`, bit by bit.

    Args:
        nums: how many of the likeliest each row reports; None for a row without a report.
    """
    logits, top_logits = (
        answers[:, each].view(torch.float32) for each in (slice(LOGIT, TOTAL), slice(TOP_LOGITS, None))
    )
    totals = answers[:, TOTAL:TOP].contiguous().view(torch.int64)
    normalizers = logits[:, 1:].double() + (totals.double() * 2.0**-WEIGHT_BITS).log()
    logprobs = (logits[:, 0] - normalizers[:, 0]).float().tolist()
    values, tokens = (top_logits - normalizers).float().unbind(), answers[:, TOP:TOP_LOGITS].long()
    lengths = (tokens >= 0).long().cumprod(-1).sum(-1).tolist()
    reports: list[Logprobs | None] = []
    rows = zip(nums, logprobs, answers[:, RANK].tolist(), tokens.unbind(), values, lengths, strict=True)
    for num, logprob, rank, top, of_top, length in rows:
        length = min(num or 0, length)
        reports.append(None if num is None else Logprobs(logprob, rank, top[:length], of_top[:length]))
    return reports
