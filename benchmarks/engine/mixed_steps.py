"""The time of steps with a piece of a prompt and other sequences' next tokens, beside steps with only one of the two.

    python -m benchmarks.engine.mixed_steps h-350m
    python -m benchmarks.engine.mixed_steps h-350m --pieces 16 64 --rows 8 --threads 2 --profile

The weights are random, in bfloat16. Steps take turns, and times are medians. With one thread they are this process's
CPU time, which other programs change little; with more threads, wall-clock time. A mixed step reads the weights
once, so it should take less time than its parts together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.table import Table

from benchmarks.errors import reports_errors
from benchmarks.latency.profiles import take_profile
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.runtime.interface import Row

_PROMPT_START, _TEXT_START = 256, 640  # the sequences' lengths when steps are timed


class _Steps(NamedTuple):
    """Steps of one kind: `rows` next tokens, beside `piece` tokens of a prompt."""

    rows: int
    piece: int

    def of(self, runtime: CPURuntime) -> list[Row]:
        token = runtime.config.vocab_size // 2
        rows = [Row(slot, _TEXT_START, [token + slot]) for slot in range(1, self.rows + 1)]
        if self.piece:
            rows.append(Row(self.rows + 1, _PROMPT_START, range(token, token + self.piece)))
        return rows


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the family member")
    parser.add_argument("--pieces", type=at_least(1), nargs="+", default=[16, 32, 50, 64, 128, 512], metavar="TOKENS")
    parser.add_argument("--rows", type=at_least(1), default=8, help="next tokens in a step (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=1, help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=7, help="default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="also print the parts of each kind of step")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = random_model(published_config(options.name), dtype=torch.bfloat16)
    runtime = CPURuntime(model, None)
    alone = [_Steps(0, piece) for piece in options.pieces]
    mixed = [_Steps(options.rows, piece) for piece in options.pieces]
    decode = _Steps(options.rows, 0)
    times, parts = _measure(runtime, [_Steps(1, 0), decode, *alone, *mixed], options)
    _print(times, decode, options)
    if options.profile:
        _print_parts(parts, options)
    return 0


def _measure(
    runtime: CPURuntime, kinds: Sequence[_Steps], options: argparse.Namespace
) -> tuple[dict[_Steps, float], dict[_Steps, dict[str, float]]]:
    """Return each kind's milliseconds, and those of its parts."""
    state = runtime.allocate(options.rows + 1, _TEXT_START + runtime.tokens_per_step)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    times: dict[_Steps, list[float]] = {kind: [] for kind in kinds}
    parts: dict[_Steps, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for turn in range(1 + options.repeats):
        for kind in kinds:
            rows = kind.of(runtime)
            take_profile(True)
            started = clock()
            runtime.step(state, rows)
            seconds = clock() - started
            if turn > 0:
                times[kind].append(1e3 * seconds)
                parts[kind].append({name: 1e3 * part.seconds for name, part in take_profile(False).items()})
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    median_parts = {
        kind: {name: statistics.median(turn[name] for turn in each) for name in each[0]} for kind, each in parts.items()
    }
    return medians, median_parts


def _print(times: dict[_Steps, float], decode: _Steps, options: argparse.Namespace) -> None:
    clock = "processor's time" if options.threads == 1 else f"{options.threads} threads"
    title = f"{options.name}, {clock}: 1 token {times[_Steps(1, 0)]:.1f} ms, {options.rows} {times[decode]:.1f} ms"
    table = Table("piece", title=title)
    for column in ("alone, ms", "a token", f"with {options.rows}, ms", "a token more", "of both alone"):
        table.add_column(column, justify="right")
    for piece in options.pieces:
        alone, mixed = times[_Steps(0, piece)], times[_Steps(options.rows, piece)]
        more = (mixed - times[decode]) / piece
        cells = alone, alone / piece, mixed, more, mixed / (alone + times[decode])
        table.add_row(str(piece), *(f"{cell:.2f}" for cell in cells))
    print_table(table)


def _print_parts(parts: dict[_Steps, dict[str, float]], options: argparse.Namespace) -> None:
    names = list(next(iter(parts.values())))
    table = Table("next tokens", "piece", title="parts, ms of the clock")
    for name in names:
        table.add_column(name, justify="right")
    for kind, times in parts.items():
        table.add_row(str(kind.rows), str(kind.piece), *(f"{times[name]:.2f}" for name in names))
    print_table(table)


if __name__ == "__main__":
    sys.exit(main())
