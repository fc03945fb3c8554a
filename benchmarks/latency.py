"""Latency of implementations at points, which take turns, beside what the machine does at most."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.bound import Rates, decode_bytes, prefill_flops
from benchmarks.implementations import MACHINE, OURS, PLAIN, Point, ask, weights_dtype, worker_process
from granite4_neuron.commands.options import dtype_of
from granite4_neuron.config import GraniteMoeHybridConfig


@dataclass(frozen=True)
class Result:
    """One implementation at one point. Times are in milliseconds, over all repeats; memory is the process's peak.

    machine_gflops and machine_gbytes_per_second are what the machine does at most, measured in between; the shares of
    the bound are computed from them. All four are 0 where the machine is not this processor.
    """

    implementation: str
    batch_size: int
    prompt_length: int
    output_length: int
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


def measure_all(folder: Path, options: argparse.Namespace) -> list[Result]:
    """Every implementation at every point that the options ask for."""
    points = [
        Point(batch_size, prompt_length, options.output_length)
        for batch_size in options.batch_size
        for prompt_length in options.prompt_length
    ]
    ours = PLAIN if options.cpu_kernels == "torch" else OURS
    names = [ours, options.compare] if options.compare else [ours]
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for point in progress.track(points, description="measuring"):
            results += _measure(folder, point, names, options)
    return results


def _measure(folder: Path, point: Point, names: list[str], options: argparse.Namespace) -> list[Result]:
    """All implementations at one point, taking turns."""
    machine = [MACHINE] if options.backend == "cpu" else []
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker_process(name, folder, options)) for name in (*names, *machine)}
        runs: dict[str, list] = {name: [] for name in workers}
        peaks = dict.fromkeys(workers, 0)
        for turn in range(options.warmup + options.repeats):
            for name, worker in workers.items():
                run, peaks[name] = ask(worker, name, point, turn)
                if turn >= options.warmup:
                    runs[name].append(run)
    rates = Rates.median(runs[MACHINE]) if machine else None
    bound = least_seconds(folder, point, options, rates) if rates else (0.0, 0.0)
    return [result_of(name, point, runs[name], peaks[name], bound, rates) for name in names]


def least_seconds(folder: Path, point: Point, options: argparse.Namespace, rates: Rates) -> tuple[float, float]:
    """The seconds that this machine needs at the least for the prompts, and for one step of decode."""
    config = GraniteMoeHybridConfig.from_file(folder / "config.json")
    context = point.prompt_length + point.output_length // 2
    flops = point.batch_size * prefill_flops(config, point.prompt_length)
    is_quantized = options.quantize is not None
    state_itemsize = (dtype_of(options.state_dtype) or torch.float32).itemsize
    read = decode_bytes(config, weights_dtype(folder, options), point.batch_size, context, is_quantized, state_itemsize)
    return flops / rates.flops, read / rates.bytes


def result_of(
    name: str,
    point: Point,
    runs: list[list[float]],
    peak: int,
    bound: tuple[float, float],
    rates: Rates | None = None,
) -> Result:
    """What `runs`, each the moments of all tokens in seconds, come to.

    Args:
        peak: bytes of memory.
        bound: the least seconds for the prompts, and for one step of decode.
    """
    first = statistics.median(times[0] for times in runs)
    steps = sorted(after - before for times in runs for before, after in itertools.pairwise(times))

    def percentile(share: float) -> float:
        return steps[min(len(steps) - 1, int(share * len(steps)))] if steps else 0.0

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
    )
