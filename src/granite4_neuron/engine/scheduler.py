"""Decides what runs next: which sequences get a slot, which of them are in the next step, and with which tokens.

If a runtime packs rows (`Runtime.packs_rows`), a step has the next token of every sequence whose prompt is done, and
pieces of prompts with as many tokens as there is time for (`engine.prefill_budget`). So a prompt delays the others
little, and the weights are read once for all.

Elsewhere, and with a drafter, a step is either a chunk of prompts or decode, which may have drafts: a chunk beside
single tokens would be padded to a rectangle. The two alternate; several chunks may run in a row if there is time. A
step may be long (`Runtime.tokens_per_long_step`) if no others wait for their next tokens.

A short prompt does not wait behind a long one: every other step of prompts begins with the one that has the fewest
tokens left, and the others with the one that came first, which so has half of the steps at least.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from granite4_neuron.engine.drafting.drafting import Drafting
from granite4_neuron.engine.live_sequences import LiveSequences
from granite4_neuron.engine.prefill_budget import PrefillBudget
from granite4_neuron.engine.prefix.reuse import PrefixReuse
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.slots import Slots
from granite4_neuron.runtime.interface import MOST_STOPS, Row, Runtime
from granite4_neuron.runtime.prompt_cuts import ANYWHERE

# A step costs as much as this many tokens on top of its own, because it reads the weights.
_STEP_TOKENS = 16


class ScheduledStep(NamedTuple):
    """A step of the runtime. Without rows it does nothing.

    sequences, rows: in the same order.
    prompt_rows: how many of the last rows are pieces of prompts; each other row is a sequence's last token, followed by
        drafts.
    all_logits: whether the logits of all tokens are needed, for log-probabilities of a prompt.
    has_drafts: whether a row has drafts to verify.
    """

    sequences: Sequence[RunningSequence]
    rows: Sequence[Row]
    prompt_rows: int = 0
    all_logits: bool = False
    has_drafts: bool = False

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of prompts that it runs."""
        return sum([len(row.tokens) for row in self.rows[len(self.rows) - self.prompt_rows :]])


