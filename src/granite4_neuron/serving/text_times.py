"""The times of one text, for the metrics and for answers that tell them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TextTimes:
    """The times of a text of a request, in seconds of `time.perf_counter`.

    prompt_tokens, cached_tokens: of its prompt, and of these the ones from the prefix cache.
    max_tokens: that it may have.
    tokens: that it has so far.
    arrived: the request was there. queued: the engine got it. started: it got a slot.
    first, latest: its first and its latest tokens came.
    """

    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    arrived: float
    queued: float
    started: float
    first: float
    latest: float
    tokens: int = 0
