"""How long long prompts take in an engine, and how long another sequence waits for its next tokens meanwhile.

    python -m benchmarks.engine.long_prompts h-350m --prompt-length 8192 32000
    python -m benchmarks.engine.long_prompts h-1b --device cuda --prompt-length 8192 32768 65536 131000

Weights and prompts are random; weights are in bfloat16. `max_gap` is the server's default, and there is no prefix
cache. Each prompt runs alone first, and then beside a sequence that has begun to answer. Its gaps are the times between
its tokens until the prompt has its first one. Times are medians over turns; gaps are those of all turns.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.errors import reports_errors
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table, write
from granite4_neuron.commands.serve import MAX_GAP
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.engine import Engine, Request
from granite4_neuron.runtime.interface import Runtime

_STREAM_PROMPT, _STREAM_BEGUN = 100, 60  # tokens of the other sequence: its prompt, and those before the long prompt


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit code."""
    options = _parser().parse_args(arguments)
    model = random_model(published_config(options.name), dtype=torch.bfloat16)
    defaults = GenerationConfig()
    runtime = TorchRuntime(model, defaults, device=options.device) if options.device else CPURuntime(model, defaults)
    print_table(times(runtime, options.prompt_length, options.answer_length, options.turns))
    if options.device == "cuda":
        write(f"The GPU's memory that torch had reserved at most: {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB.")
    return 0


def times(
    runtime: Runtime,
    lengths: Sequence[int],
    answer_length: int,
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Table:
    """Return the table."""
    engine = Engine(runtime, 2, max_length=max(lengths) + answer_length, max_gap=MAX_GAP / 1e3, clock=clock)
    numbers = random.Random(0)

    def request(length: int, new_tokens: int) -> Request:
        prompt = numbers.choices(range(runtime.config.vocab_size), k=length)
        return Request(prompt, max_tokens=new_tokens, stop_token_ids=[])

    columns = "alone: first token, s", "a further one, ms", "beside a stream: first token, s"
    table = Table("prompt", *columns, "its gaps, ms: p50", "p99", "longest")
    for length in lengths:
        rest = max(lengths) + answer_length - _STREAM_PROMPT
        alone: list[tuple[float, float]] = []
        beside: list[tuple[float, Sequence[float]]] = []
        for turn in range(turns + 1):
            first_and_further = _alone(engine, request(length, answer_length), clock)
            first_and_gaps = _beside(engine, request(_STREAM_PROMPT, rest), request(length, answer_length), clock)
            if turn:  # the first compiles
                alone.append(first_and_further)
                beside.append(first_and_gaps)
        first, further = (statistics.median(each) for each in zip(*alone, strict=True))
        first_beside = statistics.median(each for each, _ in beside)
        gaps = sorted(itertools.chain.from_iterable(each for _, each in beside))
        waits = (gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.99, 1))
        cells = f"{first:.3f}", f"{1e3 * further:.2f}", f"{first_beside:.3f}"
        table.add_row(f"{length:,}", *cells, *(f"{1e3 * each:.1f}" for each in waits))
    return table


def _alone(engine: Engine, request: Request, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds to a prompt's first token, and for each further one."""
    started = clock()
    engine.add(request)
    moments: list[float] = []
    while engine.has_work:
        count = len(engine.step())
        moments += [clock()] * count
    first = moments[0]
    return first - started, (moments[-1] - first) / (len(moments) - 1)


def _beside(
    engine: Engine, other: Request, request: Request, clock: Callable[[], float]
) -> tuple[float, Sequence[float]]:
    """Return the seconds to a prompt's first token beside another sequence, and this one's gaps meanwhile."""
    stream = engine.add(other)
    moments: list[float] = []

    def step() -> set[int]:
        ids = {output.id for output in engine.step()}
        if stream in ids:
            moments.append(clock())
        return ids

    while len(moments) < _STREAM_BEGUN:
        step()
    started = moments[-1]
    prompt = engine.add(request)
    while prompt not in step():
        pass
    first = clock() - started
    while moments[-1] - started < first:  # the gap in which the first token came
        step()
    for id in (stream, prompt):
        engine.cancel(id)
    return first, [after - before for before, after in itertools.pairwise(moments[_STREAM_BEGUN - 1 :])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the family member")
    parser.add_argument("--device", choices=DEVICES, help="of PyTorch's (default: the CPU's runtime)")
    parser.add_argument("--prompt-length", type=at_least(256), nargs="+", default=[8192], metavar="TOKENS")
    parser.add_argument("--answer-length", type=at_least(2), default=33, metavar="TOKENS")
    parser.add_argument("--turns", type=at_least(1), default=3, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
