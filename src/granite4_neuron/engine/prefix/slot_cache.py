"""A prefix cache in slots of the state, for devices whose state cannot be copied to the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch

from granite4_neuron.engine.prefix.cache import SHORTEST_SHARED, PrefixCache, PrefixCacheStats, common_length
from granite4_neuron.engine.prefix.end_cuts import EndCuts
from granite4_neuron.engine.prefix.folder import PrefixFolder
from granite4_neuron.engine.prefix.interface import any_length
from granite4_neuron.engine.slots import sizes_of
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Runtime, require
from granite4_neuron.state.hybrid_state import HybridState


@dataclass(frozen=True, eq=False)
class KeptSlot:
    """A prefix in a slot of its own, as kept or as found by `match_prefix`.

    logits: [vocab_size], float32, after its last token.
    """

    tokens: tuple[int, ...]
    slot: int
    logits: torch.Tensor

    @property
    def length(self) -> int:
        return len(self.tokens)


class SlotPrefixCache:
    """Like `PrefixCache`, but in reserved slots of the state. It only copies slots to slots.

    Each of its few slots holds one prefix: up to the end of a prompt or of a generation, up to where a sequence
    diverges from a kept prefix, or a pinned one. The least recently used is evicted first; pinned ones never are.

    Args:
        runtime: the model that runs the sequences; if it keeps its state itself, prefixes outlive an engine.
        slots: reserved slots of the state, above those of the engine's sequences.
        pinned: prefixes to keep, such as a system message. The first prompt that begins with one is cut there.

    Raises:
        UserError: the runtime cannot copy, or there are not more slots than pinned prefixes.
    """

    interval = None

    def __init__(self, runtime: Runtime, slots: Sequence[int], pinned: Sequence[Sequence[int]] = ()):
        require(runtime, "copy")
        self._pinned = {tuple(tokens) for tokens in pinned}
        if len(slots) <= len(self._pinned):
            raise UserError(
                f"there are {len(slots)} slots for {len(self._pinned)} pinned prefixes; at least one more is needed."
            )
        self.slots = tuple(slots)
        self.changes = 0
        self._stats = PrefixCacheStats()
        self._found: WeakSet[KeptSlot] = WeakSet()
        self._runtime = runtime
        self._end_cuts = EndCuts(runtime.prompt_cuts)
        self._state: HybridState | None = None
        self._forget()

    @property
    def stats(self) -> PrefixCacheStats:
        """Totals and sizes so far."""
        self._stats.in_use = len(self._found)
        self._stats.snapshots = len(self._kept)
        self._stats.num_bytes = sum(kept.logits.nbytes for kept in self._kept.values())
        return self._stats

    def attach(self, state: HybridState | None) -> None:
        """Use this state; forget all prefixes if it is another one than before."""
        if state is not self._state:
            self._forget()
            self._state = state

    def detach(self) -> None:
        """Forget all prefixes, and the state: it may be lost."""
        self._forget()
        self._state = None

    def match_prefix(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> KeptSlot | None:
        """Find the longest cached prefix of a sequence that ends at a cut point; it may be the whole sequence."""
        self._stats.queries += 1
        self._stats.query_tokens += len(tokens)
        longest = self._longest(tokens, is_cut_point)
        if longest is None:
            return None
        self._kept.move_to_end(longest.tokens)
        self._stats.hit_tokens += longest.length
        found = replace(longest)
        self._found.add(found)
        return found

    def cached_length(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> int:
        """Return the length of the prefix that `match_prefix` would find, without counting it as used."""
        longest = self._longest(tokens, is_cut_point)
        return 0 if longest is None else longest.length

    def new_cuts(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> set[int]:
        """Return the lengths up to which to cut a sequence: where it diverges from a kept prefix, if far enough, where
        pinned prefixes end, and before its end (`EndCuts`).
        """
        found = self.cached_length(tokens, is_cut_point)
        common = [(kept.length, common_length(tokens, kept.tokens)) for kept in self._kept.values()]
        shared = max((its_common for _, its_common in common), default=0)
        pinned = {len(prefix) for prefix in self._pinned if _begins_with(tokens, prefix)}
        branches = {shared} if shared - found >= SHORTEST_SHARED else set()
        ends = [length for length, its_common in common if its_common == shared]
        return branches | {length for length in pinned if length > found} | self._end_cuts.of(len(tokens), shared, ends)

    def restore(self, prefix: KeptSlot, state: HybridState | None, slot: int) -> None:
        """Copy a prefix into a slot; the original stays in its own slot."""
        self._runtime.copy(state, prefix.slot, slot, prefix.length)

    def release(self, prefix: KeptSlot) -> None:
        """Record that a sequence that started from a copy of this prefix has ended."""
        self._found.discard(prefix)

    def insert(self, tokens: Sequence[int], state: HybridState | None, slot: int, logits: torch.Tensor) -> None:
        """Keep a copy of a slot, unless these tokens are already kept.

        Args:
            tokens: all tokens that the slot has seen.
            logits: [vocab_size], float32, after the last of them.
        """
        self.attach(state)
        tokens = tuple(tokens)
        if tokens in self._kept:
            self._kept.move_to_end(tokens)
            return
        self.changes += 1
        if len(self._kept) == len(self.slots):
            self._evict()
        taken = {kept.slot for kept in self._kept.values()}
        free = max(each for each in self.slots if each not in taken)
        self._runtime.copy(state, slot, free, len(tokens))
        self._kept[tokens] = KeptSlot(tokens, free, logits.clone())

    def make_ready(self) -> None:
        """Do nothing: the slots are already allocated."""

    def _longest(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> KeptSlot | None:
        """Return the longest kept prefix of a sequence that ends at a cut point."""
        prefixes = [
            kept for kept in self._kept.values() if is_cut_point(kept.length) and _begins_with(tokens, kept.tokens)
        ]
        return max(prefixes, key=lambda kept: kept.length, default=None)

    def _evict(self) -> None:
        # If a prompt may not be cut at a pinned prefix's end, its longest kept beginning is pinned instead.
        pinned = [self._longest(prefix) for prefix in self._pinned]
        oldest = next(kept for kept in self._kept.values() if kept not in pinned)
        del self._kept[oldest.tokens]
        self._stats.evictions += 1

    def _forget(self) -> None:
        self.changes += 1
        self._kept: OrderedDict[tuple[int, ...], KeptSlot] = OrderedDict()  # least recently used first


def spare_slots(runtime: Runtime, num_sequences: int, max_bytes: int) -> range:
    """Return the slots for a `SlotPrefixCache` of a runtime that keeps its own state: those above `num_sequences`, as
    many as fit into `max_bytes`.

    Raises:
        UserError: there are none.
    """
    require(runtime, "copy")
    state, token = sizes_of(runtime)
    slot_bytes = state + runtime.max_length * token
    if runtime.own_slots <= num_sequences:
        raise UserError(
            f"the model is compiled for {runtime.own_slots} sequences, and {num_sequences} run at a time; for a prefix "
            "cache compile it with a larger --batch-size."
        )
    if slot_bytes > max_bytes:
        raise UserError(f"a slot of the compiled model takes {slot_bytes:,} bytes; the prefix cache has {max_bytes:,}.")
    last = min(runtime.own_slots, num_sequences + max_bytes // slot_bytes)
    return range(num_sequences + 1, last + 1)


def prefix_cache_of(
    runtime: Runtime,
    max_bytes: int,
    num_sequences: int,
    at_branches: bool = False,
    folder: PrefixFolder | None = None,
) -> PrefixCache | SlotPrefixCache:
    """Return a `PrefixCache`, or a `SlotPrefixCache` for a runtime that keeps its state itself.

    Raises:
        UserError: there is no such slot, or none that fits.
    """
    if runtime.own_slots:
        return SlotPrefixCache(runtime, spare_slots(runtime, num_sequences, max_bytes))
    return PrefixCache(runtime, max_bytes, runtime.tokens_per_step, at_branches=at_branches, folder=folder)


def _begins_with(tokens: Sequence[int], prefix: Sequence[int]) -> bool:
    return tuple(tokens[: len(prefix)]) == tuple(prefix)
