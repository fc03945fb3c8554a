"""`granite4-neuron tune`: measure launch parameters on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from granite4_neuron.commands.options import (
    MOST_THREADS,
    add_model,
    at_least,
    check_folder_of,
    config_and_dtype,
    dtype_of,
    model_or_bundled,
    use_threads,
)
from granite4_neuron.commands.output import write
from granite4_neuron.errors import UserError


def add_parser(commands: argparse._SubParsersAction) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure launch parameters of the CPU kernels on this machine",
        description="Measure the Mamba kernels' launch parameters for a model's sizes, and write the fastest "
        "into a folder for --tuned-configs. It reads no weights and changes no results.",
    )
    add_model(tune, family=True)
    tune.add_argument(
        "--threads",
        type=at_least(1, MOST_THREADS),
        metavar="N",
        help="threads to compute with (default: one per processor core)",
    )
    tune.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder to write to; its files for other sizes stay"
    )
    tune.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_folder_of(options.output)
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"--output is {options.output}, which is not a folder.")
    config, stored_dtype = config_and_dtype(str(model_or_bundled(options)), options.revision)
    # Not at the top: these imports take seconds, and --help does not need them.
    import torch

    from granite4_neuron.ops.launch_parameters import LaunchParameters, file_name, write_launch_parameters
    from granite4_neuron.runtime.tuning import tune

    use_threads(options)
    chosen = {}
    for name, seconds, value in tune(config, dtype_of(stored_dtype)):
        times = ", ".join(f"{1e3 * median:.2f} ms with {choice}" for choice, median in seconds.items())
        write(f"{name} is {value}: {times}")
        chosen[name] = value
    file = options.output / file_name(config.mamba_d_head, config.mamba_d_state, torch.float32)
    options.output.mkdir(exist_ok=True)
    write_launch_parameters(file, LaunchParameters(**chosen))
    print(f"wrote {file}", file=sys.stderr)
    return 0
