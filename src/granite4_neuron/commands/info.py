"""`granite4-neuron info`: print layers, parameters and sizes of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from granite4_neuron.commands.options import add_model, model_or_bundled, stored_model
from granite4_neuron.commands.output import print_table, size, write
from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig
from granite4_neuron.config.dtypes import DTYPE_BYTES
from granite4_neuron.model.parameters import parameters, weight_bytes
from granite4_neuron.state.sizes import sequence_bytes, token_bytes


def add_parser(commands: argparse._SubParsersAction) -> None:
    info = commands.add_parser("info", help="what a checkpoint is: layers, parameters, bytes, state and cache sizes")
    add_model(info, family=True)
    info.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    name = str(model_or_bundled(options))
    config, dtype, stored_in = stored_model(name, options.revision)
    # Not at the top: --help prints no table.
    from rich.markup import escape
    from rich.table import Table

    table = Table("", escape(name), title=config.architecture, show_header=True)
    rows = _info_rows(config, dtype, stored_in)
    for row in rows:
        table.add_row(*row)
    of = dict(rows)
    sequence = f"{of['state per sequence']} and {of['KV cache per token']} a token"
    write(f"It has {of['parameters']} parameters: {of['weights']}. Each sequence takes {sequence} more.")
    print_table(table)
    return 0


def _info_rows(config: ModelConfig, dtype: str, stored_in: Sequence[str]) -> list[tuple[str, str]]:
    itemsize = DTYPE_BYTES[dtype]
    table = parameters(config).values()
    total = active = sum(one.numel for one in table)
    if config.num_local_experts:
        experts = sum(one.numel for one in table if one.is_of_experts) // config.num_local_experts
        active -= (config.num_local_experts - config.num_experts_per_tok) * experts
    mamba = config.layers_with(MAMBA)
    attention = [index for index, kind in enumerate(config.layer_types) if config.parts(kind).mixer == ATTENTION]
    kinds = {MAMBA: "Mamba-2"}
    others = {kind: config.layer_types.count(kind) for kind in config.layer_types if kind not in (MAMBA, ATTENTION)}
    counts = {MAMBA: mamba, ATTENTION: len(attention), **others}
    rows = [
        ("layers", ", ".join(f"{count} {kinds.get(kind, kind)}" for kind, count in counts.items())),
        (
            "attention at",
            "every layer" if len(attention) == len(config.layer_types) else ", ".join(map(str, attention)) or "none",
        ),
        ("hidden size, vocabulary", f"{config.hidden_size}, {config.vocab_size}"),
    ]
    if mamba:
        heads = f"{config.mamba_n_heads} x {config.mamba_d_head}, {config.mamba_d_state}, {config.mamba_n_groups}"
        rows.append(("Mamba heads, state, groups", heads))
    if attention:
        rows.append(
            (
                "attention heads, key heads, width, positions",
                f"{config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}, "
                f"{'rope' if config.uses_rope else 'none'}",
            )
        )
    if config.num_local_experts:
        rows.append(("experts, per token", f"{config.num_local_experts}, {config.num_experts_per_tok}"))
    return [
        *rows,
        ("parameters", f"{total:,}"),
        ("active per token", f"{active:,}"),
        ("weights", f"{size(weight_bytes(config, itemsize))} in {dtype}"),
        *([("stored in", ", ".join(stored_in))] if stored_in else []),
        ("state per sequence", size(sequence_bytes(config, itemsize))),
        ("KV cache per token", f"{token_bytes(config, itemsize):,} bytes"),
        ("longest context", f"{config.max_position_embeddings:,} tokens"),
    ]
