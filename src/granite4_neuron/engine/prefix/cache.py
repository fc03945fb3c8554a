"""A prefix cache in memory: a radix tree over tokens.

A sequence can continue only from a length at which its recurrent state was kept. So an entry is a snapshot at one exact
length: the recurrent state, and the keys and values of all tokens up to there. Entries with a common prefix share its
keys and values, because each node of the tree holds those between its parent's length and its own. A node where
sequences diverge may have no recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakSet

import torch

from granite4_neuron.engine.prefix.end_cuts import EndCuts
from granite4_neuron.engine.prefix.folder import PrefixFolder
from granite4_neuron.engine.prefix.interface import any_length
from granite4_neuron.engine.prefix.tree import Entries, Entry, Node
from granite4_neuron.engine.slots import sizes_of
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Runtime, require
from granite4_neuron.state.hybrid_state import HybridState, copy_of
from granite4_neuron.state.snapshot import (
    LOGITS,
    Snapshot,
    keys_and_values,
    padded_keys_and_values,
    recurrent_state,
)

SHORTEST_SHARED = 16  # tokens: a shorter common prefix is not worth a step and a snapshot


@dataclass
class PrefixCacheStats:
    """queries, query_tokens, hit_tokens: look-ups, their tokens, and the tokens found.
    folder_hit_tokens: of the tokens found, those that only files had.
    snapshots, num_bytes: entries in the cache, and the bytes of all nodes.
    in_use: running sequences that started from an entry.
    evictions: entries evicted so far.
    """

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    folder_hit_tokens: int = 0
    snapshots: int = 0
    in_use: int = 0
    num_bytes: int = 0
    evictions: int = 0


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prefix found in the cache. It is not evicted until it is released or garbage-collected.

    snapshots: of its `length` tokens, for `Runtime.restore`.
    logits: [vocab_size], float32, after the last of them.
    """

    length: int
    snapshots: Sequence[Snapshot]
    logits: torch.Tensor
    node: Node


