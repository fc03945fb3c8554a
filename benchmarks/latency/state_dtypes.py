"""Times steps of decode with SSM states in each dtype, in turns, over the same weights.

python -m benchmarks.latency.state_dtypes --random-weights h-350m --batch-size 16
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.errors import reports_errors
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.runtime.interface import Row

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", metavar="NAME", required=True, help="the family member")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of each dtype (default: %(default)s)")
    options = parser.parse_args(arguments)
    model = random_model(published_config(options.random_weights), dtype=torch.bfloat16)
    steps = [_step(CPURuntime(model, GenerationConfig(), state_dtype=each), options) for each in STATE_DTYPES]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(options.steps):
        for step, step_times in zip(steps, times, strict=True):
            started = time.perf_counter()
            step()
            step_times.append(1e3 * (time.perf_counter() - started))
    table = Table("SSM states in", "ms a step, median", "tokens/s")
    for dtype, step_times in zip(STATE_DTYPES, times, strict=True):
        median = statistics.median(step_times)
        table.add_row(str(dtype).removeprefix("torch."), f"{median:.1f}", f"{1e3 * options.batch_size / median:.0f}")
    print_table(table)
    return 0


def _step(runtime: CPURuntime, options: argparse.Namespace) -> Callable[[], object]:
    """Return a function that decodes one token of each sequence; the first token has been run."""
    state = runtime.allocate(options.batch_size, 2 + options.steps)
    position = 0

    def step() -> object:
        nonlocal position
        rows = [Row(slot, position, [slot]) for slot in range(1, 1 + options.batch_size)]
        position += 1
        return runtime.step(state, rows)

    step()
    return step


if __name__ == "__main__":
    sys.exit(main())
