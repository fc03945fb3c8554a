"""`granite4-neuron tune`: which launch parameters are the fastest on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import (
    MOST_THREADS,
    add_model,
    at_least,
    check_folder_of,
    config_and_dtype,
    dtype_of,
    model_or_bundled,
)
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import DTYPES
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from granite4_neuron.runtime.tuning import Choice


def add_parser(commands: argparse._SubParsersAction) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure launch parameters of the CPU kernels on this machine",
        description="Measure the Mamba kernels' launch parameters for a model's sizes and these batch sizes, and write "
        "what was the fastest into a folder for --tuned-configs. It reads no weights, and what is computed stays the "
        "same.",
    )
    add_model(tune, family=True)
    tune.add_argument("--dtype", choices=DTYPES, help="of activations (default: that of the weights)")
    tune.add_argument(
        "--batch-size", type=at_least(1), nargs="+", default=[1], metavar="B", help="sequences at a time (default: 1)"
    )
    tune.add_argument(
        "--threads",
        type=at_least(1, MOST_THREADS),
        default=os.cpu_count() or 1,
        metavar="N",
        help="default: one per processor core",
    )
    tune.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="a folder; what is in it for other sizes stays"
    )
    tune.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_folder_of(options.output)
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"--output is {options.output}, which is not a folder.")
    config, stored_dtype = config_and_dtype(str(model_or_bundled(options)))
    # Not at the top: what follows takes seconds to import, and --help does not need it.
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from granite4_neuron.ops.launch_parameters import CHOICES, device_name, read_table, table_name
    from granite4_neuron.runtime.tuning import tune, write_choices

    file = options.output / table_name(config.mamba_d_head, config.mamba_d_state, torch.float32, device_name())
    before = read_table(file)
    torch.set_num_threads(options.threads)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        choices = tune(config, dtype_of(options.dtype or stored_dtype), options.batch_size)
        total = len(CHOICES) * len(options.batch_size)
        choices = list(progress.track(choices, total=total, description="measuring"))
    print_table(_table(choices, options.threads))
    write_choices(file, before, choices, config.mamba_n_heads)
    print(f"wrote {file}", file=sys.stderr)
    return 0


def _table(choices: list[Choice], threads: int) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from granite4_neuron.ops.launch_parameters import processor_name

    table = Table(title=escape(f"{processor_name()}, {threads} threads"))
    for column in ("batch", "", "default", "ms", "chosen", "ms", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for choice in choices:
        table.add_row(
            str(choice.batch_size),
            choice.name,
            str(choice.default),
            f"{1e3 * choice.default_seconds:.3f}",
            str(choice.chosen),
            f"{1e3 * choice.chosen_seconds:.3f}",
            f"{choice.default_seconds / choice.chosen_seconds:.2f}x",
        )
    return table
