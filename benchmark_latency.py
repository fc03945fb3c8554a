"""Latency of hybrid models on this machine, alone or side by side with transformers,
llama.cpp or OpenVINO.

    python benchmark_latency.py
    python benchmark_latency.py --random-weights h-350m --dtype bfloat16 --compare transformers

For each batch size and prompt length it reports the time to first token (prefill and the choice of one token), the time
per output token, tokens per second of both phases, and peak memory. It also reports which share of the machine's bound
both phases reach: for prefill the weights' arithmetic at the rate of a large matrix product, for decode reading weights
and state at the machine's memory bandwidth.

Each point runs in separate processes, one per implementation and one that measures the machine. They take turns, so
that all see the same machine. Before and after each run the benchmark measures the round trip of a word between two
threads. It also compares implementations among runs with similar round trips.

--profile instead prints the parts of a prompt and of a step of decode, in one process: their time, and the average
number of threads that had work.

--speculate or --draft-model instead measure decode with and without drafts, on prompts that already contain the text
that the model will generate, and the cost of a verification relative to a step of decode. --kept-prompt measures the
time to first token with the saved state of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.errors import reports_errors
from benchmarks.latency.implementations import LLAMA_CPP, draws_weights
from benchmarks.latency.measurement import measure_all
from benchmarks.latency.options import check, check_lengths, is_reuse, parser
from benchmarks.latency.profiles import print_profiles
from benchmarks.latency.report import report
from benchmarks.latency.reuse_report import measure_reuse
from benchmarks.other_engines.llama_cpp import gguf_of
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config import published_config


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = parser(__doc__).parse_args(arguments)
    check(options)
    with _checkpoint(options) as folder:
        check_lengths(folder, options)
        if is_reuse(options):
            measure_reuse(folder, options)
            return 0
        if options.profile:
            print_profiles(folder, options)
            return 0
        with _gguf(folder, options):
            points = measure_all(folder, options)
    report(points, options)
    return 0


@contextmanager
def _checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """Return the folder to measure.

    One with random weights is temporary, and has no weights if no process reads them."""
    if options.random_weights is None:
        yield open_checkpoint(options.model or bundled_checkpoint()).path
        return
    config = published_config(options.random_weights)
    options.dtype = options.dtype or config.torch_dtype
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / options.random_weights
        if draws_weights(options):
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config.to_dict()))
        else:
            save_model(random_model(config, dtype=getattr(torch, options.dtype)), path)
        yield path


@contextmanager
def _gguf(folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """Return options.gguf for llama.cpp, or a temporary file if none is given."""
    if LLAMA_CPP not in options.compare or options.gguf is not None:
        yield
        return
    with tempfile.TemporaryDirectory() as into:
        options.gguf = gguf_of(folder, options.quantize, options.llama_cpp, Path(into))
        yield


if __name__ == "__main__":
    sys.exit(main())
