"""The speed of a model on this processor in one table, in all formats of weights, beside llama.cpp and OpenVINO.

    python -m benchmarks.random_checkpoint h-350m h-350m
    python -m benchmarks.latency.processor_table h-350m --llama-cpp llama.cpp/build/bin --openvino h-350m-openvino

It measures medians in turns, as benchmark_latency.py does. llama.cpp gets the weights in BF16, Q8_0 and Q4_0.
h-350m-openvino has a folder with an export of these weights for each format: bfloat16, int8 and int4. A second table
has the time of a step of several sequences. Both are printed in Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.errors import reports_errors
from benchmarks.latency.implementations import LLAMA_CPP, OPENVINO
from benchmarks.latency.measurement import Result, measure_all
from benchmarks.latency.options import check, check_lengths
from benchmarks.latency.options import parser as latency_parser
from benchmarks.latency.report import machine_facts, machine_rates
from benchmarks.other_engines.llama_cpp import GGUF_TYPES, gguf_of
from granite4_neuron.commands.output import write
from granite4_neuron.config.choices import QUANTIZATIONS

PLAIN = "bfloat16"
FORMATS = (PLAIN, *QUANTIZATIONS)
_STEP_PROMPT = 16  # tokens, so few that attention takes little of a step of several sequences


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = _parser().parse_args(arguments)
    write(", ".join(machine_facts(options.threads).values()) + "\n")
    of_peers = "".join(f" over {peer} |" for peer in _peers(options))
    write(f"| | prefill, tokens/s |{of_peers} of the bound | decode, ms |{of_peers} over the weights, MiB |")
    write("|---" * (5 + 2 * len(_peers(options))) + "|")
    rates = [rate for name in options.formats for rate in _print_format(name, options)]
    write("")
    _print_steps(options)
    write("\n" + "\n".join(rates))
    return 0


def _print_format(name: str, options: argparse.Namespace) -> list[str]:
    """Print the rows of a format; return lines on the machine's state meanwhile."""
    peers = [peer for peer in _peers(options) if name in (PLAIN, *GGUF_TYPES)]
    with _compared(name, peers, options) as compared:
        lengths = ("--prompt-length", *map(str, options.prompt_length), "--output-length", str(options.output_length))
        points = _measure(name, options, *lengths, *compared)
    for results in points:
        write(_row(name, results, _peers(options)))
    return [f"{name}: {line}" for line in machine_rates([results[0] for results in points])]


def _row(name: str, results: Sequence[Result], peers: Sequence[str]) -> str:
    ours = results[0]
    of = {result.implementation: result for result in results}
    prefill = [of[peer].first_token_ms / ours.first_token_ms if peer in of else None for peer in peers]
    decode = [of[peer].token_ms_p50 / ours.token_ms_p50 if peer in of else None for peer in peers]
    cells = (
        f"{name}, prompt {ours.prompt_length}",
        f"{ours.prefill_tokens_per_second:,.0f}",
        *map(_times, prefill),
        f"{ours.prefill_of_bound:.2f}",
        f"{ours.token_ms_p50:.1f}",
        *map(_times, decode),
        f"{ours.over_weights_mib:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} times"


def _print_steps(options: argparse.Namespace) -> None:
    """Print the time of a step of several sequences, in each format."""
    write("| ms per step |" + "".join(f" {name} |" for name in options.formats))
    write("|---" * (1 + len(options.formats)) + "|")
    batch_sizes = ("--batch-size", *map(str, options.batch_size))
    lengths = ("--prompt-length", str(_STEP_PROMPT), "--output-length", str(options.output_length))
    columns = [_measure(name, options, *batch_sizes, *lengths) for name in options.formats]
    for batch_size, *points in zip(options.batch_size, *columns, strict=True):
        write(f"| {batch_size} |" + "".join(f" {ours.token_ms_p50:.1f} |" for (ours,) in points))


def _measure(name: str, options: argparse.Namespace, *arguments: str) -> list[list[Result]]:
    """Return benchmark_latency.py's results with these arguments in a format, by point."""
    quantize = () if name == PLAIN else ("--quantize", name)
    common = ("--model", str(options.model), "--dtype", PLAIN, "--threads", str(options.threads))
    latency = latency_parser("").parse_args([*common, "--repeats", str(options.repeats), *quantize, *arguments])
    check(latency)
    check_lengths(options.model, latency)
    return measure_all(options.model, latency)


@contextmanager
def _compared(name: str, peers: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Return the arguments for the compared implementations. llama.cpp's file is temporary."""
    with tempfile.TemporaryDirectory() as into:
        arguments = ["--compare", *peers] if peers else []
        if LLAMA_CPP in peers:
            file = gguf_of(options.model, None if name == PLAIN else name, options.llama_cpp, Path(into))
            arguments += ["--llama-cpp", str(options.llama_cpp), "--gguf", str(file)]
        if OPENVINO in peers:
            arguments += ["--openvino", str(options.openvino / name)]
        yield tuple(arguments)


def _peers(options: argparse.Namespace) -> list[str]:
    given = {LLAMA_CPP: options.llama_cpp, OPENVINO: options.openvino}
    return [name for name, folder in given.items() if folder is not None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the checkpoint's folder, in bfloat16")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=[PLAIN, "int8", "int4"], help="formats of weights"
    )
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="the folder of llama-bench and llama-quantize")
    parser.add_argument(
        "--openvino", type=Path, metavar="FOLDER", help="a folder with an exported model for each format"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--prompt-length", type=int, nargs="+", default=[512, 2048], metavar="N", help="default: 512 2048"
    )
    parser.add_argument("--output-length", type=int, default=17, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1, 8, 16, 32], metavar="N", help="batch sizes of the second table"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
