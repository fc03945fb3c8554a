"""Compares `granite4-neuron plan --traffic`'s predictions for a server on this machine with the server.

    python -m benchmarks.planning.server --model FOLDER

`granite4-neuron measure` measures step times. `granite4-neuron serve` then serves three loads of `benchmarks.serving`,
and the same requests are simulated: at a third of the rate that it can serve, at two thirds of it with prompts of
different lengths and a shared prefix, and all at once. Clients usually run on another machine, so one processor is left
to them here, and the kernels use the others. The benchmark takes a few minutes. The machine should do nothing else
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from benchmarks.errors import reports_errors
from benchmarks.planning.command import Figures, add_rows
from granite4_neuron.commands.engine_options import num_bytes
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table
from granite4_neuron.commands.plan_traffic import measured_runtime
from granite4_neuron.commands.serve import MAX_GAP, PREFIX_CACHE
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.planning.simulation.lengths import Lengths
from granite4_neuron.planning.simulation.replicas import Result, simulate
from granite4_neuron.planning.simulation.server import Server
from granite4_neuron.planning.simulation.traffic import Arrival, at_rate, poisson, read_traffic

_LONGEST = 1024
_MEDIAN = 1  # its index among the percentiles of `benchmarks.serving`
_FIXED = ("512", "64")  # lengths of prompts and answers
_MIXED = ("normal:400:100", "uniform:32:96")
_PREFIX = 128


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=bundled_checkpoint(), help="a checkpoint's folder (default: the bundled model)"
    )
    parser.add_argument("--max-num-seqs", type=at_least(1), default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-requests", type=at_least(2), default=32, metavar="N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    model = ["--model", str(options.model), f"--max-num-seqs={options.max_num_seqs}", f"--max-model-len={_LONGEST}"]
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder, "steps.json")
        _run("granite4_neuron", "measure", *model, "--output", str(steps))
        runtime, where = measured_runtime(steps)
        planned = Server(options.max_num_seqs, _LONGEST, num_bytes(PREFIX_CACHE), MAX_GAP / 1000, runtime)
        table = Table("load", "", "tokens/s", "first token, ms", "gap, ms", title=where)
        with _serving(model) as address:
            _ask(address, Path(folder, "first"), ["--num-requests=8", "--output-length=16", "--seed=1000"])
            for name, load in _loads(planned, options.num_requests).items():
                served, arrivals = _ask(address, Path(folder, name), load)
                add_rows(table, name, _predicted(_simulated(arrivals, planned)), "server", served)
    print_table(table)
    return 0


def _loads(planned: Server, number: int) -> dict[str, list[str]]:
    """Return the options of `benchmarks.serving` for each load."""
    at_once = at_rate(poisson(1.0, *map(Lengths.parse, _FIXED), number), float("inf"))
    result = _simulated(at_once, planned)
    rate = result.requests / result.seconds
    fixed, mixed = ([f"--prompt-length={prompt}", f"--output-length={answer}"] for prompt, answer in (_FIXED, _MIXED))
    return {
        "a third": [*fixed, f"--request-rate={rate / 3}", f"--num-requests={number}", "--seed=0"],
        "two thirds": [
            *(*mixed, f"--request-rate={2 * rate / 3}", f"--num-requests={2 * number}", "--seed=100"),
            f"--shared-prefix={_PREFIX}",
        ],
        "at once": [*fixed, f"--num-requests={number}", "--seed=200"],
    }


def _simulated(arrivals: Sequence[Arrival], planned: Server) -> Result:
    [result] = simulate(arrivals, planned, [(1, False)])
    return result


def _predicted(result: Result) -> Figures:
    return Figures(result.tokens_per_second, result.first_tokens.percentile(50), result.gaps.percentile(50))


@contextmanager
def _serving(model: Sequence[str]) -> Iterator[str]:
    """Start a server; yield the address of its API."""
    command = [sys.executable, "-m", "granite4_neuron", "serve", "--port", "0", *model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"at (http://\S+/v1)", process.stdout.readline())
            assert found is not None
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)


def _ask(address: str, name: Path, load: Sequence[str]) -> tuple[Figures, list[Arrival]]:
    """Send a load; return the results of `benchmarks.serving`, and the requests."""
    numbers, traffic = name.with_suffix(".json"), name.with_suffix(".jsonl")
    files = ["--json", str(numbers), "--traffic", str(traffic)]
    _run("benchmarks.serving", address, "--warmup=0", *load, *files)
    [served] = json.loads(numbers.read_text())
    times = (served[time][_MEDIAN] / 1000 for time in ("first_token_ms", "between_tokens_ms"))
    return Figures(served["output_tokens_per_second"], *times), read_traffic(traffic)


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment())


def _environment() -> dict[str, str]:
    """Return this process's environment, with one processor left to other processes by the kernels."""
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1))}


if __name__ == "__main__":
    sys.exit(main())
