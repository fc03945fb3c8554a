"""Decides what runs next: which sequences get a slot, which of them are in the next step, and with which tokens.

A step is either a chunk of prompts, or decode for every sequence whose prompt is done: one token each, or several if
there are drafts. The two take turns, so that a long prompt delays other sequences by at most one chunk. They are not
mixed, because a chunk beside single tokens would be padded to a rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from granite4_neuron.engine.drafting import Drafting
from granite4_neuron.engine.live_sequences import LiveSequences
from granite4_neuron.engine.prefix_reuse import PrefixReuse
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.slots import Slots
from granite4_neuron.runtime.interface import MOST_STOPS, Row, Runtime


class ScheduledStep(NamedTuple):
    """A step of the runtime; one without rows does nothing.

    sequences, rows: in the same order.
    is_prefill: whether the rows are chunks of prompts; otherwise each is a sequence's last token, followed by drafts.
    all_logits: whether the logits of all tokens are needed, for log-probabilities of a prompt.
    has_drafts: whether a row has drafts, which are to be verified.
    """

    sequences: Sequence[RunningSequence]
    rows: Sequence[Row]
    is_prefill: bool
    all_logits: bool = False
    has_drafts: bool = False


class Scheduler:
    """Decides what each step runs.

    Args:
        runtime: has the limits of a step.
        slots: for running sequences, and their memory.
        live: the sequences.
        prefixes: lets prompts begin from cached prefixes.
        drafting: proposes tokens for decode.
        prompts_first: run all prompts before the first decode.
    """

    def __init__(
        self,
        runtime: Runtime,
        slots: Slots,
        live: LiveSequences,
        prefixes: PrefixReuse,
        drafting: Drafting,
        prompts_first: bool,
    ):
        self._runtime = runtime
        self._slots = slots
        self._live = live
        self._prefixes = prefixes
        self._drafting = drafting
        self._prompts_first = prompts_first
        self._prompts_are_next = True

    def admit(self) -> None:
        """Give waiting sequences slots, in order: one that does not fit yet holds back those after it."""
        live = self._live
        if self._slots.failed_steps and not live.running:  # a device's state may be lost with a step that failed
            self._prefixes.detach()
            self._slots.renew()
        while live.waiting:
            sequence = live.waiting[0]
            with live.guard(sequence):
                slot = self._slots.take(sequence.limit, [each.slot for each in live.running.values()])
                if slot is None:
                    return
                sequence.slot = slot
                live.running[sequence.id] = sequence
                live.waiting.popleft()
            if sequence.id not in live.running:
                return

    def schedule(self) -> ScheduledStep:
        """Return the next step. A sequence whose whole prompt is cached gets its first token without one."""
        running = list(self._live.running.values())
        prompts = [sequence for sequence in running if sequence.is_prompt]
        others = [sequence for sequence in running if not sequence.is_prompt] if prompts else running
        if prompts and (self._prompts_first or self._prompts_are_next or not others):
            self._prompts_are_next = False
            return self._prefill(prompts)
        self._prompts_are_next = True
        return self._decode(others)

    def following(self, step: ScheduledStep) -> ScheduledStep | None:
        """Return the step of decode that may begin before the tokens of another one are known, if there is one.

        Its rows run tokens that the device has chosen. It is the step that comes next whatever these are, except for
        sequences that one of them ends. Nobody needs the state of such a sequence but a prefix cache, for which the
        device leaves it as it is.
        """
        if self._drafting.drafter is not None or any(each.is_prompt for each in self._live.running.values()):
            return None
        if not all(self._may_go_ahead(sequence) for sequence in step.sequences):
            return None
        going_on = [each for each in step.sequences if len(each.tokens) + 1 < each.limit]
        rows = [sequence.following_row() for sequence in going_on]
        return ScheduledStep(going_on, rows, is_prefill=False) if rows else None

    def _may_go_ahead(self, sequence: RunningSequence) -> bool:
        """Return whether a sequence may run its next token before the host knows it."""
        if not sequence.takes_likeliest or self._prefixes.is_due(sequence, more=1):
            return False
        request = sequence.request
        # A stop string is found on the host.
        return self._prefixes.cache is None or (not request.stop and len(request.stop_token_ids or ()) <= MOST_STOPS)

    def _prefill(self, prompts: Sequence[RunningSequence]) -> ScheduledStep:
        """Take one chunk of the first prompt, together with those of others that fit into the padded step."""
        chosen: list[RunningSequence] = []
        rows: list[Row] = []
        for sequence in prompts:
            # Not one more token fits. Later sequences wait: they may find more in the prefix cache by then.
            if len(rows) == self._runtime.rows_per_step or not self._fits(rows):
                break
            if self._prefixes.is_worth_waiting(sequence, chosen):
                continue
            self._begin(sequence)
            if sequence.id not in self._live.running or not sequence.is_prompt:
                continue
            row = sequence.next_row(sequence.next_cut(self._runtime.tokens_per_step, self._runtime.is_exact_at_any_cut))
            if not self._fits(rows, len(row.tokens)):
                break
            chosen.append(sequence)
            rows.append(row)
        all_logits = any(sequence.reports_prompt for sequence in chosen)
        return ScheduledStep(chosen, rows, is_prefill=True, all_logits=all_logits)

    def _fits(self, rows: Sequence[Row], tokens: int = 1) -> bool:
        """Return whether a step of these rows has room for another row of so many tokens; an empty step always has."""
        longest = max(tokens, *(len(row.tokens) for row in rows), 0)
        return not rows or (len(rows) + 1) * longest <= self._runtime.tokens_per_step

    def _begin(self, sequence: RunningSequence) -> None:
        """Start a prompt from its cached prefix. If that is the whole prompt, choose the first token at once."""
        with self._live.guard(sequence):
            self._prefixes.begin(sequence)
            if sequence.prefix is not None and not sequence.is_prompt:
                logits = sequence.prefix.logits
                self._live.count(sequence, 0, logits, sequence.choose([logits]))

    def _decode(self, sequences: Sequence[RunningSequence]) -> ScheduledStep:
        """Take the last token of each sequence, and the drafts that may follow it."""
        drafts = self._drafts(sequences)
        sequences = [sequence for sequence in sequences if sequence.id in self._live.running]
        rows = [sequence.next_row(len(sequence.tokens), drafts.get(sequence.id, ())) for sequence in sequences]
        return ScheduledStep(sequences, rows, is_prefill=False, has_drafts=any(drafts.values()))

    def _drafts(self, sequences: Sequence[RunningSequence]) -> dict[int, Sequence[int]]:
        """Return the drafts of sequences that have some, by id, as far as their constraints allow them."""
        drafts = {}
        proposed = self._drafting.propose(sequences, self._prefixes.interval)
        for sequence, its_drafts in zip(sequences, proposed, strict=False):
            if its_drafts:
                with self._live.guard(sequence):
                    drafts[sequence.id] = sequence.sampler.allowed(its_drafts)
        return drafts
