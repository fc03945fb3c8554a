"""A prefix cache under traffic: the parts of prompts that it finds in traces, at several memory limits, with this
package's policy, with the least recently used evicted first, and with Marconi's policy.

    python -m benchmarks.prefix_traces
    python -m benchmarks.prefix_traces --sessions 6 --lengths 0.25 --longest-answer 8 --measure

The first command runs no model: it counts tokens and bytes with a model's dimensions. --measure serves the traces with
the engine and reports the times to the first token. Memory limits are fractions of the trace's working set, which is
the memory that Marconi's policy would use without a limit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
import transformers
from rich.table import Table

from benchmarks.errors import Failed, reports_errors
from benchmarks.other_engines.llama_cpp import QUANTIZE
from benchmarks.other_engines.llama_server import LLAMA_CPP, SERVER, check_options
from benchmarks.prefix_traces.engines import ENGINES, answers, first_token_times
from benchmarks.prefix_traces.policies import MARCONI, OURS, POLICIES, savings
from benchmarks.prefix_traces.traces import TRACES, Sizes, Turn, trace
from benchmarks.random_checkpoint import write_random
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table, write
from granite4_neuron.config import ModelConfig, config_from_file, published_config
from granite4_neuron.devices.cuda.torch_device import CUDA
from granite4_neuron.devices.graphs.mamba import CHUNK_SIZE
from granite4_neuron.devices.graphs.runtime import PREFILL_BUCKETS
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.ops.launch_parameters import processor_name
from granite4_neuron.runtime.prompt_cuts import ANYWHERE, Anywhere, Multiples, Pieces

_MIB = 2**20


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit code."""
    options = _parser().parse_args(arguments)
    check_options(options.compare, options.llama_cpp)
    transformers.logging.set_verbosity_error()
    config = _config(options)
    sizes = Sizes(options.sessions, options.lengths, options.longest_answer, config.vocab_size)
    write(f"{options.random_weights or options.model or 'the bundled model'}, {processor_name()}")
    traces = {name: trace(name, sizes, options.seed) for name in options.traces}
    sets = {name: savings(turns, MARCONI, config, None).num_bytes for name, turns in traces.items()}
    print_table(_savings(traces, sets, config, options))
    if options.cuts:
        print_table(_by_cuts(traces, config))
        print_table(_by_steps(traces, sets, config, options))
    if not options.measure and not options.compare:
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or bundled_checkpoint()
        if options.random_weights:
            folder = write_random(options.random_weights, Path(temporary) / "model")
        if options.measure:
            for name, turns in traces.items():
                print_table(_times(name, turns, sets[name], folder, options))
        for name in options.compare:
            _compare(name, traces, sets, folder, options)
    return 0


def _savings(
    traces: dict[str, list[Turn]], sets: dict[str, int], config: ModelConfig, options: argparse.Namespace
) -> Table:
    table = Table("", "memory", *POLICIES, title="tokens found / FLOPs saved, %", title_justify="left")
    for name, turns in traces.items():
        for percent in options.budgets:
            found = [savings(turns, policy, config, _limit(sets[name], percent)) for policy in POLICIES]
            cells = [f"{100 * each.hit_rate:.1f} / {100 * each.saved:.1f}" for each in found]
            table.add_row(name, _memory(sets[name], percent), *cells)
        table.add_section()
    return table


def _by_cuts(traces: dict[str, list[Turn]], config: ModelConfig) -> Table:
    """Compare restrictions on where prompts may be cut, without a memory limit: tokens found, and work left to run."""
    title = "tokens found, % / work before first tokens, beside that with any cuts"
    ways = {
        "any cuts": ANYWHERE,
        "any cuts, no answers": _AnyWithoutAnswers(True),
        f"multiples of {CHUNK_SIZE}": Multiples(CHUNK_SIZE),
        "pieces": Pieces(PREFILL_BUCKETS),
    }
    table = Table("", *ways, title=title, title_justify="left")
    for name, turns in traces.items():
        found = [savings(turns, OURS, config, None, cuts, PREFILL_BUCKETS) for cuts in ways.values()]
        table.add_row(name, *(f"{100 * each.hit_rate:.1f} / {each.work / found[0].work:.2f}" for each in found))
    return table


