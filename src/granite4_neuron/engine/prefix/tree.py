"""The nodes of a prefix cache's tree, and the choice of the entry to evict."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from granite4_neuron.state.snapshot import cut_keys_and_values

_MOST_COMPARED = 100  # entries of a kind, so that finding a victim takes no longer when there are more


class NodeKind(IntEnum):
    """A node's place in the tree, which predicts its use: how many sequences have continued from it, up to two."""

    END = 0  # of a sequence
    CONTINUED = 1  # by one sequence, whose longer entry is mostly found instead
    BRANCH = 2  # where sequences diverged


@dataclass(frozen=True, eq=False)
class Entry:
    """The part of a sequence's state, beside keys and values, that is needed to continue after a node's last token.

    recurrent: the recurrent state there.
    logits: [vocab_size].
    num_bytes: the bytes of these two.
    """

    recurrent: Mapping[str, torch.Tensor]
    logits: torch.Tensor
    num_bytes: int


@dataclass(eq=False)
class Node:
    """The tokens between its parent's length and its own, with their keys and values.

    parent: None for the root, which has no tokens.
    entry: None if there never was one, or it was evicted.
    kind: counts the sequences that have continued from it so far, each with another token or without one yet.
    last_use: the number of look-ups when it was last added or found.
    tokens_bytes: the bytes of its keys and values.
    """

    parent: Node | None
    length: int
    tokens: tuple[int, ...] = ()
    keys_and_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    entry: Entry | None = None
    children: dict[int, Node] = field(default_factory=dict)  # by their first token
    kind: NodeKind = NodeKind.END
    last_use: int = 0
    tokens_bytes: int = field(init=False)
    _saved_per_byte: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tokens_bytes = _bytes_of(self.keys_and_values)

    @property
    def start(self) -> int:
        return self.length - len(self.tokens)

    @property
    def above(self) -> Iterator[Node]:
        """The nodes between this one and the root, the nearest first."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    @property
    def path(self) -> list[Node]:
        """The nodes from the first below the root to this one."""
        return [] if self.parent is None else [self, *self.above][::-1]

    @property
    def entry_above(self) -> Node:
        """The node itself or the nearest above it that is an entry; the root if there is none."""
        node = self
        while node.entry is None and node.parent is not None:
            node = node.parent
        return node

    @property
    def entry_bytes(self) -> int:
        """The bytes of its entry; 0 without one."""
        return 0 if self.entry is None else self.entry.num_bytes

    @property
    def saved_tokens(self) -> int:
        """How many fewer tokens a prompt runs with this entry than with its nearest durable ancestor: one where
        sequences diverged.
        """
        lasting = (node.length for node in self.above if node.entry is not None and node.kind == NodeKind.BRANCH)
        return self.length - next(lasting, 0)

    @property
    def freed_bytes(self) -> int:
        """The bytes that evicting this entry frees."""
        freed = self.entry_bytes
        if self.children:
            return freed
        freed += self.tokens_bytes
        for node in self.above:
            if node.entry is not None or len(node.children) > 1:
                break
            freed += node.tokens_bytes
        return freed

    @property
    def saved_per_byte(self) -> float:
        """`saved_tokens` over `freed_bytes`, cached until `note_change` because each eviction reads many of them."""
        if self._saved_per_byte is None:
            self._saved_per_byte = self.saved_tokens / self.freed_bytes
        return self._saved_per_byte

    def note_change(self) -> None:
        """Invalidate `saved_per_byte` of this node and those below. Call it after a change of the entry, of its kind,
        or between no, one and more children.
        """
        nodes = [self]
        while nodes:
            node = nodes.pop()
            node._saved_per_byte = None
            nodes += node.children.values()

    def split(self, child: Node, length: int) -> Node:
        """Insert a node between this one and a child, after the first `length` of the child's tokens; return it."""
        first, rest = child.tokens[:length], child.tokens[length:]
        middle = Node(self, self.length + length, first, cut_keys_and_values(child.keys_and_values, 0, length))
        middle.children[rest[0]] = child
        middle.kind = NodeKind.BRANCH  # for the child's tokens, and those of the sequence that it is inserted for
        self.children[first[0]] = middle
        child.parent, child.tokens = middle, rest
        child.keys_and_values = cut_keys_and_values(child.keys_and_values, length, length + len(rest))
        child.tokens_bytes = _bytes_of(child.keys_and_values)
        middle.note_change()
        return middle


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class Entries:
    """The entries of a prefix cache. The one worth least is evicted first.

    The worth of an entry is the number of tokens that it saves per byte, times the hit rate of its kind, divided by the
    square root of the number of look-ups since its last use. So in conversations the ends of earlier turns are evicted
    first, and where prompts share examples or a system message, the ends of sequences that nothing continues.

    Weighing savings per byte is from Marconi (Pan et al., MLSys 2025), dividing by age from hyperbolic
    caching (Blankstein et al., ATC 2017). Marconi adds recency and savings, with a factor found by
    replaying past requests; hit rates by kind need no such factor.
    """

    def __init__(self) -> None:
        # One dictionary for each kind, in the order of last use.
        self._of_kind: list[OrderedDict[Node, None]] = [OrderedDict() for _ in NodeKind]
        # Priors of the hit rates. Where sequences diverged, others will; an entry with a longer one below is seldom
        # found. No prior is 0, so that each kind has a chance.
        self._found = [1.0, 0.1, 2.0]
        self._seen = [1] * len(NodeKind)
        self._look_ups = 0

    def __iter__(self) -> Iterator[Node]:
        return itertools.chain.from_iterable(self._of_kind)

    def __contains__(self, node: Node) -> bool:
        return node in self._of_kind[node.kind]

    def record_match(self, found: Node | None) -> None:
        """Count a look-up, and the entry that it found, if there is one."""
        self._look_ups += 1
        for kind, entries in enumerate(self._of_kind):
            self._seen[kind] += len(entries)
        if found is not None:
            self._found[found.kind] += 1
            self.touch(found)

    def touch(self, entry: Node) -> None:
        """Record that an entry is new, or was used."""
        entries = self._of_kind[entry.kind]
        entries[entry] = None
        entries.move_to_end(entry)
        entry.last_use = self._look_ups

    def record_continuation(self, node: Node) -> None:
        """Record that one more sequence continues from a node, which may be an entry."""
        is_entry = self._of_kind[node.kind].pop(node, self) is None
        if node.kind != NodeKind.BRANCH:
            node.kind = NodeKind(node.kind + 1)
            if node.kind == NodeKind.BRANCH:
                node.note_change()
        if is_entry:
            self._of_kind[node.kind][node] = None

    def remove(self, entry: Node) -> None:
        del self._of_kind[entry.kind][entry]

    def victim(self, used: Collection[Node]) -> Node:
        """Return the entry to evict: none of those that are used. There must be another."""
        victim, least, now = None, math.inf, self._look_ups + 1
        for entries, found, seen in zip(self._of_kind, self._found, self._seen, strict=True):
            chance, compared = found / seen, 0
            saved, last_use = math.inf, now  # of the last entry whose worth was calculated
            for entry in entries:
                its_saved = entry._saved_per_byte or entry.saved_per_byte
                # Skip an entry that saves no less and was used no earlier: it is worth no less. Mostly that is all but
                # the first.
                if its_saved < saved or entry.last_use < last_use:
                    worth = chance * its_saved / math.sqrt(now - entry.last_use)
                    if worth < least:
                        if entry in used:
                            continue
                        victim, least = entry, worth
                    saved, last_use = its_saved, entry.last_use
                compared += 1
                if compared == _MOST_COMPARED:
                    break
        assert victim is not None
        return victim
