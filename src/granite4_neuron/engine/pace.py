"""How many tokens of prompts a step may run, so that the streams of others do not wait too long for it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

_LEAST = 16  # tokens of prompts in a step that holds some: prompts always advance
STEPS = 5  # that a prediction comes from: few enough to follow the load, enough for one slow step not to count


class Pace:
    """Predicts the time of steps from that of the last ones.

    A step's time is taken to be that of a step of decode, and for each token of a prompt a time more. The second is
    what was measured beside the first: if that no longer holds, because more sequences run now, it makes up for it.

    Args:
        max_gap: how long, in seconds, other sequences may wait for their next token: two steps of decode at least,
            because otherwise prompts would hardly advance where decode alone takes that long. None for any time.
        clock: tells the time in seconds.
    """

    def __init__(self, max_gap: float | None, clock: Callable[[], float]):
        self._max_gap = max_gap
        self._clock = clock
        self._decode: deque[float] = deque(maxlen=STEPS)  # seconds
        self._per_token: deque[float] = deque(maxlen=STEPS)  # seconds
        self._since = clock()

    def begin(self) -> None:
        """Have the others wait from now on. What is done between two steps, such as a snapshot, counts as well."""
        self._since = self._clock()

    def record(self, prompt_tokens: int, has_decode: bool, seconds: float) -> None:
        """Take note of a step: how many tokens of prompts it ran, and whether tokens of other sequences too."""
        if prompt_tokens:
            self._per_token.append(max(0.0, seconds - (self._decode_seconds if has_decode else 0.0)) / prompt_tokens)
        else:
            self._decode.append(seconds)

    def prompt_tokens(self, most: int) -> int:
        """Return how many tokens of prompts may run before other sequences have theirs, `most` of them at most."""
        return most if self._max_gap is None else max(min(_LEAST, most), min(most, self._tokens_in_time()))

    def has_time_for(self, tokens: int) -> bool:
        """Return whether so many tokens of prompts may run before other sequences have theirs, as far as is known."""
        return self._max_gap is not None and self._tokens_in_time() >= tokens

    @property
    def _decode_seconds(self) -> float:
        return statistics.median(self._decode) if self._decode else 0.0

    def _tokens_in_time(self) -> int:
        if self._max_gap is None or not self._per_token:
            return 0
        waited = self._clock() - self._since
        time_left = max(self._max_gap, 2 * self._decode_seconds) - self._decode_seconds - waited
        return int(max(0.0, time_left) / max(statistics.median(self._per_token), 1e-9))
