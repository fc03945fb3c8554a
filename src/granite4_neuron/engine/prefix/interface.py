"""The interface of a prefix cache that an engine uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from granite4_neuron.state.hybrid_state import HybridState

_TOKEN_BITS = 64  # of a key without a salt


def salted(keys: Sequence[int], salt: str | None) -> Sequence[int]:
    """Return a prefix cache's keys for a sequence with this salt. Sequences with different salts, or one with and one
    without, have no common prefix.

    Args:
        keys: of the sequence from its first token on; not empty.
    """
    if salt is None:
        return keys
    digest = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
    return [(int.from_bytes(digest, "big") << _TOKEN_BITS) + keys[0], *keys[1:]]


def any_length(length: int) -> bool:
    """Return True: a sequence may continue from a prefix of any length."""
    return True


class FoundPrefix(Protocol):
    """A prefix that a cache has found."""

    @property
    def length(self) -> int: ...

    @property
    def logits(self) -> torch.Tensor:
        """[vocab_size], float32, after its last token."""


Found = TypeVar("Found", bound=FoundPrefix)


class AnyPrefixCache(Protocol[Found]):
    """A `PrefixCache` or a `SlotPrefixCache`. `Found` is what `match_prefix` returns and other methods take."""

    @property
    def interval(self) -> int | None:
        """The engine keeps snapshots at multiples of it; None for no such snapshots."""

    @property
    def changes(self) -> int:
        """How often what it keeps has changed. Until the next change `cached_length` stays the same."""

    def match_prefix(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = ...) -> Found | None:
        """Find the longest cached prefix of a sequence that ends at a cut point; it may be the whole sequence."""

    def cached_length(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = ...) -> int:
        """Return the length of the prefix in memory that `match_prefix` would find, without counting it as used."""

    def new_cuts(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = ...) -> set[int]:
        """Return further lengths up to which to cut a sequence that begins, and to keep snapshots. It may continue only
        from prefixes that end at a cut point.
        """

    def attach(self, state: HybridState | None) -> None:
        """Use this state; forget everything that belongs to another one."""

    def detach(self) -> None:
        """Forget everything that belongs to the state, which may be lost."""

    def restore(self, prefix: Found, state: HybridState | None, slot: int) -> None:
        """Copy a prefix into a slot."""

    def release(self, prefix: Found) -> None:
        """Record that a sequence that started from this prefix has ended."""

    def insert(self, tokens: Sequence[int], state: HybridState | None, slot: int, logits: torch.Tensor) -> None:
        """Keep a slot's state. `tokens` are all that it has seen; `logits` [vocab_size] come after the last of them."""

    def make_ready(self) -> None:
        """Prepare for the next `insert`."""
