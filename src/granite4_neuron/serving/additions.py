"""Fields of answers that OpenAI's API does not have: vLLM's tokens and log-probabilities of the prompt, and
llama-server's timings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from granite4_neuron.engine import Output, Request, TokenLogprob
from granite4_neuron.serving.identity import is_fixed
from granite4_neuron.serving.protocol import GenerationBody


@dataclass
class _Times:
    """When a text got its slot, and when its first and its latest tokens came, in seconds."""

    started: float
    first: float
    latest: float


class Additions:
    """What the answer to one request has beyond OpenAI's fields.

    Args:
        name: of a token, in log-probabilities.
        requests: the sequences.
        body: says what is wanted.
    """

    def __init__(self, name: Callable[[int], str], requests: Sequence[Request], body: GenerationBody):
        self._name = name
        self._requests = requests
        self._returns_tokens = body.return_token_ids
        self._returns_prompt_logprobs = body.prompt_logprobs is not None
        self._times_each_event = body.timings_per_token
        self._times: dict[int, _Times] = {}

    def note(self, index: int, outputs: Sequence[Output]) -> None:
        """Note the time of new tokens of a sequence."""
        now, prompt = time.perf_counter(), outputs[0].prompt
        if prompt is not None:
            self._times[index] = _Times(prompt.started, now, now)
        self._times[index].latest = now

    def of_prompt(self, index: int, first: Output) -> dict[str, Any]:
        """Return what is wanted of a sequence's prompt, by its first output."""
        found: dict[str, Any] = {}
        if self._returns_tokens:
            found["prompt_token_ids"] = list(self._requests[index].tokens)
        if self._returns_prompt_logprobs and first.prompt is not None:
            found["prompt_logprobs"] = [None, *map(self._described, first.prompt.logprobs)]
        return found

    def of_tokens(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return what is wanted of new tokens."""
        return {"token_ids": [output.token for output in outputs]} if self._returns_tokens else {}

    def of_event(self, index: int, outputs: Sequence[Output], is_last: bool) -> dict[str, Any]:
        """Return the timings of a sequence so far if its event has them: the last one, or all of them on request.

        Args:
            outputs: all of the sequence so far.
        """
        return self.timings({index: outputs}) if is_last or self._times_each_event else {}

    def timings(self, outputs: dict[int, Sequence[Output]]) -> dict[str, Any]:
        """Return llama-server's timings of sequences together, in milliseconds; those without tokens do not count.
        An answer that is to be the same whenever it is made has none.

        Args:
            outputs: all so far, by sequence.
        """
        if is_fixed():
            return {}
        begun = {index: its for index, its in outputs.items() if index in self._times}
        times = [self._times[index] for index in begun]
        reports = [its[0].prompt for its in begun.values()]
        cached = sum(report.cached_tokens for report in reports if report is not None)
        prompt = sum(len(self._requests[index].tokens) for index in begun) - cached
        predicted = sum(map(len, begun.values()))
        return {
            "timings": {
                "cache_n": cached,
                **_rate("prompt", prompt, sum(each.first - each.started for each in times)),
                **_rate("predicted", predicted, sum(each.latest - each.first for each in times)),
            }
        }

    def _described(self, report: TokenLogprob) -> dict[str, Any]:
        """Return a prompt's token and the top tokens in its place, by their ids."""
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(report.top, start=1)]
        tokens = {report.token: (report.logprob, report.rank)}
        tokens |= {token: (logprob, rank) for token, logprob, rank in ranked if token != report.token}
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._name(token)}
            for token, (logprob, rank) in tokens.items()
        }


def _rate(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
