"""Measures step times on this machine, for `planning.simulation.measured_steps`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.planning.simulation.measured_steps import Measured
from granite4_neuron.runtime.interface import Runtime
from granite4_neuron.runtime.prompt_cuts import as_json

_STEPS = 6  # timed steps of decode
_NEW_TOKENS = 16  # per sequence, so that none ends during the measurement
_TURNS = 3
_SHORT = 64  # the least number of tokens before a step of decode
_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # shares of the most tokens of a step


def measure(
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast,
    *,
    model: str,
    backend: str,
    machine: str,
    most_rows: int,
    longest: int,
    sampling: Mapping[str, Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measure steps as an engine runs them: with the choice of tokens and their text.

    Args:
        model, backend, machine: their names.
        most_rows: sequences at a time.
        longest: tokens of a sequence.
        sampling: options of the requests, such as "temperature".
        progress: called with the number of measurements done and the number of all measurements.
        clock: tells the time in seconds.
    """
    meter = _Meter(runtime, tokenizer, longest, sampling, clock)
    last = max(1, longest - _NEW_TOKENS)
    all_rows, contexts = _doubling(1, most_rows), _doubling(min(_SHORT, last), last)
    shapes = list(_prompt_shapes(runtime, longest))
    total, done = len(all_rows) * len(contexts) + len(shapes) + 2, 0

    def count(measured):
        nonlocal done
        done += 1
        progress(done, total)
        return measured

    decode = [(rows, context, count(meter.decode(rows, context))) for context in contexts for rows in all_rows]
    prompts = [(rows, tokens, count(meter.prompts(rows, tokens))) for rows, tokens in shapes]
    chunks = count(meter.chunks())
    snapshots, restores = count(meter.copies(contexts))
    return Measured(
        model=model,
        dtype=str(runtime.dtype).removeprefix("torch."),
        state_dtype=str(runtime.state_dtype).removeprefix("torch."),
        backend=backend,
        machine=machine,
        sampling=dict(sampling),
        config=runtime.config.to_dict(),
        tokens_per_step=runtime.tokens_per_step,
        rows_per_step=runtime.rows_per_step,
        prompt_cuts=as_json(runtime.prompt_cuts),
        packs_rows=runtime.packs_rows,
        max_length=longest,
        decode=sorted(decode),
        prompts=sorted(prompts),
        contexts=chunks,
        snapshots=snapshots,
        restores=restores,
    )


class _Meter:
    """Times steps of engines, and a runtime's copies. Prompts are random tokens."""

    def __init__(
        self,
        runtime: Runtime,
        tokenizer: PreTrainedTokenizerFast,
        longest: int,
        sampling: Mapping[str, Any],
        clock: Callable[[], float],
    ):
        self._clock = clock
        self._sampling = sampling
        self._runtime = runtime
        self._tokenizer = tokenizer
        self._longest = longest
        self._chance = random.Random(0)

    def decode(self, rows: int, context: int) -> float:
        """Return the median seconds of a step of single tokens, after about `context` tokens of each sequence."""
        prompt = self._prompt(context)
        # Only the first sequence runs its prompt; the others begin with a copy of its state.
        engine = self._engine(rows, PrefixCache(self._runtime, None, None))
        for _ in range(rows):
            engine.add(self._request(prompt, _NEW_TOKENS))
        while engine.stats.generated_tokens < rows:
            engine.step()
        engine.step()
        return statistics.median(self._seconds(engine.step) for _ in range(_STEPS))

    def prompts(self, rows: int, tokens: int) -> float:
        """Return the median seconds of a step at the beginning of prompts, in slots that other sequences have left."""
        engine = self._engine(rows)
        self._prompt_seconds(engine, rows, tokens)  # the system hands out memory when it is first written
        return statistics.median(self._prompt_seconds(engine, rows, tokens) for _ in range(_TURNS))

    def chunks(self) -> list[tuple[int, float]]:
        """Return (earlier tokens, seconds) for each whole step of a long prompt."""
        chunk = self._runtime.tokens_per_step
        count = (self._longest - 1) // chunk
        if not count:
            return []
        engine, turns = self._engine(1), []
        for _ in range(1 + _TURNS):
            # Cuts, because a step would be longer where no cut is asked for and nothing else runs.
            cuts = range(chunk, count * chunk, chunk)
            engine.add(self._request(self._prompt(count * chunk), 1, cuts))
            turns.append([self._seconds(engine.step) for _ in range(count)])
        counted = zip(*turns[1:], strict=True)  # not the first, as in `prompts`
        return [(chunk * at, statistics.median(seconds)) for at, seconds in enumerate(counted)]

    def copies(self, lengths: Sequence[int]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return (length, seconds) of taking and of restoring snapshots."""
        state = self._runtime.allocate(1, self._longest)
        snapshots, restores = [], []
        for length in lengths:
            taken = [self._seconds(partial(self._runtime.snapshot, state, 1, length)) for _ in range(_TURNS)]
            kept = self._runtime.snapshot(state, 1, length)
            brought = [self._seconds(partial(self._runtime.restore, state, [kept], 1)) for _ in range(_TURNS)]
            snapshots.append((length, statistics.median(taken)))
            restores.append((length, statistics.median(brought)))
        return snapshots, restores

    def _prompt_seconds(self, engine: Engine, rows: int, tokens: int) -> float:
        for _ in range(rows):
            engine.add(self._request(self._prompt(tokens), 1))
        return self._seconds(engine.step)

    def _engine(self, rows: int, cache: PrefixCache | None = None) -> Engine:
        engine = Engine(self._runtime, rows, max_length=self._longest, tokenizer=self._tokenizer, prefix_cache=cache)
        engine.warm_up()
        return engine

    def _prompt(self, tokens: int) -> list[int]:
        return self._chance.choices(range(1, self._runtime.config.vocab_size), k=tokens)

    def _seconds(self, call: Callable[[], object]) -> float:
        started = self._clock()
        call()
        return self._clock() - started

    def _request(self, prompt: Sequence[int], new_tokens: int, cuts: Sequence[int] = ()) -> Request:
        return Request(prompt, max_tokens=new_tokens, stop_token_ids=[], snapshots_at=cuts, **self._sampling)


def _prompt_shapes(runtime: Runtime, longest: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of rows and of tokens of each row that fit into a step."""
    for rows in _doubling(1, runtime.rows_per_step):
        most = min(runtime.tokens_per_step // rows, longest - 1)
        for tokens in sorted({1, most, *(round(share * most) for share in _SHARES)} - {0}):
            yield rows, tokens


def _doubling(least: int, most: int) -> list[int]:
    """Return `least`, twice `least` and so on, and `most` at the end."""
    numbers = [least]
    while 2 * numbers[-1] < most:
        numbers.append(2 * numbers[-1])
    return numbers if numbers[-1] == most else [*numbers, most]
