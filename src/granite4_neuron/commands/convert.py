"""`granite4-neuron convert`: write a checkpoint in another dtype, quantized, or with adapters merged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from granite4_neuron.checkpoint.output_folder import check_output, remove_leftovers
from granite4_neuron.commands.options import add_model, dtype_of, model_checkpoint, print_remark
from granite4_neuron.commands.output import ProgressBar
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.errors import UserError, printable


def add_parser(commands: argparse._SubParsersAction) -> None:
    convert = commands.add_parser(
        "convert", help="write a checkpoint in another dtype, quantized or with adapters merged"
    )
    add_model(convert)
    convert.add_argument("--dtype", choices=DTYPES, help="dtype to write (default: that of the stored weights)")
    convert.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="quantize the large weights, for the cpu backend (default: write them in --dtype)",
    )
    convert.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="merge this LoRA adapter, as PEFT writes it, into the weights; may be repeated, which adds up",
    )
    convert.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="a folder that does not exist yet"
    )
    convert.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_output(options.output)
    _check_adapters(options.adapter)
    for leftover in remove_leftovers(options.output):
        print(
            f"removed {printable(str(leftover))}, which a conversion that was stopped had left behind", file=sys.stderr
        )
    # Not at the top: these imports take seconds, and --help does not need them.
    from granite4_neuron.checkpoint.adapters import read_adapter
    from granite4_neuron.checkpoint.loading import load_model
    from granite4_neuron.checkpoint.saving import save_model
    from granite4_neuron.devices.cpu import operators as cpu
    from granite4_neuron.ops import TORCH

    checkpoint = model_checkpoint(options)
    adapters = [read_adapter(adapter, checkpoint.config) for adapter in options.adapter]
    operators = replace(cpu.choose_operators(), pack=None) if options.quantize else TORCH
    with ProgressBar("weights", "bytes") as progress:
        model = load_model(
            checkpoint,
            None if options.dtype is None else dtype_of(options.dtype),
            quantize=options.quantize,
            operators=operators,
            adapters=adapters,
            must_be_finite=True,
            progress=progress,
            remark=print_remark,
        )
    save_model(model, options.output, files_from=checkpoint)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _check_adapters(folders: Sequence[Path]) -> None:
    """Check that no adapter is given twice: merged twice, it would do twice what it was trained for."""
    for place, folder in enumerate(folders):
        if folder.resolve() in map(Path.resolve, folders[:place]):
            raise UserError(f"--adapter {folder} is given twice; each adapter is merged once.")
