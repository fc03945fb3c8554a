"""Times steps of a runtime on a PyTorch device, without an engine: a token of every sequence, and prompts.

    python -m benchmarks.device_steps --random-weights h-350m --device cuda --batch-size 1 8 32

Tokens are random, so that the sequences of a batch choose different experts. A step ends when its logits are on the
host. Times are medians, after the steps that compile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.errors import reports_errors
from benchmarks.implementations import Point, random_prompts
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.runtime.backends.torch_device import DEVICES
from granite4_neuron.runtime.interface import Row
from granite4_neuron.runtime.torch_device import TorchRuntime

_PROMPT = 100  # tokens of each sequence before its tokens are timed


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = _parser().parse_args(arguments)
    config = GraniteMoeHybridConfig.from_family(options.random_weights)
    model = random_model(config, dtype=torch.bfloat16)
    runtime = TorchRuntime(model, GenerationConfig(), device=options.device)
    table = Table("", "ms, median")
    for batch_size in options.batch_size:
        table.add_row(f"a token, batch {batch_size}", f"{_token_ms(runtime, batch_size, options.steps):.2f}")
    for length in options.prompt_length:
        table.add_row(f"a prompt of {length:,}", f"{_prompt_ms(runtime, length, options.steps):.1f}")
    Console().print(table)
    return 0


def _token_ms(runtime: TorchRuntime, batch_size: int, steps: int) -> float:
    state = runtime.allocate(batch_size, _PROMPT + steps + 2)
    tokens = random_prompts(runtime.config.vocab_size, Point(batch_size, _PROMPT + steps + 2, output_length=0))
    runtime.step(state, [Row(slot, 0, each[:_PROMPT]) for slot, each in enumerate(tokens, 1)])
    position = _PROMPT

    def step() -> None:
        nonlocal position
        runtime.step(state, [Row(slot, position, [each[position]]) for slot, each in enumerate(tokens, 1)])
        position += 1

    return _median_ms(step, steps)


def _prompt_ms(runtime: TorchRuntime, length: int, steps: int) -> float:
    state = runtime.allocate(1, length)
    [prompt] = random_prompts(runtime.config.vocab_size, Point(1, length, output_length=0))
    row = Row(1, 0, prompt)
    return _median_ms(lambda: runtime.step(state, [row]), steps)


def _median_ms(step: Callable[[], None], steps: int) -> float:
    step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def add_model_and_device(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, the device and the numbers of sequences."""
    parser.add_argument("--random-weights", metavar="NAME", required=True, help="of the family member, in bfloat16")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="default: %(default)s")
    parser.add_argument("--batch-size", type=at_least(1), nargs="+", default=[1], metavar="N", help="default: 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_and_device(parser)
    parser.add_argument("--prompt-length", type=at_least(1), nargs="*", default=[], metavar="N", help="default: none")
    parser.add_argument("--steps", type=at_least(1), default=40, metavar="N", help="of each (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
