"""A table of the savings of speculation or of a kept prompt."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from benchmarks.latency.implementations import cpu_runtime
from benchmarks.latency.report import machine_facts, source
from benchmarks.latency.reuse import measure_kept_prompt, measure_speculation, recitation
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.commands.engine_options import DRAFT_TOKENS, MTP, speculation
from granite4_neuron.commands.output import print_table
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import DraftModel, MTPDrafter
from granite4_neuron.engine.drafting.drafters import Drafter, NgramDrafter


def measure_reuse(folder: Path, options: argparse.Namespace) -> None:
    """Print the savings of speculation or of a kept prompt."""
    torch.set_num_threads(options.threads)
    runtime = cpu_runtime(folder, options)
    turns = (options.warmup, options.repeats)
    title = escape(
        f"{source(options)}, {options.dtype or 'dtype as stored'}\n{', '.join(machine_facts(options.threads).values())}"
    )
    if options.kept_prompt:
        table = Table("prompt", "first token ms", "from the file ms", "ratio", title=title)
        for length in options.prompt_length:
            tokens = torch.randint(runtime.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
            kept = measure_kept_prompt(runtime, tokens.tolist(), *turns)
            ratio = f"1/{kept.first_ms / kept.second_ms:.1f}"
            table.add_row(str(length), f"{kept.first_ms:.1f}", f"{kept.second_ms:.1f}", ratio)
    else:
        columns = ("batch", "prompt", "plain tok/s", "drafted tok/s", "speed-up", "accepted", "tokens per step")
        table = Table(*columns, "decode ms", "verify ms", "ratio", title=title)
        for batch_size, length in itertools.product(options.batch_size, options.prompt_length):
            table.add_row(str(batch_size), str(length), *_speculation(runtime, folder, batch_size, length, options))
    print_table(table)


def _speculation(
    runtime: CPURuntime, folder: Path, batch_size: int, length: int, options: argparse.Namespace
) -> list[str]:
    """Return the cells of one row of the table."""
    longest = length + options.output_length
    new_drafter: Callable[[], Drafter] = NgramDrafter
    if options.draft_model is None:
        method, draft_tokens = speculation(options.speculate)
        if method == MTP:
            new_drafter = partial(MTPDrafter, runtime, batch_size, longest)
    else:
        small = cpu_runtime(open_checkpoint(options.draft_model).path, options)
        draft_tokens = options.draft_tokens or DRAFT_TOKENS
        new_drafter = partial(DraftModel, small, runtime.config.vocab_size, batch_size, longest)
    prompt = recitation(runtime, _beginning(folder), length)
    turns = (options.output_length, options.warmup, options.repeats)
    result = measure_speculation(runtime, new_drafter, draft_tokens, [prompt] * batch_size, *turns)
    return [
        f"{result.plain_rate:.1f}",
        f"{result.rate:.1f}",
        f"{result.rate / result.plain_rate:.2f}x",
        f"{result.acceptance_rate:.0%}",
        f"{result.tokens_per_step:.2f}",
        f"{result.decode_ms:.2f}",
        f"{result.verify_ms:.2f} of {draft_tokens + 1} tokens",
        f"{result.verify_ms / result.decode_ms:.2f}",
    ]


def _beginning(folder: Path) -> list[int]:
    """Return the beginning of the bundled model's training text, or any tokens if there is no tokenizer."""
    checkpoint = open_checkpoint(folder)
    if not checkpoint.has_tokenizer:
        return list(range(8))
    return checkpoint.load_tokenizer().encode("An assignment statement")