class Scheduler:
    """Decides what each step runs.

    Args:
        runtime: gives the limits of a step.
        slots: of running sequences, with their memory.
        live: the sequences.
        prefixes: lets prompts begin from cached prefixes.
        drafting: proposes tokens for decode.
        prompts_first: run all prompts before the first decode.
        max_gap, clock: see `PrefillBudget`.
    """

    def __init__(
        self,
        runtime: Runtime,
        slots: Slots,
        live: LiveSequences,
        prefixes: PrefixReuse,
        drafting: Drafting,
        prompts_first: bool,
        max_gap: float | None,
        clock: Callable[[], float],
    ):
        self._runtime = runtime
        self._slots = slots
        self._live = live
        self._prefixes = prefixes
        self._drafting = drafting
        self._prompts_first = prompts_first
        self._prompts_are_next = True
        self._shortest_is_next = False
        self._clock = clock
        self._prefill_budget = PrefillBudget(max_gap, clock)
        self._others_wait = False  # whether sequences wait for their next token while a step of prompts alone runs

    def admit(self) -> None:
        """Give waiting sequences slots, in order: a sequence that does not fit yet holds back those after it."""
        live = self._live
        if self._slots.failed_steps and not live.running:  # a failed step may have lost a device's state
            self._prefixes.detach()
            self._slots.renew()
        while live.waiting:
            sequence = live.waiting[0]
            with live.guard(sequence):
                slot = self._slots.take(sequence.limit, [each.slot for each in live.running.values()])
                if slot is None:
                    return
                sequence.start(slot, self._clock())
                live.running[sequence.id] = sequence
                live.waiting.popleft()
            if sequence.id not in live.running:
                return

    def schedule(self) -> ScheduledStep:
        """Return the next step. A sequence whose whole prompt is cached gets its first token without a step."""
        running = list(self._live.running.values())
        prompts = [sequence for sequence in running if sequence.is_prompt]
        others = [sequence for sequence in running if not sequence.is_prompt] if prompts else running
        chunk = self._runtime.tokens_per_step
        self._others_wait = bool(others)
        if prompts and (self._prompts_first or not others):
            self._prompts_are_next = False
            return self._plan_prefill(prompts, self._runtime.tokens_per_long_step)
        if prompts and self._may_mix(prompts[0]):
            return self._plan_mixed(others, prompts)
        if prompts and (self._prompts_are_next or self._prefill_budget.has_time_for(chunk)):
            self._prompts_are_next = False
            return self._plan_prefill(prompts, self._prefill_budget.prompt_tokens(chunk))
        self._prompts_are_next = True
        return self._plan_decode(others)

    def record(self, step: ScheduledStep, *seconds: float) -> None:
        """Record the time of a step, or of each of several such steps in a row."""
        has_decode = len(step.rows) > step.prompt_rows
        prompt_tokens = step.prompt_tokens
        if step.rows and prompt_tokens <= self._runtime.tokens_per_step:  # a token of a long step takes less time
            for each in seconds:
                self._prefill_budget.record(prompt_tokens, has_decode, each)
        if has_decode or not self._others_wait:
            self._prefill_budget.begin()

    def following(self, step: ScheduledStep) -> ScheduledStep | None:
        """Return the step of decode that may begin before the tokens of `step` are known; None if there is none.

        Its rows run tokens that the device has chosen. Whatever these tokens are, it is the next step, except for
        sequences that one of the tokens ends. Only a prefix cache needs the state of such a sequence, and the device
        leaves that state as it is.

        There is no such step while a running sequence is not in `step`: a prompt, or a sequence whose token the device
        left to the host.
        """
        if self._drafting.drafter is not None or len(step.sequences) < len(self._live.running):
            return None
        if not all(self._may_go_ahead(sequence) for sequence in step.sequences):
            return None
        going_on = [each for each in step.sequences if len(each.tokens) + 1 < each.limit]
        rows = [sequence.following_row(self._runtime.config.vocab_size) for sequence in going_on]
        return ScheduledStep(going_on, rows) if rows else None

    def _may_go_ahead(self, sequence: RunningSequence) -> bool:
        """Return whether a sequence may run its next token before the host knows it."""
        if not sequence.takes_chosen or self._prefixes.is_due(sequence, more=1):
            return False
        if sequence.takes_drawn and not (
            sequence.sampler.may_be_ahead and sequence.backoff.allows(len(sequence.tokens))
        ):
            return False
        request = sequence.request
        # A stop string is found on the host.
        return self._prefixes.cache is None or (not request.stop and len(request.stop_token_ids or ()) <= MOST_STOPS)

    def _may_mix(self, prompt: RunningSequence) -> bool:
        """Return whether a prompt may share a step with other sequences' tokens."""
        # Drafts are verified in steps of their own.
        return self._runtime.packs_rows and self._drafting.drafter is None and not prompt.reports_prompt

    def _plan_mixed(self, others: Sequence[RunningSequence], prompts: Sequence[RunningSequence]) -> ScheduledStep:
        decode = self._plan_decode(others)
        prompts = list(itertools.takewhile(self._may_mix, prompts))
        prefill = self._plan_prefill(prompts, self._prefill_budget.prompt_tokens(self._runtime.tokens_per_step))
        sequences, rows = [*decode.sequences, *prefill.sequences], [*decode.rows, *prefill.rows]
        return ScheduledStep(sequences, rows, prefill.prompt_rows)

    def _plan_prefill(self, prompts: Sequence[RunningSequence], most: int) -> ScheduledStep:
        """Take one chunk of the first prompt in turn, and chunks of other prompts that fit into the step.

        Args:
            most: the most tokens. A runtime that does not pack rows takes at least a whole chunk.
        """
        self._prefixes.add_taken()  # prompts are looked up
        chosen: list[RunningSequence] = []
        rows: list[Row] = []
        begun = [sequence for sequence in prompts if sequence.has_begun]  # which run soon, if not in this step
        for sequence in self._in_turn(prompts):
            # No further token fits. Later sequences wait; they may find more in the prefix cache by then.
            room = self._room(rows, most)
            if len(rows) == self._runtime.rows_per_step or room < 1 or not self._may_share(sequence, chosen):
                break
            if self._prefixes.is_worth_waiting(sequence, [*begun, *chosen]):
                continue
            self._begin(sequence)
            if sequence.id not in self._live.running or not sequence.is_prompt:
                continue
            cut = self._cut(sequence, room, prompts)
            if cut - sequence.stored > room:
                break
            chosen.append(sequence)
            is_kept = self._prefixes.is_due(sequence, more=cut - sequence.stored)
            rows.append(sequence.next_row(cut, is_kept=is_kept))
        all_logits = any(sequence.reports_prompt for sequence in chosen)
        return ScheduledStep(chosen, rows, prompt_rows=len(rows), all_logits=all_logits)

    def _cut(self, sequence: RunningSequence, room: int, prompts: Sequence[RunningSequence]) -> int:
        """Return where a prompt's next row ends, in a step that has room for so many more tokens.

        A long row ends at a multiple of a long step, and skips places at which a prefix cache would keep snapshots. So
        no other prompt may wait for the next of them. The rest of a prompt has shorter rows: a cache with little memory
        finds more if it keeps those places of short prompts.
        """
        cut = sequence.next_cut(self._runtime.tokens_per_step)
        if self._runtime.packs_rows:
            return min(cut, sequence.stored + room)
        long = self._runtime.tokens_per_long_step
        long_cut = sequence.long_cut(long)
        if room < long or long_cut <= cut or sequence.reports_prompt:  # the logits of all its tokens would be large
            return cut
        is_wanted = any(self._prefixes.is_worth_waiting(other, [sequence]) for other in prompts)
        return cut if is_wanted else long_cut

    def _in_turn(self, prompts: Sequence[RunningSequence]) -> Sequence[RunningSequence]:
        """Return prompts in the order in which they may be in a step."""
        self._shortest_is_next = not self._shortest_is_next
        if self._shortest_is_next or self._prompts_first:
            return prompts
        return sorted(prompts, key=self._prefixes.num_left)

    def _room(self, rows: Sequence[Row], most: int) -> int:
        """Return how many tokens another row may have in a step with these rows."""
        if self._runtime.packs_rows:
            return most - sum(len(row.tokens) for row in rows)
        if not rows:
            return max(most, self._runtime.tokens_per_step)
        room = self._runtime.tokens_per_step // (len(rows) + 1)
        return room if all(len(row.tokens) <= room for row in rows) else 0

    def _may_share(self, sequence: RunningSequence, others: Sequence[RunningSequence]) -> bool:
        """Return whether a prompt may be in a step with others. One that needs the logits of all its tokens runs alone,
        because a step would return those of all its rows.
        """
        return not others or not (sequence.reports_prompt or others[0].reports_prompt)

    def _begin(self, sequence: RunningSequence) -> None:
        """Start a prompt from its cached prefix. If the prefix is the whole prompt, choose the first token at once."""
        with self._live.guard(sequence):
            self._prefixes.begin(sequence)
            if sequence.prefix is not None and not sequence.is_prompt:
                logits = sequence.prefix.logits
                self._live.count(sequence, 0, logits, sequence.choose([logits]))

    def _plan_decode(self, sequences: Sequence[RunningSequence]) -> ScheduledStep:
        """Take the last token of each sequence, the forced tokens after it, and drafts."""
        self._take_forced(sequences)
        sequences = [sequence for sequence in sequences if sequence.id in self._live.running]
        drafts = self._drafts(sequences)
        sequences = [sequence for sequence in sequences if sequence.id in self._live.running]
        rows = [sequence.last_row(drafts.get(sequence.id, ())) for sequence in sequences]
        return ScheduledStep(sequences, rows, has_drafts=any(drafts.values()))

    def _take_forced(self, sequences: Sequence[RunningSequence]) -> None:
        """Add tokens to which a constraint leaves no alternative, if steps of several tokens give the same bits."""
        longest, vocab_size = self._runtime.tokens_per_verification, self._runtime.config.vocab_size
        if self._runtime.prompt_cuts != ANYWHERE or longest == 1:
            return
        counts = {}
        for sequence in sequences:
            with self._live.guard(sequence):
                most = sequence.most_forced(longest, self._prefixes.interval)
                counts[sequence.id] = len(sequence.sampler.forced(sequence.tokens, most, vocab_size))
        if not any(counts.values()):
            return
        if not self._runtime.packs_rows or self._drafting.drafter is not None:  # rows are padded
            longest = _longest_row([each.num_unrun + counts.get(each.id, 0) for each in sequences])
        for sequence in sequences:
            if sequence.id in self._live.running:
                with self._live.guard(sequence):
                    sequence.take_forced(min(counts[sequence.id], longest - sequence.num_unrun))
                    if sequence.has_ended and self._prefixes.cache is None:  # nobody needs its state
                        assert sequence.logits is not None  # its prompt has been run
                        self._live.stats.decode_tokens += len(sequence.forced)
                        self._live.count(sequence, 0, sequence.logits, sequence.give_forced())

    def _drafts(self, sequences: Sequence[RunningSequence]) -> dict[int, Sequence[int]]:
        """Return drafts by sequence id, up to the first draft that a sequence's constraint forbids."""
        if self._drafting.drafter is None:
            return {}
        drafts = {}
        proposed = self._drafting.propose(sequences, self._prefixes.interval)
        for sequence, its_drafts in zip(sequences, proposed, strict=False):
            if its_drafts:
                with self._live.guard(sequence):
                    drafts[sequence.id] = sequence.sampler.allowed(its_drafts)
        return drafts


def _longest_row(lengths: Sequence[int]) -> int:
    """Return how many tokens the rows of a padded step may have, so that it runs the most tokens per unit of time.

    Args:
        lengths: how many tokens each row could have.
    """
    time = {longest: _STEP_TOKENS + len(lengths) * longest for longest in lengths}
    return max(
        sorted(time), key=lambda longest: sum(min(length, longest) for length in lengths) / time[longest], default=1
    )
