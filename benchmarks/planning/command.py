"""Compares `granite4-neuron plan`'s predictions for an engine on this machine with the engine.

    python -m benchmarks.planning --model FOLDER

Step times are measured. Then the engine serves three loads with its model, and the same loads are simulated: a third of
the engine's rate, most of its rate with prompts of different lengths and a shared prefix, and all requests at once.
Both count one thread's CPU time, which other programs hardly change. Waiting for an arrival takes none. There is no
server and no client.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table

from benchmarks.errors import reports_errors
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.generation import bundled_checkpoint, load
from granite4_neuron.ops.launch_parameters import processor_name
from granite4_neuron.planning.simulation import measuring
from granite4_neuron.planning.simulation.lengths import Lengths
from granite4_neuron.planning.simulation.measured_steps import Measured, MeasuredSteps
from granite4_neuron.planning.simulation.replicas import simulate
from granite4_neuron.planning.simulation.server import Server
from granite4_neuron.planning.simulation.traffic import Arrival, at_rate, poisson
from granite4_neuron.runtime.interface import Runtime

_CACHE_BYTES = 2**30
_MAX_GAP = 0.1
_LONGEST = 1024


class Figures(NamedTuple):
    """Times in seconds. The last two are medians."""

    tokens_per_second: float
    first_token: float
    gap: float


class _Clock:
    """A clock of this process's CPU time and of the time skipped while nothing ran."""

    def __init__(self) -> None:
        self.skipped = 0.0
        self.began = time.process_time()

    def __call__(self) -> float:
        return time.process_time() - self.began + self.skipped

    def skip_to(self, moment: float) -> None:
        self.skipped += max(0.0, moment - self())


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a checkpoint's folder (default: the bundled model)")
    parser.add_argument("--max-num-seqs", type=at_least(1), default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-requests", type=at_least(2), default=24, metavar="N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runtime, tokenizer = load(options.model or bundled_checkpoint())
    names = dict(model="", backend="cpu", machine="", sampling=dict(temperature=0))
    sizes = dict(most_rows=options.max_num_seqs, longest=_LONGEST, clock=time.process_time)
    measured = measuring.measure(runtime, tokenizer, **names, **sizes)
    server = _server(runtime, measured, options.max_num_seqs)
    table = Table("load", "", "tokens/s", "first token, ms", "gap, ms", title=processor_name())
    for name, arrivals in _loads(server, options.num_requests).items():
        [result] = simulate(arrivals, server, [(1, False)])
        medians = result.first_tokens.percentile(50), result.gaps.percentile(50)
        predicted = Figures(result.tokens_per_second, *medians)
        found = _serve(arrivals, runtime, tokenizer, options.max_num_seqs)
        add_rows(table, name, predicted, "engine", found)
    print_table(table)
    return 0


def add_rows(table: Table, load: str, predicted: Figures, kind: str, found: Figures) -> None:
    """Add a load's predicted and measured numbers, and their ratios, to a table."""
    for name, figures in (("predicted", predicted), (kind, found)):
        table.add_row(load, name, f"{figures[0]:.1f}", *(f"{1e3 * each:.1f}" for each in figures[1:]))
    table.add_row(load, "ratio", *(f"{one / other:.2f}" for one, other in zip(predicted, found, strict=True)))
    table.add_section()


def _server(runtime: Runtime, measured: Measured, num_sequences: int) -> Server:
    simulated = dict(
        config=runtime.config,
        steps=MeasuredSteps(measured),
        dtype=runtime.dtype,
        state_dtype=runtime.state_dtype,
        tokens_per_step=runtime.tokens_per_step,
        rows_per_step=runtime.rows_per_step,
        prompt_cuts=runtime.prompt_cuts,
        packs_rows=runtime.packs_rows,
        max_length=_LONGEST,
    )
    return Server(num_sequences, _LONGEST, _CACHE_BYTES, _MAX_GAP, simulated)


def _loads(server: Callable, number: int) -> dict[str, list[Arrival]]:
    fixed, answers = Lengths.parse("512"), Lengths.parse("64")
    at_once = at_rate(poisson(1.0, fixed, answers, number), float("inf"))
    [result] = simulate(at_once, server, [(1, False)])
    rate = result.requests / result.seconds
    mixed = Lengths.parse("normal:400:150"), Lengths.parse("uniform:32:128")
    return {
        "a third": poisson(rate / 3, fixed, answers, number),
        "most of it": poisson(0.8 * rate, *mixed, 2 * number, prefix_tokens=128, seed=1),
        "at once": at_once,
    }


def _serve(arrivals: Sequence[Arrival], runtime: Runtime, tokenizer, num_sequences: int) -> Figures:
    """Serve traffic with the engine and its model."""
    clock = _Clock()
    cache = PrefixCache(runtime, _CACHE_BYTES, runtime.tokens_per_step, at_branches=True)
    engine = Engine(
        runtime,
        num_sequences,
        max_length=_LONGEST,
        tokenizer=tokenizer,
        prefix_cache=cache,
        max_gap=_MAX_GAP,
        clock=clock,
    )
    left, arrived, last = list(arrivals), {}, {}
    first_tokens, gaps = [], []
    while left or engine.has_work:
        if not engine.has_work:
            clock.skip_to(left[0].time)
        while left and left[0].time <= clock():
            arrival = left.pop(0)
            tokens = [token % runtime.config.vocab_size for token in arrival.tokens()]
            request = Request(tokens, max_tokens=arrival.answer, temperature=0, stop_token_ids=[])
            arrived[engine.add(request)] = arrival.time
        outputs, now = engine.step(), clock()
        for output in outputs:
            if output.id in last:
                gaps.append(now - last[output.id])
            else:
                first_tokens.append(now - arrived[output.id])
            last[output.id] = now
    seconds = clock() - arrivals[0].time
    tokens_per_second = (len(first_tokens) + len(gaps)) / seconds
    return Figures(tokens_per_second, statistics.median(first_tokens), statistics.median(gaps))
