"""Simulates traffic on several replicas of a server."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from granite4_neuron.planning.simulation.engine import SimulatedEngine
from granite4_neuron.planning.simulation.statistics import Histogram
from granite4_neuron.planning.simulation.traffic import Arrival

_WORTH_PROCESSES = 20_000  # with fewer requests, starting several processes takes longer than it saves

NewEngine = Callable[[], SimulatedEngine]


@dataclass(frozen=True)
class Result:
    """The result of serving traffic with replicas. Times in seconds.

    replicas: their number. keeps_conversations: whether each conversation stays on one of them.
    requests: answered requests. refused: requests that were too long.
    seconds: from the first arrival to the last token.
    prompt_tokens, cached_tokens: tokens of prompts, and how many of them came from prefix caches.
    first_tokens: from arrivals to first tokens. gaps: between two tokens of an answer.
    waiting: mean number of requests that wait for a slot, over all replicas. most_waiting: the most on one replica.
    """

    replicas: int
    keeps_conversations: bool
    requests: int
    refused: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    first_tokens: Histogram
    gaps: Histogram
    waiting: float
    most_waiting: int

    @property
    def new_tokens(self) -> int:
        return self.first_tokens.count + self.gaps.count

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that came from prefix caches."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def million_tokens(self, price: float) -> float:
        """Return the cost of a million new tokens at the price of an hour of a replica."""
        hours = self.replicas * self.seconds / 3600
        return price * hours / self.new_tokens * 1e6 if self.new_tokens else float("inf")


@dataclass(frozen=True)
class _Served:
    """The result of one replica. ended: the clock after the last token. waited: as in `SimulatedEngine`."""

    ended: float
    refused: int
    prompt_tokens: int
    cached_tokens: int
    first_tokens: Histogram
    gaps: Histogram
    waited: float
    most_waiting: int


def simulate(
    arrivals: Sequence[Arrival],
    new_engine: NewEngine,
    fleets: Sequence[tuple[int, bool]],
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Result]:
    """Simulate the same traffic on each fleet.

    Args:
        arrivals: in order of their times; at least one.
        new_engine: makes a replica's engine; it can be pickled.
        fleets: for each, the number of replicas and whether conversations stay on their replica.
        processes: how many run at a time; replicas are independent.
        progress: called with the number of requests served so far and the number of all requests.
    """
    shares = [_shares(arrivals, *fleet) for fleet in fleets]
    work = [share for of_fleet in shares for share in of_fleet]
    if processes > 1 and len(work) > 1 and len(arrivals) >= _WORTH_PROCESSES:
        # Not forked: torch's threads do not survive a fork.
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            served = _counted(pool.map(_serve, work, [new_engine] * len(work)), work, progress)
    else:
        served = _counted(map(_serve, work, [new_engine] * len(work)), work, progress)
    of_replicas = iter(served)
    return [_result(arrivals, *fleet, [next(of_replicas) for _ in range(fleet[0])]) for fleet in fleets]


def _counted(
    served: Iterable[_Served], work: Sequence[Sequence[Arrival]], progress: Callable[[int, int], None]
) -> list[_Served]:
    """Collect the results of all replicas and report progress."""
    results, done, total = [], 0, sum(map(len, work))
    for result, share in zip(served, work, strict=True):
        results.append(result)
        done += len(share)
        progress(done, total)
    return results


def _shares(arrivals: Sequence[Arrival], replicas: int, keeps_conversations: bool) -> list[list[Arrival]]:
    """Return the requests of each replica: in turns, or for kept conversations by a hash."""
    shares: list[list[Arrival]] = [[] for _ in range(replicas)]
    turn = 0
    for arrival in arrivals:
        if keeps_conversations and arrival.conversation is not None:
            shares[zlib.crc32(str(arrival.conversation).encode()) % replicas].append(arrival)
        else:
            shares[turn % replicas].append(arrival)
            turn += 1
    return shares


def _serve(arrivals: Sequence[Arrival], new_engine: NewEngine) -> _Served:
    """Simulate one replica's requests."""
    engine = new_engine()
    runtime = engine.runtime
    for arrival in arrivals:
        while runtime.clock < arrival.time and engine.has_work:
            engine.advance(until=arrival.time)
        runtime.clock = max(runtime.clock, arrival.time)
        engine.arrive(arrival)
    while engine.has_work:
        engine.advance()
    return _Served(
        ended=runtime.clock,
        refused=engine.refused,
        prompt_tokens=engine.prompt_tokens,
        cached_tokens=engine.stats.cached_tokens,
        first_tokens=engine.first_tokens,
        gaps=engine.gaps,
        waited=engine.waited,
        most_waiting=engine.most_waiting,
    )


def _result(arrivals: Sequence[Arrival], replicas: int, keeps: bool, served: Sequence[_Served]) -> Result:
    first_tokens, gaps = Histogram(), Histogram()
    for each in served:
        first_tokens.merge(each.first_tokens)
        gaps.merge(each.gaps)
    seconds = max(each.ended for each in served) - arrivals[0].time
    return Result(
        replicas,
        keeps,
        requests=first_tokens.count,
        refused=sum(each.refused for each in served),
        seconds=seconds,
        prompt_tokens=sum(each.prompt_tokens for each in served),
        cached_tokens=sum(each.cached_tokens for each in served),
        first_tokens=first_tokens,
        gaps=gaps,
        waiting=sum(each.waited for each in served) / seconds if seconds else 0.0,
        most_waiting=max(each.most_waiting for each in served),
    )
