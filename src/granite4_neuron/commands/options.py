"""Options that several commands have, and what they come to."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron import checkpoint
from granite4_neuron.config import DTYPES, GraniteMoeHybridConfig, family_names
from granite4_neuron.errors import UserError
from granite4_neuron.generation import bundled_checkpoint, load
from granite4_neuron.generation.loading import BACKENDS
from granite4_neuron.neuron_sdk import EXPERT_PATHS
from granite4_neuron.ops import DECODE_KERNELS, PREFILL_SCANS, QUANTIZATIONS
from granite4_neuron.ops.cpu import CPU_KERNELS
from granite4_neuron.ops.launch_parameters import FOLDER_VARIABLE
from granite4_neuron.runtime.interface import Runtime

EXAMPLES = """\
examples:
  granite4-neuron generate "An assignment statement"
  granite4-neuron generate --model ibm-granite/granite-4.0-h-350m --chat "What is a monad?" --temperature 0.7 --seed 1
  granite4-neuron generate --model ./checkpoint --file report.txt --max-tokens 500 --verbose
  granite4-neuron info --model granite-4.0-h-small
  granite4-neuron check --model ./checkpoint --dtype bfloat16
  granite4-neuron graphs --model granite-4.0-h-small --tp-degree 4
  granite4-neuron plan --model granite-4.0-h-small --instance trn2.3xlarge --tp-degree 4
"""


def add_model(parser: argparse.ArgumentParser, family: bool = False) -> None:
    names = f", or one of {', '.join(family_names())}" if family else ""
    parser.add_argument(
        "--model",
        help=f"a checkpoint folder or a Hugging Face id{names} (default: the small model that comes with the package)",
    )


def add_arithmetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: that of the weights)")
    parser.add_argument(
        "--prefill-scan",
        choices=PREFILL_SCANS,
        default="chunked",
        help="how Mamba layers scan a prompt: linear in its length, with one decay matrix per step, or, on Neuron "
        "devices, with an NKI kernel that goes token by token (scan) or chunk by chunk (ssd)",
    )
    parser.add_argument(
        "--decode-kernel",
        choices=DECODE_KERNELS,
        default="torch",
        help="how Mamba layers advance by one token: in torch, or, on Neuron devices, with an NKI kernel",
    )


def add_expert_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expert-path",
        choices=EXPERT_PATHS,
        default=EXPERT_PATHS[0],
        help="how NxD Inference multiplies with the experts' weights: in torch, with an NKI kernel where there are few "
        "tokens, or with NxD's kernels (default: %(default)s)",
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="where to run (default: %(default)s)")
    parser.add_argument("--compiled", metavar="DIR", help="for --backend nxdi: what the compile command wrote")


def load_runtime(options: argparse.Namespace, model: str | Path) -> tuple[Runtime, PreTrainedTokenizerFast]:
    """`load` with the options of `add_arithmetic`, `add_backend` and `add_cpu_options`."""
    return load(
        model,
        dtype=chosen_dtype(options),
        prefill_scan=options.prefill_scan,
        backend=options.backend,
        decode_kernel=options.decode_kernel,
        cpu_kernels=options.cpu_kernels,
        compiled=options.compiled,
        quantize=options.quantize,
        tuned_configs=options.tuned_configs,
    )


def add_ranks_and_sequences(parser: argparse.ArgumentParser, tp_degree: int) -> None:
    parser.add_argument(
        "--tp-degree", type=int, default=tp_degree, metavar="T", help="ranks of the model (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences at a time (default: 1)")


def add_cpu_options(parser: argparse.ArgumentParser) -> None:
    """Options of the cpu backend: which kernels it runs, and how they are launched."""
    parser.add_argument(
        "--cpu-kernels",
        choices=CPU_KERNELS,
        default="fused",
        help="what the cpu backend computes with: kernels compiled for this processor at first use, or plain torch "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tuned-configs",
        metavar="DIR",
        help="of the cpu backend: a folder of launch parameters that benchmark_latency.py --tune wrote (default: the "
        f"one in the environment variable {FOLDER_VARIABLE}, if any)",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="of the cpu backend: hold the large weights in int8 with a scale per output channel (default: in --dtype)",
    )


def model_or_bundled(options: argparse.Namespace) -> str | Path:
    if options.model is not None:
        return options.model
    print("Using the small model that comes with the package; --model chooses another.", file=sys.stderr)
    return bundled_checkpoint()


def config_and_dtype(name: str) -> tuple[GraniteMoeHybridConfig, torch.dtype]:
    """Of a checkpoint, or of a family member where there is no folder of that name."""
    if not os.path.isdir(name) and GraniteMoeHybridConfig.is_family_member(name):
        config = GraniteMoeHybridConfig.from_family(name)
        return config, getattr(torch, config.torch_dtype)
    folder = checkpoint.find(name)
    return GraniteMoeHybridConfig.from_file(folder / "config.json"), checkpoint.stored_dtype(folder)


def chosen_dtype(options: argparse.Namespace) -> torch.dtype | None:
    return None if options.dtype is None else getattr(torch, options.dtype)


def check_folder_of(file: Path | None) -> None:
    """See, before any work, whether there is a folder to write `file` to.

    Raises:
        UserError: there is not.
    """
    if file and not file.absolute().parent.is_dir():
        raise UserError(f"{file} cannot be written: there is no such folder.")
