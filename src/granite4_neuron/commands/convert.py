"""`granite4-neuron convert`: write a checkpoint in another dtype."""

from __future__ import annotations

import argparse
import sys

from granite4_neuron import checkpoint
from granite4_neuron.commands.options import add_model, chosen_dtype, model_or_bundled
from granite4_neuron.config import DTYPES


def add_parser(commands: argparse._SubParsersAction) -> None:
    convert = commands.add_parser("convert", help="write a checkpoint in another dtype, in one format and naming")
    add_model(convert)
    convert.add_argument("--dtype", choices=DTYPES, help="default: that of the stored weights")
    convert.add_argument("--output", required=True, metavar="FOLDER", help="a folder that does not exist yet")
    convert.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    folder = checkpoint.find(model_or_bundled(options))
    model = checkpoint.load_model(folder, chosen_dtype(options))
    checkpoint.save_model(model, options.output, files_from=folder)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0
