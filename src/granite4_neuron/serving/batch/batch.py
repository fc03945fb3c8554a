"""Answers the lines of a batch with one engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import pydantic_core
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine import Engine, Output
from granite4_neuron.errors import UserError
from granite4_neuron.generation.in_order import InOrder, Job
from granite4_neuron.serving.apis.chat.answers import TokenTexts
from granite4_neuron.serving.apis.chat.protocol import parse
from granite4_neuron.serving.apis.endpoints import check_model
from granite4_neuron.serving.apis.identity import deterministic_ids
from granite4_neuron.serving.batch.forms import Form, Prompts, form_of
from granite4_neuron.serving.batch.lines import Line
from granite4_neuron.serving.errors import RequestError, to_json
from granite4_neuron.serving.prompt_logprobs import PromptLogprobs
from granite4_neuron.serving.sequences import Limits, RequestBuilder

MOST_CHOICES = 512  # sequences of a line
LOOK_AHEAD = 1024  # lines that are read before the result of the first of them is there
_PORTION = 128
_PREPARED = 2 * _PORTION  # lines that are read before the engine asks for them
_NUM_SEEDS = 2**63

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Result:
    """The result of a line.

    place: of the line in the input.
    source: the line's digest.
    line: of the output, with its end.
    num_tokens: how many new tokens it has.
    has_failed: whether it is an error.
    """

    place: int
    source: str
    line: bytes
    num_tokens: int
    has_failed: bool


class LineJob(Job):
    """A line, with its result once its sequences have ended."""

    result: Result

    def __init__(self, line: Line, form: Form):
        self._place, self._source = line.place, line.digest()
        self._form = form
        self._outputs: list[tuple[int, Output]] = []
        self._unfinished = 0

    def prepare(self, maker: RequestBuilder, texts: TokenTexts, model: str, seed: int) -> None:
        """Make the sequences. If the line is wrong, the error becomes its result."""
        try:
            api, given = self._form.request()
            if given.get("seed") in (None, -1):  # so that a text that is made again is the same
                given = {**given, "seed": (seed + self._place) % _NUM_SEEDS}
            body = parse(api.body, pydantic_core.to_json(given), maker.limits.num_tokens)
            check_model(body.model, (model, *maker.adapters))
            if body.stream:
                raise RequestError(400, "stream: a batch has no streams; leave it out.", "stream")
            prepared = api.requests(maker, body)
            PromptLogprobs().check(prepared.requests)
            requests = maker.constrained(prepared)
        except (RequestError, UserError) as error:
            self.refuse(error)
            return
        self.requests, self._unfinished = requests, len(requests)
        self._answer = partial(api.answer, texts, body.model or model, requests, body)

    def add(self, index: int, output: Output) -> None:
        if output.prompt is not None:  # what the cache had depends on who was there before
            output = output._replace(prompt=replace(output.prompt, cached_tokens=0))
        self._outputs.append((index, output))
        self._unfinished -= output.finish_reason is not None
        if not self._unfinished:
            self._finish()

    def refuse(self, error: UserError | RequestError) -> None:
        self._fail(error if isinstance(error, RequestError) else RequestError(400, str(error)))

    def _finish(self) -> None:
        for _, output in self._outputs:
            if output.error is not None:
                self._fail(RequestError(400 if output.is_requests_fault else 500, output.error))
                return
        with self._same_ids():
            answer = self._answer()
            for index, output in self._outputs:
                answer.add(index, [output])
            self._end(self._form.success(answer.whole()), has_failed=False)

    def _fail(self, error: RequestError) -> None:
        with self._same_ids():
            self._end(self._form.failure(error), has_failed=True)

    def _same_ids(self) -> AbstractContextManager[None]:
        return deterministic_ids(f"{self._place} {self._form.name}")

    def _end(self, value: dict[str, Any], has_failed: bool) -> None:
        num_tokens = sum(output.token is not None for _, output in self._outputs)
        line = to_json(value).encode() + b"\n"
        self.result = Result(self._place, self._source, line, num_tokens, has_failed)
        self.requests, self._outputs = (), []


class Batch:
    """Answers lines. It belongs to one thread at a time.

    Args:
        engine: has the tokenizer.
        has_prefix_cache: whether it has a prefix cache.
        model: its name in requests.
        prompts: how rows with a prompt become requests.
        seed: of texts that have none; the place of their line is added to it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        *,
        has_prefix_cache: bool,
        model: str,
        prompts: Prompts,
        seed: int = 0,
    ):
        self._engine = engine
        self._has_prefix_cache = has_prefix_cache
        limits = Limits(engine.max_length, None, MOST_CHOICES)
        self._maker = RequestBuilder(engine.runtime, tokenizer, limits, (model,))
        self._texts = TokenTexts(tokenizer, engine.max_length)
        self._model = model
        self._prompts = prompts
        self._seed = seed

    def close(self) -> None:
        self._maker.close()

    def results(self, lines: Iterator[Line]) -> Generator[Result, None, None]:
        """Yield the result of each line, in their order; raise UserError if the device is lost."""
        runs: InOrder[LineJob] = InOrder(
            lambda _: self._engine,
            longest=self._engine.max_length,
            portion=_PORTION,
            look_ahead=LOOK_AHEAD,
            shares_prefixes=self._has_prefix_cache,
        )
        with (
            closing(_in_a_thread(self._job, lines, _PREPARED)) as prepared,
            closing(runs.run(prepared)) as jobs,
        ):
            for job in jobs:
                yield job.result

    def _job(self, line: Line) -> LineJob:
        job = LineJob(line, form_of(line, self._prompts))
        job.prepare(self._maker, self._texts, self._model, self._seed)
        return job


def _in_a_thread(make: Callable[[Given], Made], given: Iterator[Given], most: int) -> Generator[Made, None, None]:
    """Yield the result of `make` for each, in order; a thread makes up to `most` of them ahead."""
    with ThreadPoolExecutor(1, "lines") as thread:
        waiting: deque[Future[Made]] = deque(thread.submit(make, each) for each in islice(given, most))
        try:
            while waiting:
                made = waiting.popleft().result()
                waiting += (thread.submit(make, each) for each in islice(given, 1))
                yield made
        finally:
            for future in waiting:
                future.cancel()
