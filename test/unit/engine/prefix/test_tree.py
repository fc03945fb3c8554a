"""The worth of each entry in a prefix cache's tree, against an independent calculation from the definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from granite4_neuron.config import published_config
from granite4_neuron.engine import PrefixCache
from granite4_neuron.engine.prefix import tree as module
from granite4_neuron.engine.prefix.tree import Entries, Entry, Node, NodeKind
from granite4_neuron.runtime.prompt_cuts import ANYWHERE
from granite4_neuron.state.snapshot import Snapshot

# The hits and look-ups that are assumed before any look-up, by `NodeKind`.
FOUND, SEEN = (1.0, 0.1, 2.0), (1, 1, 1)


def child_of(parent, tokens, is_entry=True, entry_bytes=0):
    node = Node(parent, parent.length + tokens, (0,) * tokens, {"key": torch.zeros(tokens, 3, dtype=torch.uint8)})
    parent.children[len(parent.children)] = node
    if is_entry:
        node.entry = entry_of(entry_bytes)
    return node


def entry_of(num_bytes):
    return Entry({}, torch.empty(0), num_bytes)


@st.composite
def trees(draw):
    """Return a root and all nodes below it. Each leaf is an entry, as in a cache."""
    root, nodes = Node(None, 0), []
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([root, *nodes]))
        nodes.append(child_of(parent, draw(st.integers(1, 50)), draw(st.booleans()), draw(st.integers(1, 300))))
    for node in nodes:
        if not node.children and node.entry is None:
            node.entry = entry_of(7)
        node.kind = draw(st.sampled_from(NodeKind))
    return root, nodes


def saved_tokens(node):
    above = [each.length for each in node.path[:-1] if each.entry is not None and each.kind is NodeKind.BRANCH]
    return node.length - max(above, default=0)


def freed_bytes(node):
    """Return the bytes that are freed if the entry is evicted and the tree is pruned."""
    freed, gone, at = node.entry_bytes, {node}, node
    while at.parent is not None and at in gone and all(child in gone for child in at.children.values()):
        freed += 3 * len(at.tokens)
        at = at.parent
        if at.entry is None and all(child in gone for child in at.children.values()):
            gone.add(at)
    return freed


class Reckoning:
    """An independent calculation of worth, which gets the same calls as `Entries`."""

    def __init__(self):
        self.found, self.seen, self.look_ups = list(FOUND), list(SEEN), 0
        self.last_use = {}

    def look_up(self, found):
        self.look_ups += 1
        for entry in self.last_use:
            self.seen[entry.kind] += 1
        if found is not None:
            self.found[found.kind] += 1
            self.last_use[found] = self.look_ups

    def worth(self, entry):
        chance = self.found[entry.kind] / self.seen[entry.kind]
        age = 1 + self.look_ups - self.last_use[entry]
        return chance * saved_tokens(entry) / (freed_bytes(entry) * math.sqrt(age))


@given(tree=trees())
def test_saved_tokens_and_freed_bytes(tree):
    for node in tree[1]:
        assert node.saved_tokens == saved_tokens(node)
        if node.entry is not None:
            assert node.freed_bytes == freed_bytes(node)


@pytest.mark.slow
@settings(max_examples=150)
@given(tree=trees(), data=st.data())
def test_the_entry_worth_least_is_evicted(tree, data):
    nodes = [node for node in tree[1] if node.entry is not None]
    entries, reckoning = Entries(), Reckoning()
    for _ in range(data.draw(st.integers(1, 30))):
        kept = list(reckoning.last_use)
        action = data.draw(st.sampled_from(["use", "look up", "find", "continue", "remove", "evict"]))
        if action == "look up" or not kept:
            entries.record_match(None)
            reckoning.look_up(None)
        if action == "use" or not kept:
            node = data.draw(st.sampled_from(nodes))
            entries.touch(node)
            reckoning.last_use[node] = reckoning.look_ups
            continue
        node = data.draw(st.sampled_from(kept))
        if action == "find":
            entries.record_match(node)
            reckoning.look_up(node)
        elif action == "continue":
            entries.record_continuation(data.draw(st.sampled_from([node, tree[0], *tree[1]])))
        elif action == "remove":
            entries.remove(node)
            del reckoning.last_use[node]
        else:
            used = data.draw(st.sets(st.sampled_from(kept), max_size=len(kept) - 1))
            worth = {each: reckoning.worth(each) for each in kept if each not in used}
            victim = entries.victim(used)
            assert victim not in used and worth[victim] == pytest.approx(min(worth.values()))
        assert set(entries) == set(reckoning.last_use)
        assert {each: each.last_use for each in entries} == reckoning.last_use


def test_only_the_least_recently_used_of_each_kind_are_compared(monkeypatch):
    monkeypatch.setattr(module, "_MOST_COMPARED", 3)
    root, entries = Node(None, 0), Entries()
    # A later node is worth less. The first two are in use.
    nodes = [child_of(root, 1, entry_bytes=10 ** (1 + number)) for number in range(8)]
    used = nodes[:2]
    for node in nodes:
        entries.touch(node)
    assert entries.victim(used) is nodes[4]
    entries.touch(nodes[3])
    assert entries.victim(used) is nodes[5]
    other = child_of(root, 1, entry_bytes=10**12)
    other.kind = NodeKind.BRANCH
    entries.touch(other)
    assert entries.victim(used) is other


def test_only_an_entry_becomes_a_branch_when_it_is_continued():
    entries, node = Entries(), child_of(Node(None, 0), 5)
    entries.record_continuation(node)
    assert not list(entries) and node.kind is NodeKind.CONTINUED
    entries.touch(node)
    entries.record_continuation(node)
    assert list(entries) == [node] and node.kind is NodeKind.BRANCH
    entries.remove(node)
    assert not list(entries)


class _Sizes:
    """The part of a runtime that a prefix cache needs: states of ten bytes, and three bytes per token."""

    config = published_config("h-350m")
    dtype = state_dtype = torch.float32
    tokens_per_step = 4
    cannot = fingerprint = ()
    prompt_cuts = ANYWHERE

    def snapshot(self, state, slot, length, start=0):
        key, recurrent = torch.empty(1, length - start, 3, dtype=torch.uint8), torch.empty(10, dtype=torch.uint8)
        return Snapshot(start, length, {"0.key": key, "0.ssm_state": recurrent}, self.dtype, self.fingerprint)

    def prepare_snapshot(self, is_wanted):
        pass


class _CheckedEntries(Entries):
    """Entries that compare remembered values with newly calculated ones, also in the middle of a change."""

    def victim(self, used):
        self.check()
        return super().victim(used)

    def check(self):
        for entry in self:
            assert entry.saved_per_byte == entry.saved_tokens / entry.freed_bytes


@settings(deadline=None)
@given(st.data())
def test_savings_per_byte_are_up_to_date(data):
    """The remembered values stay right while a cache's tree grows and loses entries."""
    cache, held = PrefixCache(_Sizes(), data.draw(st.sampled_from([60, 150, 400])), None), []
    cache._state_bytes, cache._token_bytes, cache._entries = 10, 3, _CheckedEntries()
    for _ in range(data.draw(st.integers(1, 40))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        if data.draw(st.booleans()):
            cache.insert(tokens, None, 1, torch.zeros(1))
        elif (prefix := cache.match_prefix(tokens)) is not None and data.draw(st.booleans()):
            held = [*held[-1:], prefix]
        cache._entries.check()
        assert {prefix.node for prefix in held} <= set(cache._entries)
        assert cache.stats.num_bytes <= cache.max_bytes
