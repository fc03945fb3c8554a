"""Bytes and FLOPs of a piece of a prompt with the NKI kernels, counted as the NKI emulator executes them.

    python -m benchmarks.kernels.prompt
    python -m benchmarks.kernels.prompt --model granite-4.0-h-tiny --tp-degree 1 --tokens 1024

The report has a Mamba layer's steps and a layer's experts, of one rank in bfloat16, on the two physical cores of a
logical core (LNC=2). For each step it adds up what each DMA moves between HBM and SBUF and the FLOPs of each matrix
product, and puts beside that the bytes of reading its arguments and writing its results once. The minimum is that of
`granite4-neuron graphs`. norm, in_proj and out_proj have no kernel in this package. Plain kernels stand in for what
Neuron's compiler makes of them. Collectives are not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from benchmarks.errors import reports_errors
from benchmarks.kernels.command import PROGRAMS, experts_hbm_bytes, random_choices, require_emulator
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import GraniteMoeHybridConfig, ModelConfig
from granite4_neuron.config.published import published_values
from granite4_neuron.devices.neuron.expert_blocks import expert_blocks
from test.support.nki_cases import mamba_prefill_inputs, nbytes

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Count:
    """What a step moves and computes on all cores together. once: bytes of its arguments and results."""

    step: str
    read: int
    written: int
    once: int
    flops: int


@dataclass(frozen=True)
class Minimum:
    """The bytes and FLOPs that the mathematics of a part of a layer needs."""

    bytes: float
    flops: float


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    options = _parser().parse_args(arguments)
    require_emulator()
    config = GraniteMoeHybridConfig.from_dict(published_values(options.model), source=options.model)
    table = Table(title=f"{options.model}, {options.tokens} tokens, one rank of {options.tp_degree}, bfloat16")
    table.add_column("step")
    for column in ("read, MB", "written, MB", "MB", "once, MB", "GFLOP"):
        table.add_column(column, justify="right")
    _add(table, *mamba_layer(config, options.tp_degree, options.tokens))
    if config.num_local_experts:
        _add(table, *experts(config, options.tp_degree, options.tokens))
    print_table(table)
    return 0


def mamba_layer(config: ModelConfig, tp_degree: int, tokens: int) -> tuple[list[Count], Minimum]:
    """Count a Mamba layer's steps for a piece of one sequence; tokens are a multiple of 256."""
    from benchmarks.kernels.projections import in_projection, out_projection, residual_norm
    from granite4_neuron.devices.neuron.nki.mamba_prefill import mamba_prefill

    rank, hidden = config.rank_dimensions(tp_degree), config.hidden_size
    inner, channels = rank.mamba_intermediate_size, rank.mamba_conv_dim
    heads = dict(
        heads=rank.mamba_heads, head_dim=config.mamba_d_head, groups=rank.mamba_groups, d_state=config.mamba_d_state
    )
    in_weight = torch.zeros(hidden, inner + channels + rank.mamba_heads, dtype=DTYPE)
    out_weight = torch.zeros(inner, hidden, dtype=DTYPE)
    residual = torch.zeros(tokens, hidden)
    y, x = torch.zeros(tokens, inner, dtype=DTYPE), torch.zeros(tokens, hidden, dtype=DTYPE)
    mixer = mamba_prefill_inputs(1, tokens, d_conv=config.mamba_d_conv, dtype=DTYPE, **heads)
    counts = [
        _count("residual sum, norm", residual_norm, residual, residual, torch.zeros(hidden, dtype=DTYPE)),
        _count("in_proj", in_projection, x, in_weight),
        _count("mamba_prefill", mamba_prefill, *mixer.values()),
        _count("norm, out_proj", out_projection, y, torch.zeros(inner, dtype=DTYPE), out_weight),
    ]
    entries = mixer["states"].numel()
    state = 2 * (entries * 4 + channels * (config.mamba_d_conv - 1) * DTYPE.itemsize)
    weights = in_weight.numel() + out_weight.numel()
    stream = 3 * nbytes(residual)  # the norm reads it, the sum reads and writes it
    flops = 2 * tokens * weights + 6 * tokens * entries
    return counts, Minimum(weights * DTYPE.itemsize + state + stream, flops)


def experts(config: ModelConfig, tp_degree: int, tokens: int) -> tuple[list[Count], Minimum]:
    """Count a layer's experts, without the router and the weighted sum, for tokens with random choices."""
    from granite4_neuron.devices.neuron.nki.experts_prefill import experts_prefill

    num_experts, hidden = config.num_local_experts, config.hidden_size
    width = config.rank_dimensions(tp_degree).intermediate_size
    _, topk_ids = random_choices(tokens, config)
    arguments = (
        torch.zeros(tokens, hidden, dtype=DTYPE),
        torch.zeros(num_experts, hidden, 2 * width, dtype=DTYPE),
        torch.zeros(num_experts, width, hidden, dtype=DTYPE),
    )
    count = _count("experts_prefill", experts_prefill, *arguments, *expert_blocks(topk_ids, num_experts))
    least = experts_hbm_bytes(tokens, topk_ids.unique().numel(), hidden, width, DTYPE.itemsize)
    return [count], Minimum(least, 6 * topk_ids.numel() * hidden * width)


def _count(step: str, kernel: Callable, *arguments: torch.Tensor) -> Count:
    """Run the kernel in the emulator, and add up its instructions."""
    from nki.emulation import last_launch

    from granite4_neuron.devices.neuron.nki.launch import launch

    results = launch(kernel, *arguments, programs=PROGRAMS)
    done = last_launch().instructions
    read, written, flops = (sum(getattr(i, name) for i in done) for name in ("hbm_read", "hbm_written", "flops"))
    return Count(step, read, written, nbytes(*arguments, *results), flops)


def totals(counts: Sequence[Count]) -> Count:
    """Add up the counts."""
    columns: Iterator[tuple[int, ...]] = zip(
        *((each.read, each.written, each.once, each.flops) for each in counts), strict=True
    )
    return Count("sum", *map(sum, columns))


def _add(table: Table, counts: Sequence[Count], minimum: Minimum) -> None:
    """Add a section of steps, their sum, and its ratio to the minimum."""
    for each in (*counts, totals(counts)):
        sizes = (each.read, each.written, each.read + each.written, each.once)
        table.add_row(each.step, *(f"{size / 1e6:.1f}" for size in sizes), f"{each.flops / 1e9:.2f}")
    total = totals(counts)
    moved, least = total.read + total.written, minimum.bytes
    table.add_row("minimum", "", "", f"{least / 1e6:.1f}", f"{least / 1e6:.1f}", f"{minimum.flops / 1e9:.2f}")
    ratios = (moved / least, total.once / least, total.flops / minimum.flops)
    table.add_row("of the minimum", "", "", *(f"{ratio:.2f}" for ratio in ratios))
    table.add_section()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.prompt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="granite-4.0-h-small", metavar="NAME", help="default: granite-4.0-h-small")
    parser.add_argument("--tp-degree", type=int, default=4, metavar="N", help="ranks of the model, default: 4")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="a multiple of 256, default: 512")
    return parser


if __name__ == "__main__":
    sys.exit(main())
