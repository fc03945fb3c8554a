"""Fields of answers that OpenAI's API does not have: vLLM's tokens and log-probabilities of the prompt, and
llama-server's timings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from granite4_neuron.engine import Output, Request, TokenLogprob
from granite4_neuron.serving.apis.chat.protocol import GenerationBody
from granite4_neuron.serving.text_times import TextTimes


class Additions:
    """The fields of an answer to one request that OpenAI's API does not have.

    Args:
        name: of a token, in log-probabilities.
        requests: the sequences.
        body: says what is wanted.
        times: of the sequences that have begun; empty if nobody notes them.
    """

    def __init__(
        self,
        name: Callable[[int], str],
        requests: Sequence[Request],
        body: GenerationBody,
        times: Mapping[int, TextTimes],
    ):
        self._name = name
        self._requests = requests
        self._returns_tokens = body.return_token_ids
        self._returns_prompt_logprobs = body.prompt_logprobs is not None
        self._times_each_event = body.timings_per_token
        self._times = times

    def of_prompt(self, index: int, first: Output) -> dict[str, Any]:
        """Return the requested fields about a sequence's prompt, from the sequence's first output."""
        found: dict[str, Any] = {}
        if self._returns_tokens:
            found["prompt_token_ids"] = list(self._requests[index].tokens)
        if self._returns_prompt_logprobs and first.prompt is not None:
            found["prompt_logprobs"] = [None, *map(self._described, first.prompt.logprobs)]
        return found

    def of_tokens(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the requested fields about new tokens."""
        return {"token_ids": [output.token for output in outputs]} if self._returns_tokens else {}

    def of_event(self, index: int, outputs: Sequence[Output], is_last: bool) -> dict[str, Any]:
        """Return the timings of a sequence so far if its event has them: the last one, or all of them on request.

        Args:
            outputs: all of the sequence so far.
        """
        return self.timings({index: outputs}) if is_last or self._times_each_event else {}

    def timings(self, outputs: Mapping[int, Sequence[Output]]) -> dict[str, Any]:
        """Return llama-server's timings of sequences together, in milliseconds; nothing if nobody notes their times.

        Args:
            outputs: all so far, by sequence.
        """
        if not self._times:
            return {}
        times = [self._times[index] for index in outputs]
        cached = sum(each.cached_tokens for each in times)
        prompt = sum(each.prompt_tokens for each in times) - cached
        predicted = sum(map(len, outputs.values()))
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
