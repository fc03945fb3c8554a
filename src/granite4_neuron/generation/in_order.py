"""Runs jobs that come one by one, many at a time, and gives them back in their order."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from granite4_neuron.engine import Engine, Output, Request
from granite4_neuron.engine.live_sequences import MOST_FAILED_STEPS
from granite4_neuron.errors import UserError
from granite4_neuron.generation.loop import shared_lengths


class Job(ABC):
    """Sequences that belong together.

    requests: theirs; none if there is nothing to run.
    """

    requests: Sequence[Request] = ()

    @abstractmethod
    def add(self, index: int, output: Output) -> None:
        """Take an output of the request of this index."""

    @abstractmethod
    def refuse(self, error: UserError) -> None:
        """Take the error of an engine that does not take the requests; none of them gets an output any more."""


AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(eq=False)
class _Taken(Generic[AnyJob]):
    """A job that has not been given back. unfinished: how many of its sequences have not ended."""

    job: AnyJob
    unfinished: int


class InOrder(Generic[AnyJob]):
    """Runs jobs from an iterator of any length; memory does not grow.

    Args:
        new_engine: returns an engine for sequences of the given number of tokens. It is called for the first job, and
            again for a job that is longer than the engine has room for: with at least twice as many tokens, once the
            engine has no more work.
        longest: of the model's sequences, in tokens.
        portion: how many jobs are taken at a time. Prompts of a portion run in sorted order, so that those with the
            same beginning are neighbours.
        look_ahead: how many jobs may have been taken and not given back.
        shares_prefixes: whether the engine has a prefix cache, which then keeps the prefixes that prompts of a portion
            share.
    """

    def __init__(
        self,
        new_engine: Callable[[int], Engine],
        *,
        longest: int,
        portion: int,
        look_ahead: int,
        shares_prefixes: bool,
    ):
        self._new_engine = new_engine
        self._longest = longest
        self._portion = portion
        self._look_ahead = look_ahead
        self._shares_prefixes = shares_prefixes
        self._engine: Engine | None = None
        self._taken: deque[_Taken[AnyJob]] = deque()  # in their order
        self._waiting: deque[_Taken[AnyJob]] = deque()  # those that the engine does not have yet
        self._running: dict[int, tuple[_Taken[AnyJob], int]] = {}  # with the request's index, by the engine's ids

    def run(self, jobs: Iterator[AnyJob]) -> Generator[AnyJob, None, None]:
        """Yield the jobs in their order, each once its sequences have ended; raise UserError if the device is lost."""
        has_more = True
        try:
            while True:
                while has_more and len(self._taken) + self._portion <= self._look_ahead:
                    portion = list(itertools.islice(jobs, self._portion))
                    has_more = len(portion) == self._portion
                    self._take(portion)
                self._admit()
                self._step()
                while self._taken and not self._taken[0].unfinished:
                    yield self._taken.popleft().job
                if not self._taken and not has_more:
                    return
        finally:  # the caller may stop early, and the prefix cache and the drafter outlive the engine
            self._cancel(list(self._running))

    def _take(self, jobs: Sequence[AnyJob]) -> None:
        new = [_Taken(job, len(job.requests)) for job in jobs]
        self._taken += new
        waiting = sorted((each for each in new if each.unfinished), key=_prompt)
        if self._shares_prefixes:
            shared = shared_lengths(list(map(_prompt, waiting)))
            for each, at in zip(waiting, shared, strict=True):
                # The lengths are of the first prompt; others of the job may be shorter.
                each.job.requests = [
                    replace(request, snapshots_at=at) if list(request.tokens) == _prompt(each) else request
                    for request in each.job.requests
                ]
        self._waiting += waiting

    def _admit(self) -> None:
        """Give the engine the jobs that it has room for."""
        longest = max(map(self._length, self._waiting), default=0)
        room = 0 if self._engine is None else self._engine.max_length
        if not self._running and longest > room:
            self._engine = None  # its memory first
            self._engine = self._new_engine(min(max(longest, 2 * room), self._longest))
            room = self._engine.max_length
        while self._waiting and self._length(self._waiting[0]) <= room:
            self._add(self._waiting.popleft())

    def _length(self, taken: _Taken[AnyJob]) -> int:
        """Return the most tokens of a sequence of the job."""
        return min(max(len(each.tokens) + each.max_tokens for each in taken.job.requests), self._longest)

    def _add(self, taken: _Taken[AnyJob]) -> None:
        assert self._engine is not None  # there is room for it
        ids: list[int] = []
        try:
            for index, request in enumerate(taken.job.requests):
                ids.append(self._engine.add(request))
                self._running[ids[-1]] = taken, index
        except UserError as error:
            self._cancel(ids)
            taken.unfinished = 0
            taken.job.refuse(error)

    def _step(self) -> None:
        if self._engine is None or not self._engine.has_work:
            return
        outputs = self._engine.step()
        if self._engine.failed_steps >= MOST_FAILED_STEPS:
            error = next((output.error for output in outputs if output.error is not None), "there is no message.")
            raise UserError(f"the last {MOST_FAILED_STEPS} steps have failed: {error}")
        for output in outputs:
            taken, index = self._running[output.id]
            if output.finish_reason is not None:
                del self._running[output.id]
                taken.unfinished -= 1
            taken.job.add(index, output)

    def _cancel(self, ids: Sequence[int]) -> None:
        for id in ids:
            assert self._engine is not None  # it has them
            self._engine.cancel(id)
            del self._running[id]


def _prompt(taken: _Taken[AnyJob]) -> list[int]:
    return list(taken.job.requests[0].tokens)
