"""Compares logits of a PyTorch device with those of the CPU runtime in float32, with random weights.

    python -m benchmarks.devices.logits --random-weights h-350m --device cuda --batch-size 1 8 32

Weights are in bfloat16 first and then, with the same values, in float32. Each sequence of a batch has a prompt of
another length, and random tokens after it, which are decoded. The logits after the prompt and after each of these
tokens are compared, for both the device and the CPU runtime in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.devices.steps import add_model_and_device
from benchmarks.errors import reports_errors
from benchmarks.latency.implementations import Point, random_prompts
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.evaluation.accuracy import Difference, all_of_continuations, last_of_prompts
from granite4_neuron.runtime.interface import Runtime

_SHORTEST_PROMPT = 60
_MORE_TOKENS = 7  # each sequence's prompt is longer by as much


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return the exit code."""
    options = _parser().parse_args(arguments)
    config = published_config(options.random_weights)
    model = random_model(config, dtype=torch.bfloat16)

    def logits(runtime: Runtime) -> list[torch.Tensor]:
        return [_logits(runtime, batch_size, options.tokens) for batch_size in options.batch_size]

    of_device = logits(TorchRuntime(model, GenerationConfig(), device=options.device))
    of_cpu = logits(CPURuntime(model, GenerationConfig()))
    reference = logits(CPURuntime(model.float(), GenerationConfig()))

    table = Table("", "logits of", "largest error", "mean error", "same likeliest token")
    for batch_size, expected, *compared in zip(options.batch_size, reference, of_device, of_cpu, strict=True):
        for name, ours in zip((options.device, "CPU, bfloat16"), compared, strict=True):
            difference = Difference.between(ours, expected)
            errors = f"{difference.maximum:.2e}", f"{difference.mean:.2e}", f"{difference.top1_agreement:.1%}"
            table.add_row(f"batch {batch_size}", name, *errors)
    print_table(table)
    return 0


def _logits(runtime: Runtime, batch_size: int, new_tokens: int) -> torch.Tensor:
    """Return logits of prompts and then of decode of random tokens, [(1 + new_tokens) * batch_size, vocab_size]."""
    lengths = [_SHORTEST_PROMPT + _MORE_TOKENS * number for number in range(batch_size)]
    longest = lengths[-1] + new_tokens
    tokens = random_prompts(runtime.config.vocab_size, Point(batch_size, longest, output_length=0))
    sequences = [each[: length + new_tokens] for each, length in zip(tokens, lengths, strict=True)]
    state = runtime.allocate(batch_size, longest)
    return torch.cat(
        [
            *last_of_prompts(runtime, state, sequences, lengths),
            *all_of_continuations(runtime, state, sequences, lengths),
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_and_device(parser)
    parser.add_argument(
        "--tokens", type=at_least(1), default=8, metavar="N", help="tokens to decode (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
