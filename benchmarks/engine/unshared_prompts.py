"""What a prefix cache costs where no prompt shares anything with another: an engine's time for a request, with and
without the server's cache.

    python -m benchmarks.engine.unshared_prompts h-350m --threads 1
    python -m benchmarks.engine.unshared_prompts h-350m --device cuda

Weights and prompts are random; weights are in bfloat16. Each client sends its next request when the last has ended. The
two engines take turns. With one thread, times are this process's CPU time, which other programs change little;
elsewhere they are wall-clock time. The last column is the median over turns of the additional time.
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
from granite4_neuron.commands.engine_options import num_bytes
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table
from granite4_neuron.commands.serve import PREFIX_CACHE
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.runtime.interface import Runtime


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = random_model(published_config(options.name), dtype=torch.bfloat16)
    defaults = GenerationConfig()
    runtime = TorchRuntime(model, defaults, device=options.device) if options.device else CPURuntime(model, defaults)
    clock = time.process_time if options.threads == 1 and options.device is None else time.perf_counter
    print_table(costs(runtime, options, clock))
    return 0


def costs(runtime: Runtime, options: argparse.Namespace, clock: Callable[[], float]) -> Table:
    """Return the table of the times; `options` are the command's."""
    table = Table("clients", "prompt", "a request without, ms", "with, ms", "additional")
    longest = max(options.prompt_length) + options.answer_length
    cache = PrefixCache(runtime, num_bytes(options.prefix_cache), runtime.tokens_per_step, at_branches=True)
    engines = [Engine(runtime, max(options.clients), max_length=longest, prefix_cache=each) for each in (None, cache)]
    numbers = random.Random(0)
    for clients in options.clients:
        for length in options.prompt_length:
            seconds: list[list[float]] = [[], []]
            for turn in range(options.turns + 1):
                requests = [
                    Request(numbers.choices(range(runtime.config.vocab_size), k=length), options.answer_length)
                    for _ in range(clients * options.requests)
                ]
                for each, engine in zip(seconds, engines, strict=True):
                    started = clock()
                    _serve(engine, requests, clients)
                    if turn:  # the first compiles
                        each.append((clock() - started) / len(requests))
            without, with_cache = (1e3 * statistics.median(each) for each in seconds)
            additional = statistics.median(
                [100 * (more / less - 1) for less, more in zip(*seconds, strict=True)],
            )
            cells = f"{without:.2f}", f"{with_cache:.2f}", f"{additional:+.1f} %"
            table.add_row(str(clients), str(length), *cells)
    return table


def _serve(engine: Engine, requests: Sequence[Request], clients: int) -> None:
    """Run requests, as many at a time as there are clients."""
    waiting = iter(requests)
    for request in itertools.islice(waiting, clients):
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None and (request := next(waiting, None)) is not None:
                engine.add(request)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the family member")
    parser.add_argument("--device", choices=DEVICES, help="of PyTorch's (default: the CPU's runtime)")
    parser.add_argument("--threads", type=at_least(1), help="of the CPU (default: all cores)")
    parser.add_argument("--clients", type=at_least(1), nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--prompt-length", type=at_least(1), nargs="+", default=[512, 500], metavar="TOKENS")
    parser.add_argument("--answer-length", type=at_least(1), default=128, metavar="TOKENS")
    parser.add_argument("--requests", type=at_least(1), default=4, metavar="N", help="of a client in a turn")
    parser.add_argument("--turns", type=at_least(1), default=5, metavar="N")
    parser.add_argument("--prefix-cache", default=PREFIX_CACHE, metavar="SIZE", help="default: the server's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