def _by_steps(
    traces: dict[str, list[Turn]], sets: dict[str, int], config: ModelConfig, options: argparse.Namespace
) -> Table:
    """Compare lengths of steps on a GPU: tokens found, and work left to run."""
    *buckets, long = (*PREFILL_BUCKETS, *CUDA.long_prompts)
    cuts, chunk = Multiples(CHUNK_SIZE), buckets[-1]
    ways = {
        f"{chunk:,}": (cuts, buckets),
        f"{long:,}": (cuts, (*buckets, long)),
        f"{long:,} where a prompt fills them, and {chunk:,}": (cuts, (*buckets, long), chunk),
    }
    title = "on a GPU, by the tokens of a step: tokens found, % / work before first tokens, beside that of the first"
    table = Table("", "memory", *ways, title=title, title_justify="left")
    for name, turns in traces.items():
        for percent in options.budgets:
            found = [savings(turns, OURS, config, _limit(sets[name], percent), *way) for way in ways.values()]
            cells = [f"{100 * each.hit_rate:.1f} / {each.work / found[0].work:.2f}" for each in found]
            table.add_row(name, _memory(sets[name], percent), *cells)
        table.add_section()
    return table


class _AnyWithoutAnswers(Anywhere):
    """Any cuts, but only prompts leave states for other prompts, answers do not."""

    keeps_answers = False


def _times(name: str, turns: Sequence[Turn], working_set: int, folder: Path, options: argparse.Namespace) -> Table:
    title = "first token after, ms: p50 / p95"
    table = Table("", "memory", "no cache", *POLICIES, title=title, title_justify="left")
    for percent in sorted({min(options.budgets), max(options.budgets)}):
        times = first_token_times(turns, folder, _limit(working_set, percent), options.repeats)
        table.add_row(name, _memory(working_set, percent), *map(_cell, times.values()))
    return table


def _cell(times: Sequence[float]) -> str:
    places = torch.tensor([0.5, 0.95], dtype=torch.float64)
    return " / ".join(f"{1e3 * time:.1f}" for time in torch.tensor(times, dtype=places.dtype).quantile(places).tolist())


def _compare(
    engine: str, traces: dict[str, list[Turn]], sets: dict[str, int], folder: Path, options: argparse.Namespace
) -> None:
    columns = ("tokens found, %", "first token after, ms: p50 / p95")
    table = Table("", "memory", *columns, title=engine, title_justify="left")
    notes = []
    for name, turns in traces.items():
        for percent in options.budgets:
            try:
                with closing(ENGINES[engine](folder, _limit(sets[name], percent), turns, options)) as served:
                    tokens, given = answers(turns, served)
                found = sum(answer.found for answer in given)
                cells = [f"{100 * found / tokens:.1f}", _cell([answer.seconds for answer in given])]
            except Failed as error:
                cells = ["-"]
                notes.append(f"{name}, {_memory(sets[name], percent)}: {error}")
            table.add_row(name, _memory(sets[name], percent), *cells)
        table.add_section()
    print_table(table)
    for note in notes:
        write(note)


def _limit(working_set: int, percent: float) -> int:
    return int(working_set * percent / 100)


def _memory(working_set: int, percent: float) -> str:
    return f"{percent:g} %, {_limit(working_set, percent) / _MIB:,.0f} MiB"


def _config(options: argparse.Namespace) -> ModelConfig:
    if options.random_weights:
        return published_config(options.random_weights)
    return config_from_file((options.model or bundled_checkpoint()) / "config.json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix_traces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a checkpoint's folder (default: the bundled model)")
    model.add_argument("--random-weights", metavar="NAME", help="real dimensions, random weights")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES), help="default: all")
    parser.add_argument("--sessions", type=at_least(1), default=60, help="sessions per trace (default: %(default)s)")
    parser.add_argument(
        "--lengths", type=float, default=1.0, help="multiply all lengths by this factor (default: %(default)s)"
    )
    parser.add_argument("--longest-answer", type=at_least(2), help="the most tokens per answer (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traces (default: %(default)s)")
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=float,
        metavar="PERCENT",
        default=[5, 10, 25, 50, 100],
        help="limits of memory, in %% of the working set (default: %(default)s)",
    )
    parser.add_argument(
        "--measure", action="store_true", help="time first tokens at the smallest and the largest of these"
    )
    parser.add_argument(
        "--cuts",
        action="store_true",
        help="also compare runtimes by where they may cut prompts without a difference, and by their steps",
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="repeats of each measurement (default: %(default)s)"
    )
    parser.add_argument("--compare", nargs="*", choices=ENGINES, default=[], help="other engines on the same traces")
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="FOLDER", help=f"for --compare {LLAMA_CPP}: of {SERVER} and {QUANTIZE}"
    )
    return parser
