"""Pauses drafting for sequences whose drafts keep being rejected: a verification costs more than a step of decode."""

from __future__ import annotations

from collections import deque

WINDOW = 8  # verifications
LEAST_ACCEPTED = 4  # drafts in a window; with fewer, verifications hardly pay anywhere
FIRST_PAUSE, LONGEST_PAUSE = 32, 256  # tokens


class DraftBackoff:
    """Exponential back-off of one sequence after windows of rejected drafts. It tries again after each pause."""

    def __init__(self) -> None:
        self._accepted: deque[int] = deque(maxlen=WINDOW)
        self._pause = FIRST_PAUSE
        self._resumes_at = 0

    def allows(self, length: int) -> bool:
        """Return whether to draft for the sequence at this length in tokens."""
        return length >= self._resumes_at

    def note(self, length: int, accepted: int) -> None:
        """Record how many drafts a verification accepted; the sequence has `length` tokens after it."""
        self._accepted.append(accepted)
        if len(self._accepted) < WINDOW:
            return
        if sum(self._accepted) >= LEAST_ACCEPTED:
            self._pause = FIRST_PAUSE
            return
        self._resumes_at = length + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._accepted.clear()
