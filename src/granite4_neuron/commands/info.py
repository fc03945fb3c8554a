"""`granite4-neuron info`: print layers, parameters and sizes of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import (
    add_model,
    checkpoint_unless_published,
    config_and_dtype_in,
    model_or_bundled,
)
from granite4_neuron.commands.output import print_table, size, write
from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig
from granite4_neuron.config.dtypes import DTYPE_BYTES
from granite4_neuron.model.parameters import parameters, weight_bytes
from granite4_neuron.state.sizes import sequence_bytes, token_bytes

if TYPE_CHECKING:
    from granite4_neuron.checkpoint.checkpoint import Checkpoint


def add_parser(commands: argparse._SubParsersAction) -> None:
    info = commands.add_parser("info", help="what a checkpoint is: layers, parameters, bytes, state and cache sizes")
    add_model(info, family=True)
    info.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    name = str(model_or_bundled(options))
    checkpoint = checkpoint_unless_published(name, options.revision)
    config, dtype = config_and_dtype_in(checkpoint, name)
    # Not at the top: --help prints no table.
    from rich.markup import escape
    from rich.table import Table

    table = Table("", escape(name), title=config.architecture, show_header=True)
    rows = _info_rows(config, dtype, checkpoint)
    for row in rows:
        table.add_row(*row)
    of = dict(rows)
    sequence = f"{of['state per sequence']} and {of['KV cache per token']} a token"
    write(f"It has {of['parameters']} parameters: {of['weights']}. Each sequence takes {sequence} more.")
    print_table(table)
    return 0


def _info_rows(config: ModelConfig, dtype: str, checkpoint: Checkpoint | None) -> list[tuple[str, str]]:
    itemsize = DTYPE_BYTES[dtype]
    stored_in = [] if checkpoint is None else checkpoint.stored_in
    total, active = _parameters(config)
    return [
        *_rows_of_layers(config),
        ("parameters", f"{total:,}"),
        ("active per token", f"{active:,}"),
        ("weights", _weights(config, dtype, checkpoint)),
        *([("stored in", ", ".join(stored_in))] if stored_in else []),
        ("state per sequence", size(sequence_bytes(config, itemsize))),
        ("KV cache per token", f"{token_bytes(config, itemsize):,} bytes"),
        ("longest context", f"{config.max_position_embeddings:,} tokens"),
    ]


def _weights(config: ModelConfig, dtype: str, checkpoint: Checkpoint | None) -> str:
    """Return the size and the formats of the weights in memory, where those that are stored quantized stay so."""
    if checkpoint is None or checkpoint.quantization is None or not checkpoint.has_weights:
        return f"{size(weight_bytes(config, DTYPE_BYTES[dtype]))} in {dtype}"
    # Not at the top: other checkpoints need no torch.
    import torch

    from granite4_neuron.model.families import model_of

    with torch.device("meta"):
        model = model_of(config)
    formats = {name: each.format for name, each in checkpoint.quantized_weights(model, keep=()).items()}
    quantized = {name: format.num_bytes(model.get_parameter(name).shape) for name, format in formats.items()}
    names = ", ".join(sorted({format.name for format in formats.values()}))
    return f"{size(weight_bytes(config, DTYPE_BYTES[dtype], quantized))} in {names} and {dtype}"


def _parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the number of all parameters, and of those that a token uses."""
    table = parameters(config).values()
    total = sum(one.numel for one in table)
    if not config.num_local_experts:
        return total, total
    expert = sum(one.numel for one in table if one.is_of_experts) // config.num_local_experts
    return total, total - (config.num_local_experts - config.num_experts_per_tok) * expert


def _rows_of_layers(config: ModelConfig) -> Iterator[tuple[str, str]]:
    attention = [index for index, kind in enumerate(config.layer_types) if config.parts(kind).mixer == ATTENTION]
    others = {kind: config.layer_types.count(kind) for kind in config.layer_types if kind not in (MAMBA, ATTENTION)}
    counts = {"Mamba-2": config.layers_with(MAMBA), ATTENTION: len(attention), **others}
    yield "layers", ", ".join(f"{count} {kind}" for kind, count in counts.items())
    is_all = len(attention) == len(config.layer_types)
    yield "attention at", "every layer" if is_all else ", ".join(map(str, attention)) or "none"
    yield "hidden size, vocabulary", f"{config.hidden_size}, {config.vocab_size}"
    if config.layers_with(MAMBA):
        heads = f"{config.mamba_n_heads} x {config.mamba_d_head}"
        yield "Mamba heads, state, groups", f"{heads}, {config.mamba_d_state}, {config.mamba_n_groups}"
    if attention:
        heads = f"{config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}"
        yield "attention heads, key heads, width, positions", f"{heads}, {'rope' if config.uses_rope else 'none'}"
    if config.num_local_experts:
        yield "experts, per token", f"{config.num_local_experts}, {config.num_experts_per_tok}"
