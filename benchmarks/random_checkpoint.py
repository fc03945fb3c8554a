"""Writes a checkpoint for benchmarks: a family member's dimensions, random weights, the bundled model's tokenizer.

python -m benchmarks.random_checkpoint h-350m FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.errors import reports_errors
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.generation import bundled_checkpoint


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the family member")
    parser.add_argument("folder", type=Path, help="new or empty")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    options = parser.parse_args(arguments)
    write_random(options.name, options.folder, getattr(torch, options.dtype))
    return 0


def write_random(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a checkpoint with the dimensions of a family member; return its folder."""
    model = random_model(GraniteMoeHybridConfig.from_family(name), dtype=dtype)
    save_model(model, folder, files_from=bundled_checkpoint())
    return folder


if __name__ == "__main__":
    sys.exit(main())
