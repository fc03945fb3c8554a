"""`granite4-neuron tune`: measure launch parameters on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import (
    add_model,
    add_threads,
    check_folder_of,
    config_and_dtype,
    dtype_of,
    model_or_bundled,
    use_threads,
)
from granite4_neuron.commands.output import ProgressBar, write
from granite4_neuron.commands.plot import add_plot, check_plot, save_plot
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.devices.cpu.tuning import Choice


def add_parser(commands: argparse._SubParsersAction) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure launch parameters of the CPU kernels on this machine",
        description="Measure the Mamba kernels' launch parameters for a model's sizes, and write the fastest "
        "into a folder for --tuned-configs. It reads no weights and changes no results.",
    )
    add_model(tune, family=True)
    add_threads(tune)
    tune.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder to write to; its files for other sizes stay"
    )
    add_plot(tune, "the measured times")
    tune.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_folder_of(options.output)
    check_plot(options.plot)
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"--output is {options.output}, which is not a folder.")
    config, stored_dtype = config_and_dtype(str(model_or_bundled(options)), options.revision)
    # Not at the top: these imports take seconds, and --help does not need them.
    import torch

    from granite4_neuron.devices.cpu.tuning import tune
    from granite4_neuron.ops.launch_parameters import LaunchParameters, file_name, write_launch_parameters

    use_threads(options)
    with ProgressBar("measuring", "values") as progress:
        choices = list(tune(config, dtype_of(stored_dtype), progress))
    for name, seconds, value in choices:
        times = ", ".join(f"{1e3 * median:.2f} ms with {each}" for each, median in seconds.items())
        write(f"{name} is {value}: {times}")
    if options.plot:
        _plot(choices, options.plot)
    file = options.output / file_name(config.mamba_d_head, config.mamba_d_state, torch.float32)
    options.output.mkdir(exist_ok=True)
    write_launch_parameters(file, LaunchParameters(**{choice.name: choice.value for choice in choices}))
    print(f"wrote {file}", file=sys.stderr)
    return 0


def _plot(choices: Sequence[Choice], file: Path) -> None:
    """Draw the times of each parameter's values, with the chosen one in another colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(choices), 4), layout="constrained")
    for axes, choice in zip(figure.subplots(1, len(choices)), choices, strict=True):
        colors = ["C1" if value == choice.value else "C0" for value in choice.seconds]
        axes.bar(list(map(str, choice.seconds)), [1e3 * each for each in choice.seconds.values()], color=colors)
        axes.set(title=f"{choice.name}: {choice.value}", ylabel="ms")
    save_plot(figure, file)
