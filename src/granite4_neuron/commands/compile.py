"""`granite4-neuron compile`: compile a model for Trainium."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from granite4_neuron.checkpoint.checkpoint import require_folder
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.output_folder import check_output
from granite4_neuron.commands.compiled_options import (
    add_buckets,
    add_compiled_state_dtype,
    add_expert_path,
    add_experts_decode,
    add_ranks_and_sequences,
)
from granite4_neuron.commands.options import (
    add_arithmetic,
    at_least,
    dtype_of,
    kernels_of,
)
from granite4_neuron.devices.neuron import sdk
from granite4_neuron.devices.neuron.compiled_graphs import GraphOptions
from granite4_neuron.devices.neuron.sdk import ATTENTION_KERNELS
from granite4_neuron.errors import UserError

SECOND_WAYS = (
    "granite4-neuron: compilation failed; the reason follows. The compiler may accept a graph in another form. For "
    "prompts try --prefill-scan quadratic, then --attention torch, then --kernels nki. For single tokens try "
    "--decode-kernel nki. If only models with experts fail, try --expert-path nxd, then nki. If memory ran out, try "
    "--jobs 1."
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    compiler = commands.add_parser(
        "compile",
        help="compile a model for Trainium",
        description="Compile the graphs of a model with NxD Inference, for generate --backend nxdi. Needs the Neuron "
        "SDK.",
    )
    compiler.add_argument("--model", required=True, help="a checkpoint folder or a Hugging Face id")
    add_arithmetic(compiler)
    add_expert_path(compiler)
    add_experts_decode(compiler)
    add_compiled_state_dtype(compiler)
    compiler.add_argument(
        "--attention",
        choices=ATTENTION_KERNELS,
        default=ATTENTION_KERNELS[0],
        help="attention over prompts: NxD Inference's kernel where it fits, or torch (default: %(default)s)",
    )
    add_ranks_and_sequences(compiler, tp_degree=4)
    compiler.add_argument(
        "--max-context-length",
        type=at_least(1),
        default=GraphOptions.max_context_length,
        metavar="N",
        help="tokens of the largest graph for prompts; longer prompts take several steps (default: %(default)s)",
    )
    compiler.add_argument(
        "--seq-len",
        type=at_least(1),
        default=4096,
        metavar="N",
        help="longest prompt and continuation (default: %(default)s)",
    )
    add_buckets(compiler)
    compiler.add_argument(
        "--jobs",
        type=at_least(1),
        default=4,
        metavar="N",
        help="graphs that are compiled at a time, after the first; each may take tens of gigabytes of memory (default: "
        "%(default)s)",
    )
    compiler.add_argument(
        "--verify",
        type=at_least(2),
        default=0,
        metavar="T",
        help="also graphs that verify T tokens of each sequence, the last one and drafts, for generate --speculate",
    )
    compiler.add_argument(
        "--draft-model",
        metavar="FOLDER",
        help="with --verify: also the graphs of a smaller checkpoint with the same tokenizer, for generate "
        "--draft-model",
    )
    compiler.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    compiler.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.max_context_length > options.seq_len:
        raise UserError(
            f"--seq-len is {options.seq_len}; it must be at least --max-context-length, which is "
            f"{options.max_context_length}."
        )
    _check_buckets("--context-buckets", options.context_buckets, "--max-context-length", options.max_context_length)
    _check_buckets("--token-buckets", options.token_buckets, "--seq-len", options.seq_len)
    if options.draft_model is not None and not options.verify:
        raise UserError("--draft-model needs --verify: the number of tokens, the last one and drafts, to verify.")
    check_output(options.output)
    sdk.require()
    # Not at the top: only this command and the nxdi backend need NxD Inference.
    from granite4_neuron.devices.neuron.nxdi.loading import compile_model

    checkpoint = open_checkpoint(options.model)
    folder = require_folder(checkpoint)
    draft = options.draft_model
    draft_folder = None if draft is None else require_folder(open_checkpoint(draft))
    try:
        compile_model(
            folder,
            options.output,
            draft_folder=draft_folder,
            dtype=dtype_of(options.dtype or checkpoint.dtype),
            tp_degree=options.tp_degree,
            batch_size=options.batch_size,
            max_context_length=options.max_context_length,
            seq_len=options.seq_len,
            context_buckets=options.context_buckets,
            token_buckets=options.token_buckets,
            verified_tokens=options.verify,
            jobs=options.jobs,
            **kernels_of(options, options.kernels),
            experts_decode=options.experts_decode,
            state_dtype=options.state_dtype,
            attention=options.attention,
        )
    except (RuntimeError, subprocess.CalledProcessError):  # as the compiler and its wrappers fail
        print(SECOND_WAYS, file=sys.stderr)
        raise
    print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _check_buckets(name: str, buckets: list[int] | None, limit_name: str, limit: int) -> None:
    if buckets is not None and max(buckets) != limit:
        raise UserError(f"{name} ends with {max(buckets)}; its largest must be {limit_name}, which is {limit}.")
