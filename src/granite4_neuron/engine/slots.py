"""Slots of a state, and the memory that they take."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Runtime
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes


def slots_that_fit(runtime: Runtime, most: int, max_length: int, set_aside: Sequence[int] = ()) -> int:
    """Return how many sequences of `max_length` tokens can run at a time, 1 to `most`; see
    `Runtime.sequences_that_fit`.

    Args:
        set_aside: as for `Slots`.
    """
    fitting = runtime.sequences_that_fit(max_length)
    return max(1, min(most, most if fitting is None else fitting, *(slot - 1 for slot in set_aside)))


class Slots:
    """The slots of a state. The state is allocated for all of them, but takes memory only when written.

    A slot keeps the memory of its longest sequence, so the free slot with the most memory is used first. If no sequence
    runs and the memory of free slots is needed, the state is allocated again. The caller says which slots are in use,
    so no slot can be lost.

    state: of the runtime; None if the runtime keeps its own state.
    failed_steps: steps with the state, and allocations of it, that have failed since the last step that succeeded.

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
        self._state_bytes, self._token_bytes = sizes_of(runtime)
        self._lengths: dict[int, int] = {}  # of the longest sequence that each slot has had
        self.state: HybridState | None = None
        self.failed_steps = 0
        self._allocate()

    def check(self, length: int) -> None:
        """Check that a sequence of this length can run; raise UserError if it needs more than `memory_bytes`."""
        needed = self._bytes(length)
        if self._memory_bytes is not None and needed > self._memory_bytes:
            raise UserError(
                f"a sequence of {length:,} tokens, prompt and new ones, needs {needed:,} bytes of state and cache; "
                f"there are {self._memory_bytes:,}."
            )

    def take(self, length: int, in_use: Collection[int]) -> int | None:
        """Return a slot for a sequence of up to `length` tokens; None if there is no room for it now.

        Args:
            in_use: the slots of sequences that run.

        Raises:
            UserError: the state has to be allocated again, and the runtime has no room for it.
        """
        if not self._lengths:
            self._allocate()
        free = self.free(in_use)
        if not free:
            return None
        slot = max(free, key=self._lengths.__getitem__)
        if not self._has_room(slot, length):
            if in_use:
                return None
            self._allocate()
            slot = free[0]
        self._lengths[slot] = max(self._lengths[slot], length)
        return slot

    def free(self, in_use: Collection[int]) -> list[int]:
        """Return the slots for sequences that are not in use."""
        taken = set(in_use)
        return [slot for slot in range(1, self._num_sequences + 1) if slot not in taken]

    def renew(self) -> None:
        """Make the next `take` allocate the state again. No slot may be in use."""
        self._lengths = {}

    def _allocate(self) -> None:
        self._lengths, self.state = {}, None  # free the old state's memory first
        self.failed_steps += 1  # until there is a state
        self.state = self._runtime.allocate(self._num_slots, self._max_length)
        self.failed_steps -= 1
        self._lengths = dict.fromkeys(self.free(()), 0)

    def _has_room(self, slot: int, length: int) -> bool:
        if self._memory_bytes is None:
            return True
        lengths = {**self._lengths, slot: max(self._lengths[slot], length)}
        return sum(map(self._bytes, lengths.values())) <= self._memory_bytes

    def _bytes(self, length: int) -> int:
        """Return the bytes that a slot takes whose longest sequence had this length; 0 for length 0."""
        return self._state_bytes + length * self._token_bytes if length else 0


def sizes_of(runtime: Runtime) -> tuple[int, int]:
    """Return the bytes of a sequence's recurrent state, and of its keys and values for each token."""
    config, itemsize = runtime.config, runtime.dtype.itemsize
    state = sequence_bytes(config, itemsize, state_itemsize=runtime.state_dtype.itemsize)
    return state, token_bytes(config, itemsize)
