"""Measures whether a text depends on how it is served: each sequence runs alone, beside others, with its prompt in
chunks, after a prefix hit, with drafts, and on other numbers of threads.

    python -m benchmarks.one_text --compare transformers vllm
    python -m benchmarks.one_text --random-weights h-350m --numbers bfloat16 int8
    python -m benchmarks.one_text --backend torch --device cuda --batch-invariant --random-weights h-350m

Texts are greedy, and this package's are sampled too, each prompt with a seed and options of its own. A row is a token,
and its number is the log-probability that the implementation reports. Rows without a number, and rows after the first
token that differs, are not compared.

vllm is vLLM without this package's plugin, vllm-plugin is vLLM with it. Both need an environment with vLLM. llama.cpp
is llama-server with the same weights. It needs gguf (`pip install gguf`). openvino is OpenVINO GenAI's engine on an
export of the same weights. The tables of products show the price of a fixed order of sums: this package's products
beside torch's, whose order depends on the number of rows.
"""

from __future__ import annotations

import argparse
import operator
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from rich.table import Table

from benchmarks.errors import Failed, reports_errors
from benchmarks.one_text.engines import (
    NUMBERS,
    OURS,
    RUNTIMES,
    VLLM,
    Ours,
    Served,
    Text,
    Transformers,
    VLLMWithPlugin,
    Way,
)
from benchmarks.one_text.llama_cpp import LlamaServer
from benchmarks.one_text.openvino import OpenVinoGenAI
from benchmarks.one_text.products import measure_products
from benchmarks.other_engines import openvino
from benchmarks.other_engines.llama_cpp import QUANTIZE
from benchmarks.other_engines.llama_server import LLAMA_CPP, SERVER, check_options
from benchmarks.random_checkpoint import write_random
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table, write
from granite4_neuron.config import ModelConfig, config_from_file
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.errors import UserError
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.ops.launch_parameters import processor_name

OPENVINO = "openvino"
ENGINES: dict[str, type[Served]] = {
    OURS: Ours,
    "transformers": Transformers,
    "vllm": VLLM,
    "vllm-plugin": VLLMWithPlugin,
    LLAMA_CPP: LlamaServer,
    OPENVINO: OpenVinoGenAI,
}
ALONE = Way("alone")
THREADS = (2, 3)
WAYS = (
    *(Way(f"{batch} at a time", batch=batch) for batch in (2, 8, 32)),
    Way("prompt in chunks", in_chunks=True),
    Way("behind a prefix hit", from_cache=True),
    Way("with drafts", drafts=True),
    *(Way(f"on {threads} threads", threads=threads) for threads in THREADS),
)


@dataclass(frozen=True)
class Difference:
    """The differences from the texts of each sequence alone."""

    rows: int
    compared_rows: int
    largest: float
    texts: int


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit code."""
    options = _parser().parse_args(arguments)
    _check(options)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(ALONE.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or bundled_checkpoint()
        if options.random_weights:
            folder = write_random(options.random_weights, Path(temporary) / "model")
        config = config_from_file(folder / "config.json")
        write(f"{options.random_weights or options.model or 'the bundled model'}, {processor_name()}")
        write(f"{options.sequences} prompts of {options.prompt_length} tokens, {options.output_length} new ones each")
        prompts = _prompts(config.vocab_size, options)
        for numbers in options.numbers:
            _compare(folder, numbers, prompts, options)
    if options.backend == "cpu":
        for dtype in ("float32", "bfloat16"):
            print_table(_products(config, dtype))
    return 0


def _check(options: argparse.Namespace) -> None:
    """
    Raises:
        UserError: options do not go together.
    """
    check_options(options.compare, options.llama_cpp)
    if options.slots is None and options.backend != "cpu" and (options.backend, options.device) != ("torch", "cuda"):
        options.slots = max(way.batch for way in WAYS)
    if (OPENVINO in options.compare) != (options.openvino is not None):
        raise UserError(f"--compare {OPENVINO} needs --openvino, the folder of the exported model, and no other does.")
    if options.openvino is not None:
        openvino.check(options.openvino)


def differences(alone: Sequence[Text], served: Sequence[Text]) -> Difference:
    """Compare texts with each sequence's text alone."""
    pairs = [pair for texts in zip(alone, served, strict=True) for pair in _same_context(*texts)]
    pairs = [pair for pair in pairs if None not in (pair[0].logprob, pair[1].logprob)]
    differ = [abs(before.logprob - after.logprob) for before, after in pairs if before != after]
    texts = [[[row.token for row in text] for text in each] for each in (alone, served)]
    different_texts = sum(map(operator.ne, *texts))
    return Difference(len(differ), len(pairs), max(differ, default=0.0), different_texts)


