"""`granite4-neuron compile`: compile a model for Trainium2."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from granite4_neuron import checkpoint, neuron_sdk
from granite4_neuron.commands.options import add_arithmetic, add_expert_path, add_ranks_and_sequences, chosen_dtype
from granite4_neuron.errors import UserError


def add_parser(commands: argparse._SubParsersAction) -> None:
    compiler = commands.add_parser(
        "compile",
        help="compile a model for Trainium2",
        description="Compile the graphs of a model with NxD Inference, for generate --backend nxdi. Needs the Neuron "
        "SDK.",
    )
    compiler.add_argument("--model", required=True, help="a checkpoint folder or a Hugging Face id")
    add_arithmetic(compiler)
    add_expert_path(compiler)
    add_ranks_and_sequences(compiler, tp_degree=4)
    compiler.add_argument(
        "--max-context-length",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of the largest graph for prompts; longer prompts take several steps (default: %(default)s)",
    )
    compiler.add_argument(
        "--seq-len", type=int, default=4096, metavar="N", help="longest prompt and continuation (default: %(default)s)"
    )
    compiler.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    compiler.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    counts = dict(
        tp_degree=options.tp_degree,
        batch_size=options.batch_size,
        max_context_length=options.max_context_length,
        seq_len=options.seq_len,
    )
    if min(counts.values()) < 1 or options.max_context_length > options.seq_len:
        raise UserError(
            "--tp-degree, --batch-size, --max-context-length and --seq-len must be at least 1, and --seq-len no less "
            "than --max-context-length."
        )
    neuron_sdk.require()
    # Not at the top: only this command and the nxdi backend need NxD Inference.
    from granite4_neuron.nxdi.loading import compile_model

    folder = checkpoint.find(options.model)
    dtype = chosen_dtype(options) or checkpoint.stored_dtype(folder)
    kernels = {name: getattr(options, name) for name in ("prefill_scan", "decode_kernel", "expert_path")}
    compile_model(folder, options.output, dtype=dtype, **counts, **kernels)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0
