"""Slots of a state, and the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence

from granite4_neuron.available_memory import available_bytes
from granite4_neuron.errors import UserError
from granite4_neuron.model.sizes import sequence_bytes, token_bytes
from granite4_neuron.runtime.interface import Runtime


def slots_that_fit(runtime: Runtime, most: int, max_length: int, set_aside: Sequence[int] = ()) -> int:
    """Return how many sequences of `max_length` tokens can run at a time, 1 to `most`: half of the available memory is
    for them, if the runtime does not keep the state itself.

    Args:
        set_aside: as of `Slots`.
    """
    if runtime.own_slots:
        return max(1, min(most, runtime.own_slots, *(slot - 1 for slot in set_aside)))
    available = available_bytes()
    if available is None:
        return most
    return max(1, min(most, available // 2 // _bytes_of(runtime, max_length)))


class Slots:
    """Which slots of a state are free. The state is allocated for all of them, but takes memory only when written.

    A slot keeps the memory of its longest sequence, so the free slot with the most memory is used first. If no sequence
    runs and the memory of free slots is needed, the state is allocated again.

    Args:
        runtime: allocates the state.
        num_sequences, max_length: of the state, at least 1.
        memory_bytes: limit in bytes for all slots together; None for no limit.
        set_aside: reserved slots above those for sequences; they do not count towards `memory_bytes`.

    Raises:
        UserError: a reserved slot is not above the others, or the runtime has no room for the state.
    """

    def __init__(
        self,
        runtime: Runtime,
        num_sequences: int,
        max_length: int,
        memory_bytes: int | None,
        set_aside: Sequence[int] = (),
    ):
        if set_aside and min(set_aside) <= num_sequences:
            raise UserError(
                f"slot {min(set_aside)} is set aside and {num_sequences} sequences take the first {num_sequences}; set "
                "aside slots above them."
            )
        self._num_slots = max(num_sequences, *set_aside) if set_aside else num_sequences
        self._runtime = runtime
        self._num_sequences = num_sequences
        self._max_length = max_length
        self._memory_bytes = memory_bytes
        self._allocate()

    def check(self, length: int) -> None:
        """Check that a sequence of that length can run.

        Raises:
            UserError: it needs more than `memory_bytes`.
        """
        needed = self._bytes(length)
        if self._memory_bytes is not None and needed > self._memory_bytes:
            raise UserError(
                f"a sequence of {length:,} tokens, prompt and new ones, needs {needed:,} bytes of state and cache; "
                f"there are {self._memory_bytes:,}."
            )

    def take(self, length: int) -> int | None:
        """Take a slot for a sequence of up to `length` tokens; None if there is no room for it now."""
        if not self._free:
            return None
        slot = max(self._free, key=self._lengths.get)
        if not self._has_room(slot, length):
            if len(self._free) < self._num_sequences:
                return None
            self._allocate()
            slot = self._free[0]
        self._free.remove(slot)
        self._lengths[slot] = max(self._lengths[slot], length)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot whose sequence has ended."""
        self._free.append(slot)

    def _allocate(self) -> None:
        self.state = None  # the old one's memory first
        self.state = self._runtime.allocate(self._num_slots, self._max_length)
        self._free = list(range(1, self._num_sequences + 1))
        self._lengths = dict.fromkeys(self._free, 0)  # of the longest sequence that each slot has had

    def _has_room(self, slot: int, length: int) -> bool:
        if self._memory_bytes is None:
            return True
        lengths = {**self._lengths, slot: max(self._lengths[slot], length)}
        return sum(map(self._bytes, lengths.values())) <= self._memory_bytes

    def _bytes(self, length: int) -> int:
        """Return the bytes that a slot has taken for a sequence of this length; 0 before its first one."""
        return _bytes_of(self._runtime, length) if length else 0


def _bytes_of(runtime: Runtime, length: int) -> int:
    """Return the bytes of state and cache of a sequence of this length."""
    config, itemsize = runtime.config, runtime.dtype.itemsize
    state = sequence_bytes(config, itemsize, state_itemsize=runtime.state_dtype.itemsize)
    return state + length * token_bytes(config, itemsize)
