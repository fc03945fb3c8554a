"""The time of prompts and of decode, part by part."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table

from benchmarks.latency.implementations import Point, cpu_runtime, random_prompts
from granite4_neuron import stream_generate
from granite4_neuron.commands.output import print_table
from granite4_neuron.devices.cpu.runtime import CPURuntime


class PartTimes(NamedTuple):
    """A part's time in seconds: wall time, and busy time summed over all threads."""

    seconds: float
    busy_seconds: float


Phase = dict[str, PartTimes]
REST, ALL = "Python, embedding, sampling", "all"


def take_profile(on: bool) -> Phase:
    """Turn profiling of the fused kernels on or off; return the times since the last call, by part.

    There is one profile for all threads; it is meant for a program that calls kernels from one thread.
    """
    parts, *times = torch.ops.granite4_neuron.profile(on)
    return dict(zip(parts, map(PartTimes, *times), strict=True))


def print_profiles(folder: Path, options: argparse.Namespace) -> None:
    """Print the parts of every point that the options ask for."""
    torch.set_num_threads(options.threads)
    runtime = cpu_runtime(folder, options)
    for batch_size in options.batch_size:
        for prompt_length in options.prompt_length:
            point = Point(batch_size, prompt_length, options.output_length)
            runs = [profile(runtime, point, turn) for turn in range(options.warmup + options.repeats)]
            phases = [_mean(runs) for runs in zip(*runs[options.warmup :], strict=True)]
            print_table(_table(f"batch {batch_size}, prompt {prompt_length}, {options.threads} threads", phases))


def profile(runtime: CPURuntime, point: Point, turn: int) -> tuple[Phase, Phase]:
    """Run a point; return the parts up to the first tokens, and those of each further step on average."""
    prompts, limits = random_prompts(runtime.config.vocab_size, point, turn), dict(max_tokens=point.output_length)
    tokens = stream_generate(runtime, None, prompts, temperature=0, ignore_eos=True, **limits)
    take_profile(True)
    started = time.perf_counter()
    for _ in prompts:
        next(tokens)
    first, started = _since(started), time.perf_counter()
    for _ in tokens:
        pass
    phases = first, _since(started, steps=max(1, point.output_length - 1))
    take_profile(False)
    return phases


def _since(started: float, steps: int = 1) -> Phase:
    """Return the average parts of the `steps` steps since then."""
    seconds, parts = time.perf_counter() - started, take_profile(True)
    rest = seconds - sum(part.seconds for part in parts.values())
    parts |= {REST: PartTimes(rest, rest)}
    parts |= {ALL: _sum(parts.values())}
    return {name: PartTimes(part.seconds / steps, part.busy_seconds / steps) for name, part in parts.items()}


def _sum(parts: Iterable[PartTimes]) -> PartTimes:
    return PartTimes(*map(sum, zip(*parts, strict=True)))


def _mean(runs: tuple[Phase, ...]) -> Phase:
    sums = {name: _sum(run[name] for run in runs) for name in runs[0]}
    return {name: PartTimes(*(total / len(runs) for total in part)) for name, part in sums.items()}


def _table(title: str, phases: list[Phase]) -> Table:
    table = Table("", title=title)
    for phase in ("prompt", "token"):
        for column in (f"{phase} ms", "share", "threads"):
            table.add_column(column, justify="right")
    for name in phases[0]:
        cells = []
        for phase in phases:
            part = phase[name]
            threads = part.busy_seconds / part.seconds if part.seconds else 0
            cells += [f"{1e3 * part.seconds:.2f}", f"{part.seconds / phase[ALL].seconds:.0%}", f"{threads:.1f}"]
        table.add_row(name, *cells, end_section=name == REST)
    return table
