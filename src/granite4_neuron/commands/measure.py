"""`granite4-neuron measure`: measure step times on this machine, for `plan --steps`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from granite4_neuron.commands.options import (
    add_drawing,
    add_model,
    add_runtime,
    at_least,
    check_folder_of,
    drawing_options,
    load_runtime,
    model_checkpoint,
)
from granite4_neuron.commands.output import ProgressBar
from granite4_neuron.commands.serve import MAX_NUM_SEQS, MODEL_LEN, max_model_len
from granite4_neuron.devices.torch.options import kind_of_device


def add_parser(commands: argparse._SubParsersAction) -> None:
    measure = commands.add_parser(
        "measure",
        help="measure how long steps take on this machine, for plan",
        description="Measure how long steps of a model take on this machine, by the number of sequences, their tokens "
        "and their lengths, and write a file for plan --traffic or --rate. It takes minutes, in which the machine "
        "should have nothing else to do.",
    )
    add_model(measure)
    measure.add_argument("--output", type=Path, required=True, metavar="FILE", help="write the step times to this file")
    measure.add_argument(
        "--max-num-seqs",
        type=at_least(1),
        default=MAX_NUM_SEQS,
        metavar="N",
        help="the most texts at a time; plan extrapolates beyond it (default: %(default)s)",
    )
    measure.add_argument(
        "--max-model-len",
        type=at_least(16),
        metavar="N",
        help=f"the most tokens of a text (default: {MODEL_LEN}, or the model's longest if less)",
    )
    add_drawing(measure)
    add_runtime(measure)
    measure.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_folder_of(options.output)
    sampling = drawing_options(options)
    checkpoint = model_checkpoint(options)
    runtime, tokenizer = load_runtime(options, checkpoint)
    # Not at the top: these imports take seconds, and --help does not need them.
    from granite4_neuron.planning.simulation.measuring import measure
    from granite4_neuron.runtime.interface import require

    require(runtime, "snapshot")
    longest = max_model_len(options, runtime)
    print(
        f"Measuring steps of up to {options.max_num_seqs} texts of up to {longest:,} tokens, which takes minutes ...",
        file=sys.stderr,
    )
    with ProgressBar("step times", "measured") as progress:
        measured = measure(
            runtime,
            tokenizer,
            model=Path(options.model or checkpoint.path).name,
            backend=options.backend,
            machine=_machine(options.backend, options.device),
            most_rows=options.max_num_seqs,
            longest=longest,
            sampling=sampling,
            progress=progress,
        )
    measured.save(options.output)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _machine(backend: str, device: str) -> str:
    """Return the name of what computes."""
    import torch

    from granite4_neuron.ops.launch_parameters import processor_name

    if backend == "torch" and kind_of_device(device) == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()
