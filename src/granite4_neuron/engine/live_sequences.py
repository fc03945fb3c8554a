"""The sequences of an engine that have not ended, and what ends them."""

from __future__ import annotations

import bisect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from granite4_neuron.engine.drafting.drafting import Drafting
from granite4_neuron.engine.prefix.reuse import PrefixReuse
from granite4_neuron.engine.request import GenerationStats, Output
from granite4_neuron.engine.sampling import RequestFault
from granite4_neuron.engine.sequence import LogitsOnDevice, RunningSequence
from granite4_neuron.errors import UserError, sentence_of

# Consecutive failures after which the device counts as lost.
MOST_FAILED_STEPS = 3

_LOGGER = logging.getLogger(__name__)


class LiveSequences:
    """The sequences that wait or run, and their outputs. Only this class decides what a failure ends.

    All work for sequences runs within `guard`: if it fails, these sequences end with an error output, and no others.
    Work counts for a sequence when `count` has added its outputs. An interrupt leaves a guard unfinished; then
    `end_unfinished` ends the sequences whose work does not count.

    waiting: by priority, and within a priority in order of arrival.
    running: by id, in the order of their starts; each has a slot.
    ended: sequences of which a prefix cache will keep a snapshot before the next step; their slots are not free until
        then.
    outputs: those that count and that no step has returned yet.

    Args:
        prefixes, drafting: are told which sequences have ended.
        stats: counts the tokens.
    """

    def __init__(self, prefixes: PrefixReuse, drafting: Drafting, stats: GenerationStats):
        self.waiting: deque[RunningSequence] = deque()
        self.running: dict[int, RunningSequence] = {}
        self.ended: list[RunningSequence] = []
        self.outputs: list[Output] = []
        self.stats = stats
        self._prefixes = prefixes
        self._drafting = drafting
        self._unfinished: dict[int, RunningSequence] = {}  # by id, those whose work does not count yet
        self._failed_ahead: dict[int, Callable[[], None]] = {}  # by id, the function that ends the sequence

    def add(self, sequence: RunningSequence) -> None:
        """Queue a new sequence."""
        bisect.insort(self.waiting, sequence, key=lambda each: each.request.priority)

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs, or has outputs that no step has returned yet."""
        return bool(self.waiting or self.running or self.outputs)

    def guard(self, *sequences: RunningSequence) -> _Guard:
        """Return a context for work for these sequences. If the work fails, those that have not ended yet end."""
        return _Guard(self._unfinished, self.fail, sequences)

    def guard_ahead(self, *sequences: RunningSequence) -> _Guard:
        """Return a context for work whose outputs come after those that the sequences are about to get. If the work
        fails, the next call ends the sequences. No snapshot is kept of a sequence that ends before that, because its
        state may be lost.
        """
        return _Guard(self._unfinished, self._fail_later, sequences)

    def count(
        self,
        sequence: RunningSequence,
        num_tokens: int,
        logits: torch.Tensor | LogitsOnDevice,
        outputs: Sequence[Output],
    ) -> None:
        """Make a step count for a sequence: its state has seen `num_tokens` more tokens, and these are its outputs.
        Only note whether a snapshot is due: the outputs of other sequences do not wait for the copy.

        Args:
            logits: [vocab_size], after the last of those tokens.
        """
        sequence.stored += num_tokens
        sequence.logits = logits
        self.outputs += outputs
        self.stats.generated_tokens += sum(output.error is None for output in outputs)
        reason = outputs[-1].finish_reason if outputs else None
        if reason is None:
            sequence.is_due = self._prefixes.is_due(sequence)
        else:
            if reason != "error" and sequence.id not in self._failed_ahead:
                sequence.is_due = True
                self.ended.append(sequence)
            self.end(sequence)
        self._unfinished.pop(sequence.id, None)

    def keep_due(self) -> None:
        """Keep the snapshots that are due since the last step. An interrupted call may be repeated."""
        self._prefixes.keep_due(self.ended, self.running.values())
        for sequence in self.ended:
            self._prefixes.release(sequence)
        self.ended.clear()

    def end_unfinished(self) -> None:
        """End the sequences of an interrupted step that does not count, and those whose next step could not be
        launched.
        """
        for fail in list(self._failed_ahead.values()):
            fail()
        self.fail(list(self._unfinished.values()), "it was interrupted in the middle of a step.")

    def fail(self, sequences: Sequence[RunningSequence], error: str, is_requests_fault: bool = False) -> None:
        """End sequences, with an error output unless an output has ended them. An interrupted call may be repeated."""
        ended = {output.id for output in self.outputs if output.finish_reason is not None}
        for sequence in sequences:
            if sequence.id in self.running or sequence in self.waiting:
                if sequence.id not in ended:
                    self.outputs.append(Output(sequence.id, None, "", "error", error, is_requests_fault))
                self.end(sequence)
            self._unfinished.pop(sequence.id, None)

    def _fail_later(self, sequences: Sequence[RunningSequence], error: str, is_requests_fault: bool = False) -> None:
        for sequence in sequences:
            self._failed_ahead[sequence.id] = partial(self.fail, [sequence], error, is_requests_fault)

    def end(self, sequence: RunningSequence) -> None:
        """Forget a sequence. An interrupted call may be repeated."""
        if sequence not in self.ended:
            self._prefixes.release(sequence)
        self._drafting.end(sequence)
        if sequence.id not in self.running or (self.waiting and self.waiting[0] is sequence):
            self.waiting.remove(sequence)
        self.running.pop(sequence.id, None)
        self._failed_ahead.pop(sequence.id, None)
        if not self.running and not self.waiting:  # perhaps no step follows
            self.keep_due()

    def cancel(self, id: int) -> bool:
        """End a sequence and drop its outputs; return whether it was there or had outputs."""
        found = [self.running[id]] if id in self.running else [each for each in self.waiting if each.id == id]
        for sequence in found:
            self.end(sequence)
        outputs = [output for output in self.outputs if output.id == id]
        if outputs:
            self.outputs = [output for output in self.outputs if output.id != id]
        return bool(found or outputs)


class _Guard:
    """See `LiveSequences.guard`. A class, because entering a generator for each token would be slower.

    Args:
        unfinished: by id, the sequences whose work does not count yet.
        fail: called with the sequences that have not ended, an error, and whether a request caused it.
    """

    def __init__(
        self,
        unfinished: dict[int, RunningSequence],
        fail: Callable[[Sequence[RunningSequence], str, bool], None],
        sequences: Sequence[RunningSequence],
    ):
        self._unfinished = unfinished
        self._fail = fail
        self._sequences = sequences

    def __enter__(self) -> None:
        unfinished = self._unfinished
        self._new = [sequence.id for sequence in self._sequences if sequence.id not in unfinished]
        for sequence in self._sequences:
            unfinished[sequence.id] = sequence

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            if not isinstance(error, Exception):  # an interrupt: the next call ends what is unfinished
                return False
            if not isinstance(error, UserError):
                _LOGGER.error("A step of the engine failed.", exc_info=error)
            failed = [sequence for sequence in self._sequences if sequence.id in self._unfinished]
            self._fail(failed, sentence_of(error), isinstance(error, RequestFault))
        for id in self._new:
            self._unfinished.pop(id, None)
        return True
