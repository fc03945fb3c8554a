"""Plots of commands and benchmarks, and checks before anything is measured for one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import check_folder_of
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_plot(parser: argparse._ActionsContainer, what: str) -> None:
    """Add --plot, an option with the file of a plot; `check_plot` checks it.

    Args:
        what: the plot shows, for the help.
    """
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw {what} into this file, such as FILE.png or FILE.svg"
    )


def check_plot(file: Path | None) -> None:
    """Check that a plot can be written to `file`; without a file, do nothing.

    Raises:
        UserError: there is no such folder, matplotlib is not installed, or it does not write such files.
    """
    if file is None:
        return
    check_folder_of(file)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        how = "pip install 'granite4-neuron[plot]'"
        raise UserError(f"--plot needs matplotlib; install it with: {how}.") from None
    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:] not in formats:
        raise UserError(f"{file} cannot be drawn; the name must end in one of {', '.join(formats)}.")


def save_plot(figure: Figure, file: Path) -> None:
    """Write the figure, in the format that the file's name ends in.

    Raises:
        UserError: that failed.
    """
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}).") from None
