"""Latency of implementations at points, in turns, beside the machine's bound."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.latency.bound import Rates, decode_bytes, prefill_flops
from benchmarks.latency.implementations import (
    MACHINE,
    OURS,
    PLAIN,
    Point,
    Run,
    ask,
    weights_dtype,
    weights_format,
    worker_process,
)
from benchmarks.latency.neighbours import busy_processes
from benchmarks.latency.round_trip import load_round_trip
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.commands.options import dtype_of


@dataclass(frozen=True)
class Sample:
    """One run, in milliseconds: to the first token, and the mean of the steps after it.

    round_trips_ns: between two threads, just before and just after the run, see `round_trip`; None if unknown.
    """

    first_token_ms: float
    token_ms: float
    round_trips_ns: tuple[float | None, float | None]


@dataclass(frozen=True)
class Result:
    """One implementation at one point. Times are in milliseconds, over all repeats. Memory is the process's peak, and
    the peak without weights.

    machine_gflops and machine_gbytes_per_second are the machine's highest rates, measured between the runs. The shares
    of the bound are computed from them. All four are 0 on a device, whose rates are not measured.
    """

    implementation: str
    batch_size: int
    prompt_length: int
    output_length: int
    busy_processes: int  # beside it
    first_token_ms: float  # median
    token_ms_p50: float
    token_ms_p90: float
    token_ms_p99: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prefill_of_bound: float
    decode_of_bound: float
    machine_gflops: float
    machine_gbytes_per_second: float
    peak_memory_mib: float
    over_weights_mib: float
    samples: list[Sample]


def measure_all(folder: Path, options: argparse.Namespace) -> list[list[Result]]:
    """Measure every implementation at every point that the options ask for; return the results by point.

    The results of each point are also written to standard error at once.
    """
    points = [
        Point(batch_size, prompt_length, options.output_length)
        for batch_size in options.batch_size
        for prompt_length in options.prompt_length
    ]
    ours = PLAIN if options.cpu_kernels == "torch" else OURS
    names = [ours, *options.compare]
    round_trip = load_round_trip() if options.backend == "cpu" else lambda: None
    with Progress(console=Console(stderr=True), transient=True) as progress:
        results = []
        for point in progress.track(points, description="measuring"):
            results.append(_measure(folder, point, names, round_trip, options))
            for result in results[-1]:
                progress.console.print(_summary(result), soft_wrap=True)
        return results


def _summary(result: Result) -> str:
    return (
        f"{result.implementation}, batch {result.batch_size}, prompt {result.prompt_length}: "
        f"first token {result.first_token_ms:.1f} ms, further tokens {result.token_ms_p50:.2f} ms"
    )


def _measure(
    folder: Path, point: Point, names: list[str], round_trip: Callable[[], float | None], options: argparse.Namespace
) -> list[Result]:
    """Measure all implementations at one point in turns, alone and beside busy processes."""
    variants = [dataclasses.replace(point, busy_processes=number) for number in dict.fromkeys((0, options.busy))]
    runs: dict[tuple[str, Point], list[Run]] = {each: [] for each in itertools.product(names, variants)}
    rates: list[Rates] = []
    machine = [MACHINE] if options.backend == "cpu" else []
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker_process(name, folder, options)) for name in (*names, *machine)}
        for turn in range(options.warmup + options.repeats):
            for (name, variant), done in runs.items():
                before = round_trip()
                with busy_processes(variant.busy_processes):
                    run = ask(workers[name], name, variant, turn)
                done.append(dataclasses.replace(run, round_trips=(before, round_trip())))
            rates += [ask(workers[name], name, point, turn) for name in machine]
    rates = rates[options.warmup :]
    bound = least_seconds(folder, point, options, Rates.median(rates)) if rates else (0.0, 0.0)
    return [
        result_of(name, variant, done[options.warmup :], bound, Rates.median(rates) if rates else None)
        for (name, variant), done in runs.items()
    ]


def least_seconds(folder: Path, point: Point, options: argparse.Namespace, rates: Rates) -> tuple[float, float]:
    """Return the least seconds in which this machine could run the prompts, and one step of decode."""
    config = open_checkpoint(folder).config
    context = point.prompt_length + point.output_length // 2
    flops = point.batch_size * prefill_flops(config, point.prompt_length)
    dtype, quantize = weights_dtype(folder, options), weights_format(folder, options)
    state_itemsize = dtype_of(options.state_dtype or "float32").itemsize
    read = decode_bytes(config, dtype, point.batch_size, context, quantize, state_itemsize)
    return flops / rates.flops, read / rates.bytes


def result_of(
    name: str, point: Point, runs: list[Run], bound: tuple[float, float], rates: Rates | None = None
) -> Result:
    """Summarise runs.

    Args:
        bound: the least seconds for the prompts, and for one step of decode.
    """
    first = statistics.median(run.times[0] for run in runs)
    steps = sorted(after - before for run in runs for before, after in itertools.pairwise(run.times))

    def percentile(share: float) -> float:
        return steps[min(len(steps) - 1, int(share * len(steps)))] if steps else 0.0

    peak = max(run.peak_bytes for run in runs)
    return Result(
        implementation=name,
        **dataclasses.asdict(point),
        first_token_ms=1e3 * first,
        token_ms_p50=1e3 * percentile(0.5),
        token_ms_p90=1e3 * percentile(0.9),
        token_ms_p99=1e3 * percentile(0.99),
        prefill_tokens_per_second=point.batch_size * point.prompt_length / first,
        decode_tokens_per_second=point.batch_size / percentile(0.5) if steps else 0.0,
        prefill_of_bound=bound[0] / first,
        decode_of_bound=bound[1] / percentile(0.5) if steps else 0.0,
        machine_gflops=rates.flops / 1e9 if rates else 0.0,
        machine_gbytes_per_second=rates.bytes / 1e9 if rates else 0.0,
        peak_memory_mib=peak / 2**20,
        over_weights_mib=(peak - runs[0].weight_bytes) / 2**20,
        samples=[_sample(run) for run in runs],
    )


def _sample(run: Run) -> Sample:
    steps = len(run.times) - 1
    return Sample(
        first_token_ms=1e3 * run.times[0],
        token_ms=1e3 * (run.times[-1] - run.times[0]) / steps if steps else 0.0,
        round_trips_ns=tuple(None if seconds is None else 1e9 * seconds for seconds in run.round_trips),
    )
