"""A joint limit of the log-probabilities of prompts, which come all at once and stay until their answer is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from granite4_neuron.engine import Request
from granite4_neuron.serving.errors import RequestError, too_many_requests

MOST = 2**21  # log-probabilities: some 0.4 GiB while an answer is written


class PromptLogprobs:
    """Counts the log-probabilities that the requests in flight hold. It belongs to the event loop.

    number: how many there are.
    """

    def __init__(self) -> None:
        self.number = 0

    def check(self, requests: Sequence[Request]) -> None:
        """Check a request to the server.

        Raises:
            RequestError: 400, it alone asks for too many.
        """
        asked = _number(requests)
        if asked > MOST:
            message = (
                f"the request asks for {asked} log-probabilities of prompts, and may ask for {MOST}; give fewer or "
            )
            raise RequestError(400, f"{message}shorter prompts, or a smaller logprobs.", "logprobs")

    def hold(self, requests: Sequence[Request]) -> Callable[[], None]:
        """Count the log-probabilities of a checked request; return a function to call once its answer is sent.

        Raises:
            RequestError: 429, there are too many together with others.
        """
        asked = _number(requests)
        if self.number + asked > MOST:
            message = (
                f"the requests that run have {self.number} log-probabilities of prompts, of {MOST} that they may have"
            )
            raise too_many_requests(f"{message}; try again later.")
        self.number += asked

        def release() -> None:
            self.number -= asked

        return release


def _number(requests: Sequence[Request]) -> int:
    """Return how many log-probabilities of prompts requests ask for."""
    return sum(
        len(request.tokens) * (1 + request.prompt_logprobs)
        for request in requests
        if request.prompt_logprobs is not None
    )