class PrefixCache:
    """Snapshots of sequences by their tokens, in the memory where the runtime makes them: a GPU's, or the host's. Those
    worth least are evicted first (`Entries`).

    If keeping a snapshot fails or is interrupted, the cache forgets everything, because its tree may be inconsistent.

    slots: the slots of the state that it reserves; none.

    Args:
        runtime: the model that runs the sequences.
        max_bytes: limit of its memory in bytes; None for no limit.
        interval: keep a snapshot of each sequence where a step ends at a multiple of this many tokens, and at the ends
            of its prompt and of its continuation. It must be a multiple of the runtime's `tokens_per_step`, because no
            step of a prompt ends at other multiples. None for the ends only.
        at_branches: also keep a snapshot where a prompt diverges from an earlier sequence, for later ones with the same
            beginning. The prompt is cut there.
        folder: keeps snapshots in files too, and is searched for snapshots longer than those in memory; None for none.

    Raises:
        UserError: the runtime cannot make snapshots, or the interval is not such a multiple.
    """

    slots: Sequence[int] = ()

    def __init__(
        self,
        runtime: Runtime,
        max_bytes: int | None,
        interval: int | None,
        *,
        at_branches: bool = False,
        folder: PrefixFolder | None = None,
    ):
        require(runtime, "snapshot")
        if interval is not None and (interval < 1 or interval % runtime.tokens_per_step):
            raise UserError(
                f"snapshots every {interval} tokens are asked for; it must be a multiple of "
                f"{runtime.tokens_per_step}, at which long prompts are cut."
            )
        self.max_bytes = max_bytes
        self.interval = interval
        self.at_branches = at_branches
        self.changes = 0
        self._stats = PrefixCacheStats()
        self._runtime = runtime
        self._folder = folder
        self._end_cuts = EndCuts(runtime.prompt_cuts)
        self._found: WeakSet[Prefix] = WeakSet()
        self._state_bytes, self._token_bytes = sizes_of(runtime)
        self._forget()

    @property
    def stats(self) -> PrefixCacheStats:
        """Totals and sizes so far."""
        self._stats.in_use = len(self._found)
        return self._stats

    @property
    def folder_bytes(self) -> int | None:
        """The bytes of the files in its folder; None without one."""
        return None if self._folder is None else self._folder.num_bytes

    def match_prefix(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> Prefix | None:
        """Find the longest cached prefix of a sequence that ends at a cut point; it may be the whole sequence."""
        self._check_tree()
        self._stats.queries += 1
        self._stats.query_tokens += len(tokens)
        node = self._longest(tokens, is_cut_point)
        if self._folder is not None:
            found = self._folder.find(tokens, node.length + SHORTEST_SHARED, is_cut_point)
            if found is not None:
                self._load(found)
                before, node = node.length, self._longest(tokens, is_cut_point)
                self._stats.folder_hit_tokens += node.length - before
        self._entries.record_match(node if node.length else None)
        if node.entry is None:
            return None
        prefix = Prefix(node.length, self._snapshots(node, node.entry), node.entry.logits, node)
        self._found.add(prefix)
        self._write(node, tokens)
        self._stats.hit_tokens += node.length
        return prefix

    def cached_length(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> int:
        """Return the length of the prefix in memory that `match_prefix` would find, without counting it as used."""
        self._check_tree()
        return self._longest(tokens, is_cut_point).length

    def new_cuts(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> set[int]:
        """Return the length at which a sequence diverges from an earlier one, if it is far enough after the last
        snapshot, and where it is cut before its end (`EndCuts`).
        """
        node, child, shared = self._descend(tokens)
        shared += node.length
        ends = [each.length for each in (node.entry_above, child) if each is not None and each.entry is not None]
        cuts = self._end_cuts.of(len(tokens), shared, ends)
        if self.at_branches and shared - _entry_at(node, is_cut_point).length >= SHORTEST_SHARED:
            cuts.add(shared)
        return cuts

    def release(self, prefix: Prefix) -> None:
        """Record that a sequence that started from this prefix has ended."""
        self._found.discard(prefix)

    def attach(self, state: HybridState | None) -> None:
        """Do nothing: snapshots do not depend on the state."""

    def detach(self) -> None:
        """Do nothing: snapshots do not depend on the state."""

    def restore(self, prefix: Prefix, state: HybridState | None, slot: int) -> None:
        """Copy a prefix into a slot."""
        self._runtime.restore(state, prefix.snapshots, slot)

    def insert(self, tokens: Sequence[int], state: HybridState | None, slot: int, logits: torch.Tensor) -> None:
        """Keep a snapshot of a sequence, unless it is already there or there is no room.

        Args:
            tokens: all tokens that the slot has seen.
            logits: [vocab_size], float32, after the last of them.
        """
        self._keep(tokens, partial(self._runtime.snapshot, state, slot, len(tokens)), logits)

    def take(
        self, tokens: Sequence[int], state: HybridState | None, slot: int, logits: torch.Tensor
    ) -> Callable[[], None] | None:
        """Do the part of `insert` that needs the slot. Return a function that does the rest; None if there is none.

        So a device need not wait for the rest. Unlike `insert`, this makes the snapshot before it evicts others.
        """
        self._check_tree()
        node, _, shared = self._descend(tokens)
        if node.length == len(tokens) and node.entry is not None:
            self._entries.touch(node)
            return None
        snapshot = self._runtime.snapshot(state, slot, len(tokens), node.length + shared)
        return partial(self._add_taken, tokens, snapshot, logits)

    def _add_taken(self, tokens: Sequence[int], snapshot: Snapshot, logits: torch.Tensor) -> None:
        self._check_tree()
        node, _, shared = self._descend(tokens)
        if node.length + shared >= snapshot.start:  # nothing before it has been evicted
            self._keep(tokens, snapshot.starting_at, logits)

    def make_ready(self) -> None:
        """Preallocate memory for the next snapshot while there is room, because the first token of a prompt may wait
        for that snapshot. Once the cache is full, a snapshot gets the memory of an evicted one.
        """
        self._runtime.prepare_snapshot(self._has_room_for_state)

    def _write(self, node: Node, tokens: Sequence[int]) -> None:
        """Write the entry of a node, if it has one, to the folder too; the sequence begins with the node's tokens."""
        if self._folder is not None and node.entry is not None:
            snapshots = self._snapshots(node, node.entry)
            self._folder.keep(tuple(tokens[: node.length]), snapshots, node.entry.logits)

    def _keep(self, tokens: Sequence[int], take: Callable[[int], Snapshot], logits: torch.Tensor) -> None:
        """Insert a snapshot, and write it to the folder too."""
        self._insert(tokens, take, logits)
        if self._folder is not None:
            self._write(self._longest(tokens), tokens)

    def _insert(self, tokens: Sequence[int], take: Callable[[int], Snapshot], logits: torch.Tensor) -> None:
        """Keep a snapshot in memory; `take(start)` makes it, with the keys and values from `start` on."""
        self._check_tree()
        self._is_changing = True
        self._change(tokens, take, logits)
        self._is_changing = False

    def _change(self, tokens: Sequence[int], take: Callable[[int], Snapshot], logits: torch.Tensor) -> None:
        node, child, shared = self._descend(tokens)
        if node.length == len(tokens) and node.entry is not None:
            self._entries.touch(node)
            return
        covered = node.length + shared
        needed = self._num_bytes(len(tokens) - covered) + logits.nbytes
        if not self._has_room(needed, child or node):
            return
        self.changes += 1
        if child is not None:
            node = node.split(child, shared)
        if covered < len(tokens):
            # Before making room, which depends on it: the new entry replaces the one that it continues.
            self._entries.record_continuation(node)
        self._make_room(needed, node)
        self._add(node, tuple(tokens[covered:]), take(covered), logits)

    def load(self, snapshot: Snapshot) -> None:
        """Add a snapshot from `export`.

        Raises:
            UserError: it belongs to another model, is incomplete, or was not made by `export`.
        """
        snapshot.check(self._runtime)
        if len(snapshot.tokens) != snapshot.length or snapshot.start or LOGITS not in snapshot.tensors:
            raise UserError("the snapshot was not made from a prefix cache, with tokens and logits; make it again.")
        self._load(snapshot)

    def _load(self, snapshot: Snapshot) -> None:
        tensors = dict(snapshot.tensors)
        logits = tensors.pop(LOGITS)
        self._insert(snapshot.tokens, replace(snapshot, tensors=tensors).starting_at, logits)
        if not self._has_room_for_state:  # the snapshot came with memory of its own
            self._runtime.prepare_snapshot(False)

    def export(self, tokens: Sequence[int]) -> Snapshot | None:
        """Return the entry for exactly these tokens as one snapshot with tokens and logits; None if there is none."""
        self._check_tree()
        node, _, _ = self._descend(tokens)
        if node.length != len(tokens) or node.entry is None:
            return None
        snapshots = self._snapshots(node, node.entry)
        tensors = {**padded_keys_and_values(snapshots, node.length), LOGITS: node.entry.logits}
        return replace(snapshots[-1], start=0, tensors=tensors, tokens=tuple(tokens))

    def export_beginning(self, tokens: Sequence[int]) -> Snapshot | None:
        """Export the longest prefix from which a longer prompt can continue, or the longest prefix if there is none;
        None if the cache has no prefix of these tokens.
        """
        cuts, length = self._runtime.prompt_cuts, len(tokens) + 1
        node = self._longest(tokens, lambda place: cuts.last(place, length) == place)
        return self.export(tokens[: (node if node.length else self._longest(tokens)).length])

    def _check_tree(self) -> None:
        """Forget everything if an earlier change was not completed."""
        if self._is_changing:
            self._forget()

    def _forget(self) -> None:
        self.changes += 1
        self._root = Node(None, 0)
        self._entries = Entries()
        self._stats.snapshots = self._stats.num_bytes = 0
        self._is_changing = False

    def _longest(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> Node:
        """Return the longest entry that is a prefix of a sequence and ends at a cut point, or the root."""
        return _entry_at(self._descend(tokens)[0], is_cut_point)

    def _descend(self, tokens: Sequence[int]) -> tuple[Node, Node | None, int]:
        """Return the last node whose tokens all match; its child that matches in part, if there is one; and how many of
        the child's tokens match.
        """
        node = self._root
        while node.length < len(tokens):
            child = node.children.get(tokens[node.length])
            if child is None:
                break
            ahead = tuple(tokens[node.length : child.length])
            if ahead != child.tokens:
                return node, child, common_length(ahead, child.tokens)
            node = child
        return node, None, 0

    def _snapshots(self, node: Node, entry: Entry) -> list[Snapshot]:
        """Return the snapshots of the nodes down to this one; `entry` is its entry."""
        dtype, fingerprint = self._runtime.dtype, self._runtime.fingerprint
        *above, last = node.path
        before = [Snapshot(each.start, each.length, each.keys_and_values, dtype, fingerprint) for each in above]
        tensors = {**entry.recurrent, **last.keys_and_values}
        return [*before, Snapshot(last.start, last.length, tensors, dtype, fingerprint)]

    def _add(self, node: Node, tokens: tuple[int, ...], snapshot: Snapshot, logits: torch.Tensor) -> None:
        if tokens:
            parent = node
            node = Node(parent, parent.length + len(tokens), tokens, keys_and_values(snapshot.tensors))
            parent.children[tokens[0]] = node
            if len(parent.children) <= 2:
                parent.note_change()
            self._stats.num_bytes += node.tokens_bytes
        recurrent = recurrent_state(snapshot.tensors)
        num_bytes = logits.nbytes + sum(tensor.nbytes for tensor in recurrent.values())
        node.entry = Entry(recurrent, copy_of(logits), num_bytes)
        node.note_change()
        self._stats.num_bytes += num_bytes
        self._stats.snapshots += 1
        self._entries.touch(node)

    @property
    def _has_room_for_state(self) -> bool:
        return self.max_bytes is None or self._stats.num_bytes + self._num_bytes(0) <= self.max_bytes

    def _has_room(self, needed: int, neighbour: Node) -> bool:
        """Return whether there is room for a new entry, or eviction can make room. The keys and values up to its
        neighbour stay.
        """
        if self.max_bytes is None or self._stats.num_bytes + needed <= self.max_bytes:
            return True
        unused = self._stats.snapshots - len(self._found)  # at least
        if self._stats.num_bytes + needed - unused * self._state_bytes <= self.max_bytes:
            return True
        return self._bytes_in_use(neighbour) + needed <= self.max_bytes

    def _make_room(self, needed: int, neighbour: Node) -> None:
        """Evict the entries worth least until there is room."""
        if self.max_bytes is None or self._stats.num_bytes + needed <= self.max_bytes:
            return
        used = self._used
        while self._stats.num_bytes + needed > self.max_bytes:
            self._evict(self._entries.victim(used), neighbour)

    @property
    def _used(self) -> set[Node]:
        """The nodes from whose entries running sequences started; these are not evicted."""
        return {prefix.node for prefix in self._found}

    def _bytes_in_use(self, neighbour: Node) -> int:
        """Return the bytes that cannot be evicted: entries with users, and the keys and values of their prefixes."""
        # Start from the few prefixes in use, not from the many entries. A forgotten tree's node is no entry.
        used = [node for node in self._used if node in self._entries]
        nodes = {node for each in (*used, neighbour) for node in each.path}
        return sum(node.entry_bytes for node in used) + sum(node.tokens_bytes for node in nodes)

    def _evict(self, node: Node, neighbour: Node) -> None:
        self._stats.num_bytes -= node.entry_bytes
        self._stats.snapshots -= 1
        self._stats.evictions += 1
        self._entries.remove(node)
        node.entry = None
        node.note_change()
        self._prune(node, neighbour)

    def _prune(self, node: Node, neighbour: Node | None = None) -> None:
        """Remove a node that nothing needs, and then parents that are not needed either, up to the neighbour."""
        while node is not neighbour and node.parent is not None and node.entry is None and not node.children:
            self._stats.num_bytes -= node.tokens_bytes
            del node.parent.children[node.tokens[0]]
            node = node.parent
            if len(node.children) <= 1:
                node.note_change()

    def _num_bytes(self, tokens: int) -> int:
        """Return the bytes of an entry with the keys and values of this many tokens."""
        return self._state_bytes + tokens * self._token_bytes


def _entry_at(node: Node, is_cut_point: Callable[[int], bool]) -> Node:
    """Return the node, or the nearest above it, that is an entry and ends at a cut point; the root if there is none."""
    node = node.entry_above
    while node.parent is not None and not is_cut_point(node.length):
        node = node.parent.entry_above
    return node


def common_length(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    least, most = 0, min(len(some), len(others))
    while least < most:  # comparing tuples is much faster than comparing token by token
        middle = (least + most + 1) // 2
        if tuple(some[least:middle]) == tuple(others[least:middle]):
            least = middle
        else:
            most = middle - 1
    return least
