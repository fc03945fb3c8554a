"""How many tokens of prompts a step may run, so that other sequences do not wait too long for their next token."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

_LEAST = 16  # tokens of prompts in a step that has any, so that prompts always advance
STEPS = 5  # behind a prediction: few enough to follow the load, enough to ignore one slow step


class PrefillBudget:
    """Predicts the time of a step from the times of the last steps.

    The model of a step's time is the time of a step of decode, plus a time for each token of a prompt. The second is
    measured as the remainder after the first, so it corrects the first when that is out of date, for instance because
    more sequences run now.

    Args:
        max_gap: how long, in seconds, other sequences may wait for their next token. At least two steps of decode are
            allowed, because prompts would hardly advance if decode alone took that long. None for no limit.
        clock: tells the time in seconds.
    """

    def __init__(self, max_gap: float | None, clock: Callable[[], float]):
        self._max_gap = max_gap
        self._clock = clock
        self._decode_times: deque[float] = deque(maxlen=STEPS)  # seconds
        self._per_token: deque[float] = deque(maxlen=STEPS)  # seconds
        self._since = clock()

    def begin(self) -> None:
        """Start the waiting time of the other sequences. Work between two steps, such as a snapshot, counts as well."""
        self._since = self._clock()

    def record(self, prompt_tokens: int, has_decode: bool, seconds: float) -> None:
        """Record a step: how many tokens of prompts it ran, and whether it ran next tokens of other sequences too."""
        if prompt_tokens:
            self._per_token.append(max(0.0, seconds - (self._decode_seconds if has_decode else 0.0)) / prompt_tokens)
        else:
            self._decode_times.append(seconds)

    def prompt_tokens(self, most: int) -> int:
        """Return how many tokens of prompts, at most `most`, may run before the next tokens of other sequences."""
        return most if self._max_gap is None else max(min(_LEAST, most), min(most, self._tokens_in_time()))

    def has_time_for(self, tokens: int) -> bool:
        """Return whether, by prediction, this many tokens of prompts may run before the others' next tokens."""
        return self._max_gap is not None and self._tokens_in_time() >= tokens

    @property
    def _decode_seconds(self) -> float:
        return statistics.median(self._decode_times) if self._decode_times else 0.0

    def _tokens_in_time(self) -> int:
        if self._max_gap is None or not self._per_token:
            return 0
        waited = self._clock() - self._since
        time_left = max(self._max_gap, 2 * self._decode_seconds) - self._decode_seconds - waited
        return int(max(0.0, time_left) / max(statistics.median(self._per_token), 1e-9))
