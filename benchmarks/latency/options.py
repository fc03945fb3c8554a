"""The options of a latency benchmark, and their checks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import transformers

from benchmarks.latency.implementations import LLAMA_CPP, OPENVINO, TRANSFORMERS
from benchmarks.other_engines import openvino
from benchmarks.other_engines.llama_cpp import BENCH, GGUF_TYPES
from granite4_neuron import UserError
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.commands.engine_options import add_speculation, speculation
from granite4_neuron.commands.options import (
    add_arithmetic,
    add_backend,
    add_drawing,
    backend_options,
    check_folder_of,
    drawing_options,
    kernels_of,
)
from granite4_neuron.commands.plot import add_plot, check_plot
from granite4_neuron.config.published import published_names
from granite4_neuron.devices.backends import check_backend
from granite4_neuron.devices.neuron import sdk
from granite4_neuron.devices.torch.devices import find_compiler, find_device

BACKENDS = ("cpu", "torch", "nxdi")


def parser(description: str) -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="checkpoint folder, GGUF file or Hugging Face id (default: the small bundled model)"
    )
    parser.add_argument(
        "--random-weights",
        metavar="NAME",
        help=f"real dimensions, random weights: one of {', '.join(published_names())}",
    )
    add_arithmetic(parser)
    add_backend(parser, BACKENDS)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1], metavar="N", help="default: 1")
    parser.add_argument("--prompt-length", type=int, nargs="+", default=[128], metavar="N", help="default: 128")
    parser.add_argument("--output-length", type=int, default=32, metavar="N", help="new tokens, default: 32")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="runs that are not counted, default: 1")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs that are counted, default: 3")
    add_drawing(parser)
    parser.set_defaults(threads=os.cpu_count() or 1)
    add_speculation(parser)
    parser.add_argument(
        "--kept-prompt", action="store_true", help="measure what a file of an earlier run's prompt saves"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the time of each part of the model instead of the other numbers"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        choices=[TRANSFORMERS, LLAMA_CPP, OPENVINO],
        default=[],
        help="run these on the same weights too, and print ratios",
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="FOLDER", help="for --compare llama.cpp: with llama-bench and llama-quantize"
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="for --compare llama.cpp: the weights (default: made for the run; with --quantize int8 in Q8_0, with int4 "
        "in Q4_0)",
    )
    parser.add_argument(
        "--openvino",
        type=Path,
        metavar="FOLDER",
        help="for --compare openvino: the same weights, as `optimum-cli export openvino` has written them",
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="measure also beside N processes that each keep a processor busy",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    add_plot(parser, "the numbers")
    return parser


def check(options: argparse.Namespace) -> None:
    """Check, before any work, that the options go together.

    Raises:
        UserError: they do not, or one of them needs something that is missing.
    """
    _check_numbers(options)
    _check_llama_cpp(options)
    _check_others(options)
    check_folder_of(options.json)
    check_plot(options.plot)
    _check_backend(options)
    if drawing_options(options)["temperature"] and options.compare:
        raise UserError("--compare has greedy texts of others only; leave out --temperature.")
    if is_reuse(options) or options.profile:
        _check_reuse(options)
    if options.profile and options.cpu_kernels == "torch":
        raise UserError("--profile takes the time of the fused kernels; leave out --cpu-kernels torch.")
    if options.model and options.random_weights:
        raise UserError("give either --model or --random-weights, not both.")


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("batch_size", "prompt_length", "output_length", "repeats", "threads"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1.")
    for name in ("warmup", "busy"):
        if getattr(options, name) < 0:
            raise UserError(f"--{name} must be at least 0.")


def _check_others(options: argparse.Namespace) -> None:
    if (OPENVINO in options.compare) != (options.openvino is not None):
        raise UserError("--compare openvino and --openvino, the folder of the exported model, go together.")
    if options.openvino is not None:
        openvino.check(options.openvino)
    if TRANSFORMERS in options.compare and int(transformers.__version__.split(".")[0]) < 5:
        raise UserError(f"--compare transformers needs transformers 5; {transformers.__version__} is installed.")


def _check_backend(options: argparse.Namespace) -> None:
    check_backend(options.backend, backend_options(options) | kernels_of(options, options.kernels))
    if options.backend == "nxdi":
        sdk.require()
    if options.backend == "torch":
        find_device(options.device)
        if options.compiler is not None:
            find_compiler(options.compiler)


def _check_llama_cpp(options: argparse.Namespace) -> None:
    if LLAMA_CPP not in options.compare:
        if options.llama_cpp or options.gguf:
            raise UserError("--llama-cpp and --gguf belong to --compare llama.cpp.")
        return
    if options.llama_cpp is None:
        raise UserError("--compare llama.cpp needs --llama-cpp, the folder of llama-bench.")
    if options.batch_size != [1]:
        raise UserError("llama-bench decodes one sequence; --compare llama.cpp goes with --batch-size 1.")
    if options.gguf is None and options.quantize not in (None, *GGUF_TYPES):
        raise UserError(f"llama.cpp has nothing like {options.quantize}; give --gguf, the weights to compare with.")
    for file in (options.llama_cpp / BENCH, options.gguf):
        if file is not None and not file.is_file():
            raise UserError(f"there is no file {file}.")


def _check_reuse(options: argparse.Namespace) -> None:
    modes = {
        f"--{name.replace('_', '-')}": getattr(options, name)
        for name in ("speculate", "draft_model", "kept_prompt", "profile")
    }
    given = [option for option, value in modes.items() if value]
    if len(given) > 1:
        raise UserError(f"give one of {' and '.join(given)} at a time.")
    if options.speculate is not None:
        speculation(options.speculate)
    others = {f"--backend {options.backend}": options.backend != "cpu"}
    others |= {f"--{name}": bool(getattr(options, name)) for name in ("compare", "json", "plot", "temperature")}
    for option, is_given in others.items():
        if is_given:
            raise UserError(f"{given[0]} is measured on the cpu beside the same without; leave out {option}.")


def check_lengths(folder: Path, options: argparse.Namespace) -> None:
    """Check that the model takes texts of this length.

    Raises:
        UserError: it does not take them.
    """
    limit = open_checkpoint(folder).config.max_position_embeddings
    longest = max(options.prompt_length) + options.output_length
    if longest > limit:
        raise UserError(f"prompt and output make {longest} tokens; this model takes at most {limit}.")


def is_reuse(options: argparse.Namespace) -> bool:
    """Return whether speculation or a kept prompt is measured."""
    return options.kept_prompt or options.speculate is not None or options.draft_model is not None
