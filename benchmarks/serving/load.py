"""Load on an OpenAI-compatible server: requests, their times, and the times at which their tokens arrive."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from granite4_neuron.errors import UserError
from granite4_neuron.planning.simulation.lengths import Lengths


@dataclass(frozen=True)
class Question:
    """prompt: token ids. new_tokens: the exact number of new tokens requested."""

    prompt: Sequence[int]
    new_tokens: int


@dataclass
class Answer:
    """Times in seconds. chunk_times: when each part of the stream came. tokens: as the server counts them."""

    started: float
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str | None = None

    @property
    def first_token_ms(self) -> float:
        return 1e3 * (self.chunk_times[0] - self.started)

    @property
    def per_token_ms(self) -> float:
        """Mean time per token after the first; NaN if there is only one."""
        after = self.tokens - 1
        return 1e3 * (self.chunk_times[-1] - self.chunk_times[0]) / after if after > 0 else math.nan

    @property
    def total_ms(self) -> float:
        return 1e3 * (self.chunk_times[-1] - self.started)

    @property
    def between_tokens_ms(self) -> list[float]:
        return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(self.chunk_times)]


@dataclass(frozen=True)
class Run:
    """All answers, and the seconds from the first question to the last token."""

    answers: Sequence[Answer]
    seconds: float


def random_tokens(number: int, vocab_size: int, chance: random.Random) -> list[int]:
    return [chance.randrange(1, vocab_size) for _ in range(number)]


def questions(
    number: int,
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    prefix: Sequence[int],
    vocab_size: int,
    chance: random.Random,
) -> list[Question]:
    """Return prompts of a common prefix followed by random tokens."""
    drawn = []
    for _ in range(number):
        own = random_tokens(max(1, prompt_lengths.draw(chance) - len(prefix)), vocab_size, chance)
        drawn.append(Question([*prefix, *own], output_lengths.draw(chance)))
    return drawn


async def ask_all(
    address: str,
    asked: Sequence[Question],
    concurrency: int | None,
    request_rate: float | None,
    seed: int,
    sampling: Mapping[str, float],
) -> Run:
    """Send questions to a server.

    Args:
        address: address of its API, such as http://127.0.0.1:8000/v1.
        asked: the questions, in this order.
        concurrency: questions at a time; None for no limit.
        request_rate: questions per second on average, as a Poisson process; None for as soon as possible.
        seed: of the moments at which it sends them.
        sampling: options of the requests, such as "temperature".

    Raises:
        UserError: no server answers at the address.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        model = await _model(client, address)
        places = asyncio.Semaphore(concurrency or len(asked))
        started = time.perf_counter()

        async def ask(question: Question, moment: float) -> Answer:
            await asyncio.sleep(moment - (time.perf_counter() - started))
            async with places:
                return await _ask(client, address, model, question, sampling)

        answers = await asyncio.gather(*map(ask, asked, moments(len(asked), request_rate, seed)))
        return Run(answers, time.perf_counter() - started)


def moments(number: int, request_rate: float | None, seed: int) -> Iterator[float]:
    """Yield the time in seconds at which `ask_all` sends each question."""
    chance, moment = random.Random(seed), 0.0
    for _ in range(number):
        yield moment
        moment += chance.expovariate(request_rate) if request_rate else 0.0


async def _model(client: httpx.AsyncClient, address: str) -> str:
    try:
        response = await client.get(f"{address}/models")
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
        raise UserError(
            f"no OpenAI-compatible server answers at {address}; give it like http://HOST:PORT/v1."
        ) from None


async def _ask(
    client: httpx.AsyncClient, address: str, model: str, question: Question, sampling: Mapping[str, float]
) -> Answer:
    body = {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": question.new_tokens,
        **sampling,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(time.perf_counter())
    try:
        async with client.stream("POST", f"{address}/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                answer.error = f"status {response.status_code}: {response.text[:200]}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take_in(answer, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.chunk_times and answer.error is None:
        answer.error = "no token came"
    return answer


def _take_in(answer: Answer, event: dict) -> None:
    if "error" in event:
        answer.error = str(event["error"])
    if event.get("choices"):
        answer.chunk_times.append(time.perf_counter())
        answer.tokens = max(answer.tokens, len(answer.chunk_times))
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
