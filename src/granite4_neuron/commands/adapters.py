"""The option for adapters. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from granite4_neuron.errors import UserError


def add_adapters(parser: argparse._ActionsContainer, use: str) -> None:
    """Add --adapter; `use` says what the command does with adapters."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help=f"a LoRA or activated LoRA adapter as PEFT writes it, for the cpu backend: {use}; may be repeated",
    )


def adapters_of(options: argparse.Namespace) -> dict[str, Path]:
    """Return the folder of each adapter by its name.

    Raises:
        UserError: one has no name or no folder, or two have the same name.
    """
    adapters: dict[str, Path] = {}
    for text in options.adapter:
        name, _, folder = text.partition("=")
        if not name or not folder or not name.isprintable() or name != name.strip():
            raise UserError(f"--adapter is {text!r}; it must be NAME=FOLDER.")
        if name in adapters:
            raise UserError(f"there are two adapters {name}; each must have a name of its own.")
        adapters[name] = Path(folder)
    return adapters
