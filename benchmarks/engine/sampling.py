"""What the choice of a token costs on this machine's processor, in times of one softmax over the same logits.

    python -m benchmarks.engine.sampling
    python -m benchmarks.engine.sampling --model h-350m --batch-size 1 8 32
    python -m benchmarks.engine.sampling --model h-tiny --batch-size 1 8 32 --device cuda

The first command prints the processor time of a token on one thread, for options alone and together,
over flat logits (a normal distribution with a standard deviation of 3) and peaked ones (of 2, and five tokens that have
nearly all of the probability), divided by torch's softmax in the same turn: medians of the turns' ratios.

With a model, whose weights are random and in bfloat16, it prints the time of an engine's step of decode, greedy and
sampled in turns, and how many times the greedy one a sampled one takes. Everything that a step does is in it. The CPU's
runtime runs it, or with a device that of PyTorch's devices.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.errors import reports_errors
from granite4_neuron import UserError
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu import sampling
from granite4_neuron.devices.cpu.operators import has_fused_kernels
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.engine import Engine, Request
from granite4_neuron.ops.sampling import Choice, Penalties

_VOCABULARIES = (32_000, 100_352, 131_072)
_OF_HISTORY = 500  # different tokens of a sequence with penalties
_PROMPT, _WARM_UP = 32, 4
_SAMPLED: Mapping[str, Mapping[str, Any]] = {
    "temperature 1": dict(temperature=1.0),
    "temperature 0.7, top_p 0.95": dict(temperature=0.7, top_p=0.95),
    "and a seed": dict(temperature=0.7, top_p=0.95, seed=1),
    "and top_k 50": dict(temperature=0.7, top_p=0.95, top_k=50),
    "and repetition_penalty 1.1": dict(temperature=0.7, top_p=0.95, repetition_penalty=1.1),
    "and 5 log-probabilities": dict(temperature=0.7, top_p=0.95, logprobs=5),
}


def _choices(vocab_size: int) -> Mapping[str, Choice]:
    """Return options by what they are called in the table."""
    history = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))[:_OF_HISTORY]
    penalties = Penalties(history, torch.ones(_OF_HISTORY), 0.1, 0.1, 1.1)
    all_bits = torch.full((-(-vocab_size // 8),), 0xFF, dtype=torch.uint8)
    biases = history[:100], torch.ones(100)
    nucleus = dict(temperature=0.7, top_p=0.95)
    return {
        "greedy": Choice(),
        "20 log-probabilities": Choice(num_logprobs=20),
        "temperature 1": Choice(1.0),
        "min_p 0.05": Choice(1.0, min_p=0.05),
        "0.7, top_k 50": Choice(0.7, top_k=50),
        "0.7, top_p 0.95": Choice(**nucleus),
        "0.7, top_p 0.1": Choice(0.7, top_p=0.1),
        "and top_k 50": Choice(**nucleus, top_k=50),
        "and penalties": Choice(**nucleus, penalties=penalties),
        "and a grammar": Choice(**nucleus, mask=all_bits),
        "all, top_k 50": Choice(
            **nucleus,
            top_k=50,
            min_p=0.01,
            mask=all_bits,
            allowed=all_bits,
            biases=biases,
            penalties=penalties,
            forbidden=history[:5],
        ),
    }


def _logits(vocab_size: int) -> Mapping[str, torch.Tensor]:
    normal = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
    peaked = 2 * normal
    peaked[100:105] += torch.tensor([22.0, 21, 19, 18, 17])
    return {"flat": 3 * normal, "peaked": peaked}


def _processor_seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _ratio(choice: Choice, logits: torch.Tensor, turns: int) -> float:
    """Return the median over turns of a choice's time in softmaxes."""
    ratios = []
    for _ in range(turns + 3):
        softmax = _processor_seconds(lambda: logits.softmax(-1))
        ratios.append(_processor_seconds(lambda: sampling.choose([logits], [choice])) / softmax)
    return statistics.median(ratios[3:])


def _table_of_choices(turns: int) -> Table:
    torch.set_num_threads(1)
    table = Table("options", *(f"{size:,} {kind}" for size in _VOCABULARIES for kind in ("flat", "peaked")))
    columns = [(_choices(size), logits) for size in _VOCABULARIES for logits in _logits(size).values()]
    for name in _choices(_VOCABULARIES[0]):
        table.add_row(name, *(f"{_ratio(choices[name], logits, turns):.1f}" for choices, logits in columns))
    return table


def _step_seconds(engine: Engine, requests: Sequence[Request], steps: int) -> list[float]:
    """Return the times of an engine's steps of decode with these requests."""
    ids = [engine.add(request) for request in requests]
    seen = 0
    while seen < len(ids):
        seen += sum(output.prompt is not None for output in engine.step())
    for _ in range(_WARM_UP):
        engine.step()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    for id in ids:
        engine.cancel(id)
    return seconds


def _table_of_steps(model: str, device: str | None, batch_sizes: Sequence[int], steps: int, turns: int) -> Table:
    weights = random_model(published_config(model), dtype=torch.bfloat16)
    defaults = GenerationConfig()
    runtime = CPURuntime(weights, defaults) if device is None else TorchRuntime(weights, defaults, device=device)
    table = Table("sequences", "greedy, ms", *(f"{name}, ratio" for name in _SAMPLED))
    for batch_size in batch_sizes:
        engine = Engine(runtime, batch_size, max_length=_PROMPT + _WARM_UP + steps + 8)
        most = _WARM_UP + steps + 8
        prompts = [[(7 * number + place) % 1000 for place in range(_PROMPT)] for number in range(batch_size)]
        kinds: dict[str, Mapping[str, Any]] = {"greedy": dict(temperature=0), **_SAMPLED}
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(turns):
            for name, options in kinds.items():
                requests = [Request(prompt, most, **options) for prompt in prompts]
                seconds[name] += _step_seconds(engine, requests, steps)
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        ratios = [f"{medians[name] / medians['greedy']:.2f}" for name in _SAMPLED]
        table.add_row(str(batch_size), f"{1e3 * medians['greedy']:.2f}", *ratios)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="NAME", help="time an engine's steps with this family member")
    parser.add_argument("--device", choices=DEVICES, help="of PyTorch's, for a model (default: the CPU's runtime)")
    parser.add_argument("--batch-size", type=at_least(1), nargs="+", default=[1, 8, 32], metavar="N", help="sequences")
    parser.add_argument("--steps", type=at_least(1), default=16, metavar="N", help="of each turn")
    parser.add_argument("--turns", type=at_least(1), default=15, metavar="N")
    return parser


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit code."""
    options = _parser().parse_args(arguments)
    if not has_fused_kernels():
        raise UserError("the CPU's kernels cannot be compiled here, and only their times are of interest.")
    if options.model is None:
        table = _table_of_choices(options.turns)
    else:
        table = _table_of_steps(options.model, options.device, options.batch_size, options.steps, options.turns)
    print_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
