"""Connects the sequences of an engine with its prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from granite4_neuron.engine.best_effort import BestEffort
from granite4_neuron.engine.prefix.cache import PrefixCache
from granite4_neuron.engine.prefix.interface import AnyPrefixCache
from granite4_neuron.engine.request import GenerationStats
from granite4_neuron.engine.sampling import are_finite
from granite4_neuron.engine.sequence import LogitsOnDevice, RunningSequence
from granite4_neuron.engine.slots import Slots
from granite4_neuron.runtime.interface import Runtime


class PrefixReuse:
    """Lets sequences begin from cached prefixes, and keeps snapshots of them for later ones. If the cache
    fails, they continue without it.

    Args:
        cache: None for no reuse.
        runtime: cuts the prompts.
        slots: with the state of the sequences.
        stats: counts the tokens found.
    """

    def __init__(self, cache: AnyPrefixCache | None, runtime: Runtime, slots: Slots, stats: GenerationStats):
        self.cache = cache
        self._runtime = runtime
        self._slots = slots
        self._stats = stats
        self._best_effort = BestEffort("The prefix cache")
        self._adds_later: PrefixCache | None = None
        if isinstance(cache, PrefixCache) and runtime.begins_snapshots:
            self._adds_later = cache
        self._taken: list[tuple[torch.Tensor, Callable[[], None]]] = []  # logits, and what `PrefixCache.take` returns

    @property
    def interval(self) -> int | None:
        """Snapshots of answers are kept at multiples of it; None for none."""
        keeps_answers = self._runtime.prompt_cuts.keeps_answers
        return self.cache.interval if self.cache is not None and keeps_answers else None

    def is_worth_waiting(self, sequence: RunningSequence, others: Sequence[RunningSequence]) -> bool:
        """Return whether one of the others, which run in this step, will add a shared prefix to the cache."""
        if self.cache is None or sequence.has_begun:
            return False
        interval, chunk = self.cache.interval, self._runtime.tokens_per_step
        # A prompt whose log-probabilities are asked for may leave no snapshot at all.
        keeping = (other for other in others if other.is_as_prompt(len(other.request.tokens)))
        kept = ((other, other.next_kept(interval, chunk)) for other in keeping)
        return any(
            sequence.is_cut_point(length) and sequence.keys[:length] == other.keys[:length] for other, length in kept
        )

    def num_left(self, sequence: RunningSequence) -> int:
        """Return how many tokens of a prompt are neither stored nor, if it has not begun, in the cache. It is cheap
        while the cache does not change.
        """
        stored = sequence.stored
        if self.cache is not None and not sequence.has_begun:
            with self._best_effort:
                if sequence.length_at[1] != self.cache.changes:
                    found = self.cache.cached_length(sequence.keys, sequence.is_cut_point)
                    sequence.length_at = found, self.cache.changes
            stored = sequence.length_at[0]
        return len(sequence.request.tokens) - stored

    def begin(self, sequence: RunningSequence) -> None:
        """Start a prompt from its longest cached prefix, which may be the whole prompt."""
        if self.cache is None or sequence.has_begun:
            return
        sequence.has_begun = True
        with self._best_effort:
            self.cache.attach(self._slots.state)
            sequence.prefix = self.cache.match_prefix(sequence.keys, sequence.is_cut_point)
            sequence.cut_at(self.cache.new_cuts(sequence.keys, sequence.is_cut_point))
            if sequence.prefix is not None:
                self.cache.restore(sequence.prefix, self._slots.state, sequence.slot)
                sequence.stored = sequence.cached_tokens = sequence.prefix.length
                self._stats.cached_tokens += sequence.stored

    def is_due(self, sequence: RunningSequence, more: int = 0) -> bool:
        """Return whether a snapshot of a sequence is due when its state has seen `more` more tokens than now."""
        return self.cache is not None and sequence.is_kept(self.cache.interval, more)

    def keep_due(self, ended: Iterable[RunningSequence], running: Iterable[RunningSequence]) -> None:
        """Keep the snapshots that are due since the last step. If steps begin snapshots, those of running sequences are
        only taken here, because the device waits; `add_taken` does the rest.
        """
        self.add_taken()
        for sequence in ended:
            if sequence.is_due:
                sequence.is_due = False
                self.keep(sequence)
        for sequence in running:
            if sequence.is_due:
                sequence.is_due = False
                if self._adds_later is not None and isinstance(sequence.logits, torch.Tensor):
                    self._take(self._adds_later, sequence, sequence.logits)
                else:
                    self.keep(sequence)

    def keep(self, sequence: RunningSequence) -> None:
        """Keep a snapshot of a sequence that has run tokens, if its logits are finite."""
        if self.cache is None or sequence.logits is None or not sequence.is_as_prompt(sequence.stored):
            return
        with self._best_effort:
            if isinstance(sequence.logits, LogitsOnDevice):
                sequence.logits = sequence.logits.read()
            if not are_finite(sequence.logits):
                return
            keys = sequence.keys[: sequence.stored]
            self.cache.insert(keys, self._slots.state, sequence.slot, sequence.logits)
            if not sequence.is_prompt:
                self.cache.make_ready()

    def _take(self, cache: PrefixCache, sequence: RunningSequence, logits: torch.Tensor) -> None:
        with self._best_effort:
            keys = sequence.keys[: sequence.stored]
            try:
                add = cache.take(keys, self._slots.state, sequence.slot, logits)
            except (MemoryError, torch.OutOfMemoryError):  # `insert` makes room first
                return self.keep(sequence)
            if add is not None:
                self._taken.append((logits, add))

    def add_taken(self) -> None:
        """Add to the cache what `keep_due` has taken, if its logits are finite. Call it before all look-ups."""
        while self._taken:
            logits, add = self._taken.pop(0)
            with self._best_effort:
                if are_finite(logits):
                    add()

    def release(self, sequence: RunningSequence) -> None:
        """Release the prefix from which a sequence started."""
        if self.cache is not None and sequence.prefix is not None:
            with self._best_effort:
                self.cache.release(sequence.prefix)

    def detach(self) -> None:
        """Make the cache forget everything that belongs to the state, which may be lost."""
        if self.cache is not None:
            self.cache.detach()