def _same_context(one: Text, other: Text) -> Iterator[tuple]:
    for pair in zip(one, other, strict=True):
        yield pair
        if pair[0].token != pair[1].token:
            return


def _compare(folder: Path, numbers: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> None:
    table = Table("", "against alone", "rows that differ", "largest", "texts", title=numbers, title_justify="left")
    notes = []
    for name in (OURS, *options.compare):
        try:
            with closing(ENGINES[name](folder, numbers, options)) as engine:
                for sampled in (False, True) if name == OURS else (False,):
                    called = "… sampled" if sampled else name
                    alone = engine.serve(replace(ALONE, sampled=sampled), _groups(prompts, options.sequences, 1))
                    for way in WAYS:
                        try:
                            groups = _groups(prompts, options.sequences, way.batch)
                            served = engine.serve(replace(way, sampled=sampled), groups)[: options.sequences]
                            table.add_row(called, way.name, *_cells(differences(alone, served), options.sequences))
                        except Failed as error:
                            table.add_row(called, way.name, "-")
                            notes.append(f"{called}, {way.name}: {error}")
                    table.add_section()
        except Failed as error:
            notes.append(f"{name}: {error}")
    print_table(table)
    for note in notes:
        write(note)


def _cells(found: Difference, sequences: int) -> tuple[str, str, str]:
    largest = f"{found.largest:.1e}" if found.largest else "0"
    return f"{found.rows} of {found.compared_rows}", largest, f"{found.texts} of {sequences}"


def _groups(prompts: Sequence[Sequence[int]], sequences: int, batch: int) -> list[Sequence[Sequence[int]]]:
    """Return the groups of prompts that run together, up to the group with the last compared sequence."""
    return [prompts[start : start + batch] for start in range(0, sequences, batch)]


def _prompts(vocab_size: int, options: argparse.Namespace) -> list[list[int]]:
    """Return prompts that repeat themselves, so that drafts are found: the prompts to compare, and others."""
    generator = torch.Generator().manual_seed(0)
    count = options.sequences + max(way.batch for way in WAYS)
    period = max(1, options.prompt_length // 3)
    once = torch.randint(3, vocab_size, (count, period), generator=generator).tolist()
    return [(one * 4)[: options.prompt_length] for one in once]


def _products(config: ModelConfig, dtype: str) -> Table:
    table = Table("product", "rows", "ours", "torch's", "ratio", title=f"products in {dtype}", title_justify="left")
    for product in measure_products(config, getattr(torch, dtype)):
        ours, theirs = (f"{1e6 * seconds:,.0f} us" for seconds in (product.ours, product.torchs))
        shape = f"{product.name}, {product.outputs} x {product.inputs}"
        table.add_row(shape, str(product.rows), ours, theirs, f"{product.ours / product.torchs:.2f}")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_text", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a checkpoint's folder (default: the bundled model)")
    model.add_argument("--random-weights", metavar="NAME", help="real dimensions, random weights")
    others = [name for name in ENGINES if name != OURS]
    parser.add_argument(
        "--compare", nargs="*", choices=others, default=[], help="what is installed beside this package"
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="FOLDER", help=f"for --compare {LLAMA_CPP}: of {SERVER} and {QUANTIZE}"
    )
    parser.add_argument(
        "--openvino",
        type=Path,
        metavar="FOLDER",
        help=f"for --compare {OPENVINO}: the same weights, as `optimum-cli export openvino` has written them",
    )
    parser.add_argument(
        "--backend", choices=RUNTIMES, default="cpu", help="this package's backend (default: %(default)s)"
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="for --backend torch (default: %(default)s)")
    parser.add_argument("--compiler", help="for --backend torch, such as aot_eager (default: the device's)")
    parser.add_argument("--batch-invariant", action="store_true", default=None, help="for a GPU, as for generate")
    parser.add_argument(
        "--slots",
        type=at_least(1),
        help="of the state, however many sequences run (default: as many on a CPU and a GPU, and "
        f"{max(way.batch for way in WAYS)} on other devices, whose graphs have the sums of all slots)",
    )
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=["bfloat16"], help="default: %(default)s")
    parser.add_argument("--sequences", type=int, default=8, help="that are compared (default: %(default)s)")
    parser.add_argument("--prompt-length", type=int, default=600, help="default: %(default)s")
    parser.add_argument("--output-length", type=int, default=24, help="default: %(default)s")
    return parser
