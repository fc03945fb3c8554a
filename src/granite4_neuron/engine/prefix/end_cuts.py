"""Which prompts are cut before their ends, for longer prompts that may not continue from these ends."""

from __future__ import annotations

from collections.abc import Iterable

from granite4_neuron.runtime.prompt_cuts import PromptCuts

_MOST_UNSHARED = 8  # prompts


class EndCuts:
    """Cuts prompts at their last cut points that all longer prompts share (`PromptCuts.is_shared`).

    A cut costs a step and a snapshot. So it is made only while it is of use: while one of the last few prompts went on
    from where an earlier one was cut like this, or would have been.

    Args:
        cuts: of the runtime.
    """

    def __init__(self, cuts: PromptCuts):
        self._cuts = cuts
        self._unshared = 0  # prompts since the last that went on from such a place

    def of(self, length: int, shared: int, ends: Iterable[int]) -> set[int]:
        """Return where to cut a prompt, if it is to be cut.

        Args:
            length: of the prompt.
            shared: how many of its tokens it shares with earlier sequences.
            ends: where snapshots of these end.
        """
        is_of_use = shared < length and any(0 < self._place(end) <= shared for end in ends)
        self._unshared = 0 if is_of_use else self._unshared + 1
        return {self._place(length)} - {0} if self._unshared <= _MOST_UNSHARED else set()

    def _place(self, length: int) -> int:
        """Return where a prompt of this length may be cut; 0 if there is no need, or no such place."""
        return 0 if self._cuts.is_shared(length) else self._cuts.last(length - 1, length)
