"""Savings of speculation and of kept prompts. Each takes turns with the same work without it, on the same runtime."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from granite4_neuron.engine import Engine, GenerationStats, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import Drafter
from granite4_neuron.runtime.interface import Row, Runtime
from granite4_neuron.state.snapshot import Snapshot

AGAIN = 16  # fewer tokens might begin several texts


@dataclass(frozen=True)
class Speculation:
    """The measurements of one batch. Rates are tokens per second of decode, times are medians in milliseconds.

    verify_ms: time to verify `draft_tokens` + 1 tokens of each sequence and commit.
    decode_ms: time of a step of one token of each sequence.
    """

    batch_size: int
    draft_tokens: int
    plain_rate: float
    rate: float
    acceptance_rate: float
    tokens_per_step: float
    decode_ms: float
    verify_ms: float


@dataclass(frozen=True)
class KeptPrompt:
    """Times to the first token of one prompt, medians in milliseconds; second_ms is with a file of an earlier run."""

    prompt_length: int
    first_ms: float
    second_ms: float


def measure_speculation(
    runtime: Runtime,
    new_drafter: Callable[[], Drafter],
    draft_tokens: int,
    prompts: Sequence[Sequence[int]],
    output_length: int,
    warmup: int,
    repeats: int,
) -> Speculation:
    """Measure greedy decode of a batch with and without drafts."""
    plain, drafted = [], []
    for _ in range(warmup + repeats):
        plain.append(_generate(runtime, prompts, output_length))
        options = dict(drafter=new_drafter(), draft_tokens=draft_tokens)
        drafted.append(_generate(runtime, prompts, output_length, **options))
    decode_ms, verify_ms = _steps(runtime, prompts, draft_tokens + 1, warmup, 10 * repeats)
    return Speculation(
        batch_size=len(prompts),
        draft_tokens=draft_tokens,
        plain_rate=statistics.median(stats.decode_tokens_per_second for stats in plain[warmup:]),
        rate=statistics.median(stats.decode_tokens_per_second for stats in drafted[warmup:]),
        acceptance_rate=drafted[-1].acceptance_rate,
        tokens_per_step=drafted[-1].decode_tokens_per_row,
        decode_ms=decode_ms,
        verify_ms=verify_ms,
    )


def measure_kept_prompt(runtime: Runtime, prompt: Sequence[int], warmup: int, repeats: int) -> KeptPrompt:
    """Measure one prompt from its tokens, and from a file with its saved state. The time includes reading the file."""
    first, second = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt"
        for _ in range(warmup + repeats):
            for times in (first, second):
                started = time.perf_counter()
                cache = PrefixCache(runtime, None, None)
                if times is second:
                    cache.load(Snapshot.load(file, runtime))
                _generate(runtime, [prompt], 1, prefix_cache=cache)
                times.append(1e3 * (time.perf_counter() - started))
                cache.export(prompt).save(file)
    return KeptPrompt(len(prompt), *(statistics.median(times[warmup:]) for times in (first, second)))


def recitation(runtime: Runtime, beginning: Sequence[int], length: int) -> list[int]:
    """Return a prompt of this length after which a model repeats itself: its own text, and the text's beginning."""
    text = list(beginning)
    engine = Engine(runtime, 1)
    engine.add(Request(text, max(1, length - AGAIN - len(text))))
    while engine.has_work:
        text += [output.token for output in engine.step()]
    return [*text, *text[:AGAIN]][-length:]


def _generate(
    runtime: Runtime, prompts: Sequence[Sequence[int]], output_length: int, **options: object
) -> GenerationStats:
    longest = max(map(len, prompts)) + output_length
    engine = Engine(runtime, len(prompts), max_length=longest, prompts_first=True, **options)
    for prompt in prompts:
        engine.add(Request(prompt, output_length))
    while engine.has_work:
        engine.step()
    return engine.stats


def _steps(
    runtime: Runtime, prompts: Sequence[Sequence[int]], tokens: int, warmup: int, repeats: int
) -> tuple[float, float]:
    """Return the milliseconds of a step of decode, and of a verification with its commit, after the prompts."""
    state = runtime.allocate(len(prompts), max(map(len, prompts)) + tokens)
    for slot, prompt in enumerate(prompts, start=1):
        for start in range(0, len(prompt), runtime.tokens_per_step):
            runtime.step(state, [Row(slot, start, prompt[start : start + runtime.tokens_per_step])])
    one, several = (
        [Row(slot, len(prompt), [prompt[0]] * count) for slot, prompt in enumerate(prompts, start=1)]
        for count in (1, tokens)
    )

    def decode() -> None:
        runtime.step(state, one)

    def verify() -> None:
        runtime.commit(state, runtime.verify(state, several), [tokens] * len(several))

    times: dict[Callable[[], None], list[float]] = {decode: [], verify: []}
    for _ in range(warmup + repeats):
        for work, work_times in times.items():
            started = time.perf_counter()
            work()
            work_times.append(1e3 * (time.perf_counter() - started))
    return tuple(statistics.median(work_times[warmup:]) for work_times in times.values())
