"""The nodes of a prefix cache's tree, and which of its entries is worth least."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

_KINDS = 3
_MOST_COMPARED = 100  # entries of a kind: looking for the one to evict must not take longer the more there are


@dataclass(eq=False)
class Node:
    """The tokens between its parent's length and its own, with their keys and values.

    recurrent, logits: the state and the logits [vocab_size] after its last token; both None if there is no entry, or it
        was evicted.
    entry_bytes: the bytes of these two.
    continuations: how many sequences have gone on from it so far, each with another token or yet without one.
    users: what `PrefixCache.find` has returned of it and somebody holds; it is not evicted while there are any.
    last_use: the number of look-ups when it was kept or found last.
    """

    parent: Node | None
    length: int
    tokens: tuple[int, ...] = ()
    keys_and_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    recurrent: Mapping[str, torch.Tensor] | None = None
    logits: torch.Tensor | None = None
    entry_bytes: int = 0
    children: dict[int, Node] = field(default_factory=dict)  # by their first token
    continuations: int = 0
    users: WeakSet = field(default_factory=WeakSet)
    last_use: int = 0

    @property
    def start(self) -> int:
        return self.length - len(self.tokens)

    @property
    def path(self) -> list[Node]:
        """From the first node below the root to this one."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def kind(self) -> int:
        """What its place in the tree says about its use: 0 for the end of a sequence, 1 for a place that one sequence
        went on from (a longer entry has mostly taken its place), 2 for one where sequences diverged.
        """
        return min(self.continuations, _KINDS - 1)

    @property
    def entry_above(self) -> Node:
        """The node itself or the nearest above it that is an entry; the root if there is none."""
        node = self
        while node.recurrent is None and node.parent is not None:
            node = node.parent
        return node

    @property
    def tokens_bytes(self) -> int:
        """The bytes of its keys and values."""
        return sum(tensor.nbytes for tensor in self.keys_and_values.values())

    @property
    def saved_tokens(self) -> int:
        """How many tokens fewer are run if a prompt finds this entry rather than the nearest above it that will last:
        one where sequences diverged.
        """
        node = self.parent
        while node.parent is not None and (node.recurrent is None or node.kind < _KINDS - 1):
            node = node.parent
        return self.length - node.length

    @property
    def freed_bytes(self) -> int:
        """The bytes that are free once this entry is evicted."""
        freed, node = self.entry_bytes, self
        while not node.children or (node is not self and node.recurrent is None and len(node.children) == 1):
            freed += node.tokens_bytes
            node = node.parent
            if node.parent is None:
                break
        return freed


class Entries:
    """The entries of a prefix cache, and which of them is evicted first: the one worth least.

    What an entry is worth is how often those of its kind have been found, times the tokens that it saves per byte, over
    the square root of the look-ups since its last use. So in conversations the ends of earlier turns make room first,
    and where prompts share examples or a system message, the ends of sequences that nothing continues.

    To weigh what a state saves per byte is from Marconi (Pan et al., MLSys 2025), to divide by age from hyperbolic
    caching (Blankstein et al., ATC 2017). Marconi adds recency and savings, with a factor that it finds in a replay of
    past requests; counts by kind need no such factor.
    """

    def __init__(self) -> None:
        # By kind, each in the order of their last use.
        self._of_kind: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(_KINDS)]
        # What is taken for known before any look-up: where sequences diverged, others will, and what has a longer entry
        # below is seldom found. Other numbers than 0 leave each kind a chance.
        self._found, self._seen = [1.0, 0.1, 2.0], [1] * _KINDS
        self._look_ups = 0

    def __iter__(self) -> Iterator[Node]:
        return itertools.chain.from_iterable(self._of_kind)

    def look_up(self, found: Node | None) -> None:
        """Count a look-up, and the entry that it found."""
        self._look_ups += 1
        for kind, entries in enumerate(self._of_kind):
            self._seen[kind] += len(entries)
        if found is not None:
            self._found[found.kind] += 1
            self.use(found)

    def use(self, entry: Node) -> None:
        """Take note that an entry is new, or was used."""
        entries = self._of_kind[entry.kind]
        entries[entry] = None
        entries.move_to_end(entry)
        entry.last_use = self._look_ups

    def continue_from(self, node: Node) -> None:
        """Take note that one more sequence goes on from a node, which may be an entry."""
        is_entry = self._of_kind[node.kind].pop(node, self) is None
        node.continuations += 1
        if is_entry:
            self._of_kind[node.kind][node] = None

    def remove(self, entry: Node) -> None:
        del self._of_kind[entry.kind][entry]

    def least(self) -> Node:
        """Return the entry to evict: none that has users; there must be one."""
        worth: dict[Node, float] = {}
        for entries, found, seen in zip(self._of_kind, self._found, self._seen, strict=True):
            unused = (entry for entry in entries if not entry.users)
            for entry in itertools.islice(unused, _MOST_COMPARED):
                age = self._look_ups - entry.last_use + 1
                worth[entry] = found / seen * entry.saved_tokens / entry.freed_bytes / math.sqrt(age)
        return min(worth, key=worth.__getitem__)
