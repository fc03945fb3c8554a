"""Instructions and bytes of HBM of this project's SSD kernel and of `ssd` in AWS's nki-library, for Granite's shapes.

    python -m benchmarks.kernels.nki_library FOLDER

FOLDER is a checkout of github.com/aws-neuron/nki-library, of SDK 2.30 or later. Both kernels run in the NKI emulator on
one sequence in bfloat16 with an initial state, on the two physical cores of a logical core (LNC=2). The instructions
are one core's, the bytes are both cores'. No time is measured. As in `benchmarks.kernels`, prompts of more than 256
tokens are extrapolated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.errors import reports_errors
from benchmarks.kernels.command import BLOCK, ENGINES, Cost, cost_of, require_emulator
from granite4_neuron import UserError
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import published_config
from test.support.nki_cases import scan_inputs
from test.support.nki_library import provided_library
from test.support.nki_library_ssd import has_ssd, ssd_arguments, ssd_kernel

TP_DEGREES = {"h-350m": 1, "h-1b": 1, "h-tiny": 1, "h-small": 4}
LENGTHS = (128, 512, 2048)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    folder = _parser().parse_args(arguments).folder
    if not has_ssd(folder):
        raise UserError(f"{folder} has no kernel ssd: it must be a checkout of nki-library of SDK 2.30 or later.")
    require_emulator()
    with provided_library(folder):
        _print(costs())
    return 0


def shape_of(model: str) -> dict[str, int]:
    """Return the dimensions of the scan on one rank of a model."""
    config = published_config(model)
    heads = config.rank_dimensions(TP_DEGREES[model]).mamba_heads
    return dict(heads=heads, head_dim=config.mamba_d_head, d_state=config.mamba_d_state)


def costs() -> Iterator[tuple[str, str, int, Cost]]:
    """Yield a model's name, a kernel's name, the length of the prompt, and the cost."""
    from granite4_neuron.devices.neuron.nki.ssd_chunk_scan import ssd_chunk_scan

    nkilib_ssd = ssd_kernel()
    for model in TP_DEGREES:
        short, longer = (scan_inputs(1, blocks * BLOCK, dtype=torch.bfloat16, **shape_of(model)) for blocks in (1, 2))
        for kernel, arguments in ((ssd_chunk_scan, lambda inputs: list(inputs.values())), (nkilib_ssd, ssd_arguments)):
            one, two = (cost_of(kernel, arguments(inputs)) for inputs in (short, longer))
            for length in LENGTHS:
                yield model, kernel.function.__name__, length, one.extended(two, length // BLOCK - 1)


def _print(rows: Iterator[tuple[str, str, int, Cost]]) -> None:
    table = Table(title="one sequence, bfloat16; instructions of one core of two, bytes of both")
    for column in ("model", "heads x head_dim", "kernel"):
        table.add_column(column)
    for column in ("length", "PE", "DVE", "ACT", "Pool", "DMA", "HBM MB", "of minimum"):
        table.add_column(column, justify="right")
    for model, kernel, length, cost in rows:
        shape = shape_of(model)
        table.add_row(
            f"{model}, rank of {TP_DEGREES[model]}",
            f"{shape['heads']} x {shape['head_dim']}",
            kernel,
            str(length),
            *(str(cost.instructions[engine]) for engine in ENGINES),
            f"{cost.hbm_bytes / 1e6:.2f}",
            f"{cost.hbm_bytes / cost.minimum_bytes:.2f}x",
            end_section=length == LENGTHS[-1],
        )
    print_table(table)
    print("PE is TensorE, DVE VectorE, ACT ScalarE, Pool GpSimd.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.nki_library",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of nki-library")
    return parser


if __name__ == "__main__":
    sys.exit(main())
