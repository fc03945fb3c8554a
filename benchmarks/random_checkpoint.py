"""Writes a checkpoint for benchmarks: a family member's dimensions, random weights, and the bundled tokenizer, with
further tokens up to the vocabulary's size.

python -m benchmarks.random_checkpoint h-350m FOLDER
python -m benchmarks.random_checkpoint h-small FOLDER --layers mamba attention --experts 16
python -m benchmarks.random_checkpoint nemotron-3-nano-4b FOLDER --layers mamba mlp attention --vocabulary 43691
python -m benchmarks.random_checkpoint nemotron-3-nano-30b-a3b FOLDER --layers mamba moe attention --mtp attention moe
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.errors import reports_errors
from granite4_neuron import UserError
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig, published_config
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.config.nemotron_h import EXPERTS, MLP
from granite4_neuron.generation import bundled_checkpoint


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the family member")
    parser.add_argument("folder", type=Path, help="new or empty")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=(MAMBA, ATTENTION, MLP, EXPERTS),
        metavar="KIND",
        help="layers of these kinds in place of the member's, and the bundled model's vocabulary",
    )
    parser.add_argument(
        "--mtp",
        nargs="+",
        choices=(ATTENTION, MLP, EXPERTS),
        metavar="KIND",
        help="for a model that has them: also layers for multi-token prediction, of these kinds",
    )
    parser.add_argument("--vocabulary", type=at_least(1), metavar="N", help="with --layers: a vocabulary of N tokens")
    parser.add_argument("--experts", type=at_least(1), metavar="N", help="N experts a layer, of the same width")
    options = parser.parse_args(arguments)
    config = _part(published_config(options.name), options.layers, options.vocabulary, options.experts)
    if options.mtp is not None:
        config = config.with_mtp({"num_nextn_predict_layers": 1, "mtp_layers_block_type": options.mtp})
    _write(config, options.folder, getattr(torch, options.dtype))
    return 0


def _part(
    config: ModelConfig, layers: Sequence[str] | None, vocabulary: int | None, experts: int | None
) -> ModelConfig:
    """Return a config with other layers and their vocabulary, or with fewer experts."""
    changes: dict[str, Any] = {}
    if layers is not None:
        bundled = open_checkpoint(bundled_checkpoint()).config
        same = {name: getattr(bundled, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        if vocabulary is not None:
            if vocabulary < bundled.vocab_size:
                raise UserError(f"--vocabulary is {vocabulary}; the tokenizer has {bundled.vocab_size} tokens.")
            same["vocab_size"] = vocabulary
        changes |= dict(layer_types=tuple(layers), num_hidden_layers=len(layers), **same)
    if experts is not None:
        if not config.num_experts_per_tok <= experts <= config.num_local_experts:
            raise UserError(
                f"--experts is {experts}; a token has {config.num_experts_per_tok} of {config.num_local_experts}."
            )
        changes["num_local_experts"] = experts
    return replace(config, **changes)


def write_random(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a checkpoint with the dimensions of a family member; return its folder."""
    _write(published_config(name), folder, dtype)
    return folder


def _write(config: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    save_model(random_model(config, dtype=dtype), folder, files_from=bundled_checkpoint())
    _name_tokens(folder / "tokenizer.json", config.vocab_size)


def _name_tokens(file: Path, vocab_size: int) -> None:
    """Give each token of a vocabulary a text: a server sends nothing for tokens without one, which real models do not
    have.
    """
    tokenizer = json.loads(file.read_text())
    known = tokenizer["model"]["vocab"]
    known |= {f"\u0120<{token}>": token for token in range(max(known.values()) + 1, vocab_size)}
    file.write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    sys.exit(main())
