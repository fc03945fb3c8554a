"""Traces of requests whose prompts share beginnings, for benchmarks of prefix caches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Tokens = list[int]


@dataclass(frozen=True)
class Turn:
    """A request of a session. Its prompt is the session's tokens so far, prompts and answers, and then `new`.

    time: in seconds. Turns are sorted by it.
    """

    session: int
    time: float
    new: Tokens
    answer_length: int


@dataclass(frozen=True)
class Sizes:
    """sessions: the number of sessions per trace; a trace of single questions has four questions for each.
    lengths: factor on all lengths of prompts and answers, 1 for the published lengths.
    longest_answer: in tokens; None for no limit.
    """

    sessions: int
    lengths: float
    longest_answer: int | None
    vocab_size: int


class Chance:
    """Random tokens, lengths and times."""

    def __init__(self, seed: int, sizes: Sizes):
        self._random = random.Random(seed)
        self._sizes = sizes

    def tokens(self, length: float) -> Tokens:
        """Return random tokens, this many times the factor of lengths."""
        return self._random.choices(range(3, self._sizes.vocab_size), k=self._scaled(length))

    def length(self, mean: float) -> int:
        """Draw a length from a log-normal distribution whose logarithm has a standard deviation of 0.8."""
        deviation = 0.8
        return max(1, round(mean * self._random.lognormvariate(-(deviation**2) / 2, deviation)))

    def answer(self, mean: float) -> int:
        """Draw the length of an answer, at least 2."""
        return max(2, min(self._scaled(self.length(mean)), self._sizes.longest_answer or math.inf))

    def turns(self, least: int, mean: float) -> int:
        """Draw a number of turns: `least`, plus a geometric number so that the mean is `mean`."""
        more = mean - least
        return least + (int(math.log(1 - self._random.random()) / math.log(more / (1 + more))) if more else 0)

    def arrivals(self, per_second: float) -> Iterator[float]:
        """Return the times of a Poisson process."""
        time = 0.0
        while True:
            yield time
            time += self._random.expovariate(per_second)

    def pause(self, mean: float) -> float:
        return self._random.expovariate(1 / mean)

    def choice(self, number: int) -> int:
        return self._random.randrange(number)

    def _scaled(self, length: float) -> int:
        return max(1, round(length * self._sizes.lengths))


def conversations(chance: Chance, sessions: int) -> Iterator[Turn]:
    """Conversations with a person.

    Marconi's evaluation takes conversations of at least ten turns from ShareGPT and LMSYS-Chat-1M, one per second, and
    pauses for the time to type the next message at 90 words per minute (half a second per token). Messages of 161
    tokens and answers of 338 are ShareGPT's means (PagedAttention, SOSP 2023).
    """
    for session, time in enumerate(itertools.islice(chance.arrivals(1), sessions)):
        for turn in range(chance.turns(10, 14)):
            length = chance.length(161)
            time += 0.5 * length * (turn > 0)
            yield Turn(session, time, chance.tokens(length), chance.answer(338))


def agents(chance: Chance, sessions: int) -> Iterator[Turn]:
    """Agents of one kind: a system message with tools that all share, and steps with what the tools returned.

    Marconi's evaluation takes runs of SWE-agent, 0.5 sessions per second and 5 seconds between steps, among others.
    Prompts of 8,596 tokens and answers of 182 are the means of Mooncake's trace of tools and agents (FAST 2025).
    """
    system = chance.tokens(5000)
    for session, time in enumerate(itertools.islice(chance.arrivals(0.5), sessions)):
        for turn in range(chance.turns(1, 8)):
            tail = chance.tokens(chance.length(600))
            yield Turn(session, time, tail if turn else [*system, *tail], chance.answer(182))
            time += chance.pause(5)


def few_shot(chance: Chance, sessions: int) -> Iterator[Turn]:
    """Questions that follow examples of their task. Answers are a letter and the end of the text.

    MMLU has 57 tasks of five examples. Here there is a task for every eighth question. Examples have 700 tokens and
    questions 90 on average.
    """
    tasks = [chance.tokens(chance.length(700)) for _ in range(max(2, sessions // 2))]
    for session, time in enumerate(itertools.islice(chance.arrivals(4), 4 * sessions)):
        task = tasks[chance.choice(len(tasks))]
        yield Turn(session, time, [*task, *chance.tokens(chance.length(90))], 2)


def shift(chance: Chance, sessions: int) -> Iterator[Turn]:
    """Prompts of 2,200 tokens that share their first 1,600 or 1,500. A cache with long blocks that keeps the state at a
    block's end finds all of these or none (vLLM's issue 45238). A prefix belongs to 16 prompts.
    """
    prefixes = [chance.tokens(1600) for _ in range(math.ceil(sessions / 4))]
    for session, time in enumerate(itertools.islice(chance.arrivals(1), 4 * sessions)):
        prefix = prefixes[chance.choice(len(prefixes))]
        shared = prefix[: len(prefix) * 15 // 16] if chance.choice(2) else prefix
        yield Turn(session, time, [*shared, *chance.tokens(600 if shared is prefix else 700)], chance.answer(16))


TRACES: Mapping[str, Callable[[Chance, int], Iterator[Turn]]] = {
    "conversations": conversations,
    "agents": agents,
    "few-shot": few_shot,
    "shift": shift,
}


def trace(name: str, sizes: Sizes, seed: int) -> list[Turn]:
    """Return the turns of all sessions in order of their times."""
    return sorted(TRACES[name](Chance(seed, sizes), sizes.sessions), key=lambda turn: turn.time)


def replay(turns: Sequence[Turn], serve: Callable[[Tokens, int], Tokens]) -> None:
    """Serve the prompts of a trace one after another.

    Args:
        serve: takes a prompt and the length of its answer, and returns the answer, which the session's next prompt has.
    """
    sessions: dict[int, Tokens] = {}
    for turn in turns:
        prompt = [*sessions.get(turn.session, ()), *turn.new]
        sessions[turn.session] = [*prompt, *serve(prompt, turn.answer_length)]
