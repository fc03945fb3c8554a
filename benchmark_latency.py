"""Latency of Granite 4 hybrid models on this machine, alone or side by side with transformers.

    python benchmark_latency.py
    python benchmark_latency.py --random-weights h-350m --dtype bfloat16 --compare transformers

For each batch size and prompt length: time to first token (prefill and the choice of one token), time per output token,
tokens per second of both phases, peak memory; and which share of the machine's bound both phases reach: the weights'
arithmetic at the rate of a large matrix product, weights and state at the rate at which memory can be read. Every point
runs in processes of its own, one per implementation and one that measures the machine; they take turns, so that all see
the same machine.

--speculate or --draft-model measure decode with and without drafts instead, of prompts in which the model has already
said what it says next, and a verification beside a step of decode. --kept-prompt measures the time to first token with
a file of what an earlier run left behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from benchmarks.bound import Machine, Rates, decode_bytes, prefill_flops
from benchmarks.reuse import measure_kept_prompt, measure_speculation, recitation
from granite4_neuron import UserError, checkpoint, neuron_sdk, stream_generate
from granite4_neuron.checkpoint_folder import bundled_checkpoint, find
from granite4_neuron.cli import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from granite4_neuron.commands.options import add_cpu_options, check_folder_of, dtype_of, write_json
from granite4_neuron.commands.output import peak_memory_bytes
from granite4_neuron.commands.reuse import DRAFT_TOKENS, add_speculation, ngram_tokens
from granite4_neuron.config import DTYPES, GraniteMoeHybridConfig, family_names
from granite4_neuron.generation.loading import load_compiled, load_tokenizer
from granite4_neuron.ops.launch_parameters import processor_name
from granite4_neuron.random_weights import random_model
from granite4_neuron.runtime.cpu import CPURuntime
from granite4_neuron.speculation import DraftModel, NgramDrafter

MACHINE = "machine"
OURS = "granite4-neuron"
PLAIN = "granite4-neuron, torch kernels"
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Point:
    """What is measured: `batch_size` random prompts of one length, and as many new tokens for each."""

    batch_size: int
    prompt_length: int
    output_length: int


@dataclass(frozen=True)
class Result:
    """One implementation at one point. Times are in milliseconds, over all repeats; memory is the process's peak.

    machine_gflops and machine_gbytes_per_second are what the machine does at most, measured in between; the shares of
    the bound are computed from them. All four are 0 where the machine is not this processor.
    """

    implementation: str
    batch_size: int
    prompt_length: int
    output_length: int
    first_token_ms: float  # median
    token_ms_p50: float
    token_ms_p90: float
    token_ms_p99: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prefill_of_bound: float
    decode_of_bound: float
    machine_gflops: float
    machine_gbytes_per_second: float
    peak_memory_mib: float


class Ours:
    """This package, on the CPU or on a Neuron device, through its public generation loop."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        if options.compiled is not None:
            self._runtime = load_compiled(folder, options.compiled, transformers.GenerationConfig())
        else:
            self._runtime = _cpu_runtime(folder, options)

    def run(self, prompts: list[list[int]], output_length: int) -> list[float]:
        """Moments at which the first and each further token of all prompts was there, in seconds from the start."""
        times, started = [], time.perf_counter()
        for number, _ in enumerate(
            stream_generate(self._runtime, None, prompts, max_tokens=output_length, temperature=0, ignore_eos=True)
        ):
            if number % len(prompts) == len(prompts) - 1:
                times.append(time.perf_counter() - started)
        return times


class Transformers:
    """transformers' GraniteMoeHybridForCausalLM, one cached forward pass per step."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self._model = transformers.GraniteMoeHybridForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], output_length: int) -> list[float]:
        """As `Ours.run`."""
        times, started = [], time.perf_counter()
        tokens, cache = torch.tensor(prompts), None
        for _ in range(output_length):
            output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            times.append(time.perf_counter() - started)
        return times


def main() -> int:
    options = _parser().parse_args()
    try:
        _check(options)
        with _checkpoint(options) as folder:
            _check_lengths(folder, options)
            if _is_reuse(options):
                _measure_reuse(folder, options)
                return 0
            results = _measure_all(folder, options)
        _report(results, options)
    except UserError as error:
        print(f"benchmark_latency.py: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _report(results: list[Result], options: argparse.Namespace) -> None:
    """Print the numbers, and write and draw them where that is asked for."""
    machine = _machine(options.threads)
    _print(results, machine, options)
    if options.json:
        record = {
            "machine": machine,
            "model": _source(options),
            "dtype": options.dtype or "as stored",
            "quantize": options.quantize,
            "state_dtype": options.state_dtype or "float32",
            "warmup": options.warmup,
            "repeats": options.repeats,
            "results": [dataclasses.asdict(result) for result in results],
        }
        write_json(options.json, json.dumps(record, indent=2) + "\n")
    if options.plot:
        _plot(results, machine, options.plot)


def _measure_all(folder: Path, options: argparse.Namespace) -> list[Result]:
    points = [
        Point(batch_size, prompt_length, options.output_length)
        for batch_size in options.batch_size
        for prompt_length in options.prompt_length
    ]
    ours = PLAIN if options.cpu_kernels == "torch" else OURS
    names = [ours, options.compare] if options.compare else [ours]
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for point in progress.track(points, description="measuring"):
            results += _measure(folder, point, names, options)
    return results


def _measure(folder: Path, point: Point, names: list[str], options: argparse.Namespace) -> list[Result]:
    """All implementations at one point, taking turns."""
    machine = [MACHINE] if options.backend == "cpu" else []
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(name, folder, options)) for name in (*names, *machine)}
        runs: dict[str, list] = {name: [] for name in workers}
        peaks = dict.fromkeys(workers, 0)
        for turn in range(options.warmup + options.repeats):
            for name, worker in workers.items():
                run, peaks[name] = _ask(worker, name, point, turn)
                if turn >= options.warmup:
                    runs[name].append(run)
    rates = Rates.median(runs[MACHINE]) if machine else None
    bound = _bound(folder, point, options, rates) if rates else (0.0, 0.0)
    return [_result(name, point, runs[name], peaks[name], bound, rates) for name in names]


def _bound(folder: Path, point: Point, options: argparse.Namespace, rates: Rates) -> tuple[float, float]:
    """The seconds that this machine needs at the least for the prompts, and for one step of decode."""
    config = GraniteMoeHybridConfig.from_file(folder / "config.json")
    context = point.prompt_length + point.output_length // 2
    flops = point.batch_size * prefill_flops(config, point.prompt_length)
    is_quantized = options.quantize is not None
    state_itemsize = (dtype_of(options.state_dtype) or torch.float32).itemsize
    read = decode_bytes(config, _dtype(folder, options), point.batch_size, context, is_quantized, state_itemsize)
    return flops / rates.flops, read / rates.bytes


def _dtype(folder: Path, options: argparse.Namespace) -> torch.dtype:
    return getattr(torch, options.dtype) if options.dtype else checkpoint.stored_dtype(folder)


def _ask(worker: Connection, name: str, point: Point, turn: int) -> tuple[list[float] | Rates, int]:
    """Have a worker run a point: the moments of its tokens, or the machine's rates, and the most memory it has held."""
    try:
        worker.send((point, turn))
        answer = worker.recv()
    except (EOFError, OSError):
        raise UserError(f"the process that ran {name} died; is there enough memory?") from None
    if isinstance(answer, UserError):
        raise answer
    return answer


@contextmanager
def _worker(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    dtype = None if options.compiled else _dtype(folder, options)
    process = context.Process(target=_serve, args=(theirs, name, folder, dtype, options), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def _serve(
    connection: Connection, name: str, folder: Path, dtype: torch.dtype | None, options: argparse.Namespace
) -> None:
    """In a process of its own: run points until the other side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side hears of it too, and hangs up
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    try:
        if name == MACHINE:
            implementation = Machine(dtype)
        elif name == TRANSFORMERS:
            implementation = Transformers(folder, dtype)
        else:
            implementation = Ours(folder, options)
    except UserError as error:
        connection.send(error)
        return
    vocab_size = GraniteMoeHybridConfig.from_file(folder / "config.json").vocab_size
    while True:
        try:
            point, turn = connection.recv()
        except EOFError:
            return
        if name == MACHINE:
            connection.send((implementation.rates(), peak_memory_bytes()))
            continue
        generator = torch.Generator().manual_seed(turn)
        prompts = torch.randint(vocab_size, (point.batch_size, point.prompt_length), generator=generator)
        try:
            times = implementation.run(prompts.tolist(), point.output_length)
        except UserError as error:
            connection.send(error)
            return
        connection.send((times, peak_memory_bytes()))


def _result(
    name: str,
    point: Point,
    runs: list[list[float]],
    peak: int,
    bound: tuple[float, float],
    rates: Rates | None = None,
) -> Result:
    """What `runs`, each the moments of all tokens in seconds, come to.

    Args:
        peak: bytes of memory.
        bound: the least seconds for the prompts, and for one step of decode.
    """
    first = statistics.median(times[0] for times in runs)
    steps = sorted(after - before for times in runs for before, after in itertools.pairwise(times))

    def percentile(share: float) -> float:
        return steps[min(len(steps) - 1, int(share * len(steps)))] if steps else 0.0

    return Result(
        implementation=name,
        **dataclasses.asdict(point),
        first_token_ms=1e3 * first,
        token_ms_p50=1e3 * percentile(0.5),
        token_ms_p90=1e3 * percentile(0.9),
        token_ms_p99=1e3 * percentile(0.99),
        prefill_tokens_per_second=point.batch_size * point.prompt_length / first,
        decode_tokens_per_second=point.batch_size / percentile(0.5) if steps else 0.0,
        prefill_of_bound=bound[0] / first,
        decode_of_bound=bound[1] / percentile(0.5) if steps else 0.0,
        machine_gflops=rates.flops / 1e9 if rates else 0.0,
        machine_gbytes_per_second=rates.bytes / 1e9 if rates else 0.0,
        peak_memory_mib=peak / 2**20,
    )


def _print(results: list[Result], machine: dict[str, str], options: argparse.Namespace) -> None:
    weights = f", {options.quantize} weights" if options.quantize else ""
    weights += f", SSM states in {options.state_dtype}" if options.state_dtype else ""
    title = f"{_source(options)}, {options.dtype or 'dtype as stored'}{weights}\n{', '.join(machine.values())}"
    table = Table(title=escape(title))
    for column in ("", "batch", "prompt", "first token ms", "token ms p50", "p90", "p99"):
        table.add_column(column, justify="right" if column else "left")
    for column in ("prefill tok/s", "of bound", "decode tok/s", "of bound", "peak MiB"):
        table.add_column(column, justify="right")
    for number, result in enumerate(results):
        table.add_row(
            result.implementation,
            str(result.batch_size),
            str(result.prompt_length),
            f"{result.first_token_ms:.1f}",
            f"{result.token_ms_p50:.2f}",
            f"{result.token_ms_p90:.2f}",
            f"{result.token_ms_p99:.2f}",
            f"{result.prefill_tokens_per_second:.1f}",
            f"{result.prefill_of_bound:.2f}" if result.prefill_of_bound else "",
            f"{result.decode_tokens_per_second:.1f}",
            f"{result.decode_of_bound:.2f}" if result.decode_of_bound else "",
            f"{result.peak_memory_mib:.0f}",
        )
        if result.implementation == TRANSFORMERS:
            table.add_row(*_ratios(results[number - 1], result), end_section=True)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for line in (*_machine_rates(results), *_growth(results)):
        console.print(line)


def _machine_rates(results: list[Result]) -> Iterator[str]:
    """The rates that the shares of the bound are computed from, one line for each point."""
    for result in results:
        if result.machine_gflops and result.implementation != TRANSFORMERS:
            yield (
                f"machine, at batch {result.batch_size} and prompt {result.prompt_length}: "
                f"{result.machine_gflops:.0f} GFLOP/s, {result.machine_gbytes_per_second:.1f} GB/s"
            )


def _growth(results: list[Result]) -> Iterator[str]:
    """How the time to first token grows with the prompt, where there are several lengths."""
    for name, batch_size in dict.fromkeys((result.implementation, result.batch_size) for result in results):
        line = [r for r in results if (r.implementation, r.batch_size) == (name, batch_size)]
        if len({result.prompt_length for result in line}) > 1:
            logs = [(math.log(result.prompt_length), math.log(result.first_token_ms)) for result in line]
            exponent = statistics.linear_regression(*zip(*logs, strict=True)).slope
            yield f"{name}, batch {batch_size}: time to first token grows as prompt length ^ {exponent:.2f}"


def _ratios(ours: Result, theirs: Result) -> list[str]:
    prefill = f"{ours.prefill_tokens_per_second / theirs.prefill_tokens_per_second:.2f}x"
    decode = "" if not theirs.token_ms_p50 else f"{theirs.token_ms_p50 / ours.token_ms_p50:.2f}x"
    memory = f"{ours.peak_memory_mib / theirs.peak_memory_mib:.2f}x"
    return ["  ratio", "", "", prefill, decode, "", "", prefill, "", decode, "", memory]


def _is_reuse(options: argparse.Namespace) -> bool:
    return options.kept_prompt or options.speculate is not None or options.draft_model is not None


def _measure_reuse(folder: Path, options: argparse.Namespace) -> None:
    """Print what speculation, or a kept prompt, saves."""
    torch.set_num_threads(options.threads)
    runtime = _cpu_runtime(folder, options)
    turns = (options.warmup, options.repeats)
    title = escape(
        f"{_source(options)}, {options.dtype or 'dtype as stored'}\n{', '.join(_machine(options.threads).values())}"
    )
    if options.kept_prompt:
        table = Table("prompt", "first token ms", "from the file ms", "ratio", title=title)
        for length in options.prompt_length:
            tokens = torch.randint(runtime.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
            kept = measure_kept_prompt(runtime, tokens.tolist(), *turns)
            ratio = f"1/{kept.first_ms / kept.second_ms:.1f}"
            table.add_row(str(length), f"{kept.first_ms:.1f}", f"{kept.second_ms:.1f}", ratio)
    else:
        columns = ("batch", "prompt", "plain tok/s", "drafted tok/s", "speed-up", "accepted", "tokens per step")
        table = Table(*columns, "decode ms", "verify ms", "ratio", title=title)
        for batch_size, length in itertools.product(options.batch_size, options.prompt_length):
            table.add_row(str(batch_size), str(length), *_speculation(runtime, folder, batch_size, length, options))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _speculation(
    runtime: CPURuntime, folder: Path, batch_size: int, length: int, options: argparse.Namespace
) -> list[str]:
    """Cells of one row of the table."""
    if options.draft_model is None:
        draft_tokens, new_drafter = ngram_tokens(options.speculate), NgramDrafter
    else:
        small = _cpu_runtime(find(options.draft_model), options)
        draft_tokens = options.draft_tokens or DRAFT_TOKENS
        longest = length + options.output_length
        new_drafter = partial(DraftModel, small, runtime.config.vocab_size, batch_size, longest)
    prompt = recitation(runtime, _beginning(folder), length)
    turns = (options.output_length, options.warmup, options.repeats)
    result = measure_speculation(runtime, new_drafter, draft_tokens, [prompt] * batch_size, *turns)
    return [
        f"{result.plain_rate:.1f}",
        f"{result.rate:.1f}",
        f"{result.rate / result.plain_rate:.2f}x",
        f"{result.acceptance_rate:.0%}",
        f"{result.tokens_per_step:.2f}",
        f"{result.decode_ms:.2f}",
        f"{result.verify_ms:.2f} of {draft_tokens + 1} tokens",
        f"{result.verify_ms / result.decode_ms:.2f}",
    ]


def _beginning(folder: Path) -> list[int]:
    """Of a text that the bundled model knows by heart; anything where there is no tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return list(range(8))
    tokenizer = load_tokenizer(folder, GraniteMoeHybridConfig.from_file(folder / "config.json"))
    return tokenizer.encode("An assignment statement")


def _cpu_runtime(folder: Path, options: argparse.Namespace) -> CPURuntime:
    model = checkpoint.load_model(folder, _dtype(folder, options), quantize=options.quantize)
    state_dtype = dtype_of(options.state_dtype)
    options = dict(kernels=options.cpu_kernels, tuned_configs=options.tuned_configs, state_dtype=state_dtype)
    return CPURuntime(model, transformers.GenerationConfig(), **options)


def _plot(results: list[Result], machine: dict[str, str], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for name in dict.fromkeys(result.implementation for result in results):
        for batch_size in dict.fromkeys(result.batch_size for result in results):
            line = [r for r in results if (r.implementation, r.batch_size) == (name, batch_size)]
            lengths = [r.prompt_length for r in line]
            style = dict(
                marker="o", linestyle="--" if name == TRANSFORMERS else "-", label=f"{name}, batch {batch_size}"
            )
            panels[0].plot(lengths, [r.prefill_tokens_per_second for r in line], **style)
            panels[1].plot(lengths, [r.decode_tokens_per_second for r in line], **style)
    for panel, title in zip(panels, ("prefill", "decode"), strict=True):
        panel.set(title=title, xlabel="prompt length", ylabel="tokens per second", xscale="log", ylim=(0, None))
        panel.legend()
    figure.suptitle(", ".join(machine.values()), fontsize="small")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}).") from None


@contextmanager
def _checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """The folder to measure; one with random weights is written for the time of the run."""
    if options.random_weights is None:
        yield find(options.model or bundled_checkpoint())
        return
    config = GraniteMoeHybridConfig.from_family(options.random_weights)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / options.random_weights
        dtype = getattr(torch, options.dtype or config.torch_dtype)
        checkpoint.save_model(random_model(config, dtype=dtype), path)
        yield path


def _source(options: argparse.Namespace) -> str:
    return options.random_weights or options.model or "the small model that comes with the package"


def _machine(threads: int) -> dict[str, str]:
    return {
        "processor": f"{processor_name()}, {threads} threads",
        "python": f"Python {platform.python_version()}",
        "torch": f"torch {torch.__version__}",
        "transformers": f"transformers {transformers.__version__}",
    }


def _check_lengths(folder: Path, options: argparse.Namespace) -> None:
    limit = GraniteMoeHybridConfig.from_file(folder / "config.json").max_position_embeddings
    longest = max(options.prompt_length) + options.output_length
    if longest > limit:
        raise UserError(f"prompt and output make {longest} tokens; this model takes at most {limit}.")


def _check(options: argparse.Namespace) -> None:
    for name in ("batch_size", "prompt_length", "output_length", "repeats", "threads"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1.")
    if options.warmup < 0:
        raise UserError("--warmup must be at least 0.")
    if options.compare and int(transformers.__version__.split(".")[0]) < 5:
        raise UserError(f"--compare needs transformers 5; {transformers.__version__} is installed.")
    for file in (options.json, options.plot):
        check_folder_of(file)
    if (options.backend == "nxdi") != (options.compiled is not None):
        raise UserError("--compiled belongs to --backend nxdi, and that backend needs it.")
    if options.backend == "nxdi":
        if options.dtype:
            raise UserError("--dtype belongs to the cpu backend; compiled graphs have one already.")
        if options.quantize:
            raise UserError("--quantize belongs to the cpu backend; compiled graphs have weights already.")
        if options.state_dtype:
            raise UserError("--state-dtype belongs to the cpu backend; compiled graphs have float32 states.")
        if options.tuned_configs:
            raise UserError("--tuned-configs belongs to the cpu backend; compiled graphs have no use for it.")
        neuron_sdk.require()
    if _is_reuse(options):
        _check_reuse(options)
    if options.model and options.random_weights:
        raise UserError("give either --model or --random-weights, not both.")
    if options.plot:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise UserError("--plot needs matplotlib; install it with: pip install -e '.[plot]'.") from None
        formats = Figure().canvas.get_supported_filetypes()
        if options.plot.suffix[1:] not in formats:
            raise UserError(f"{options.plot} cannot be drawn; the name must end in one of {', '.join(formats)}.")


def _check_reuse(options: argparse.Namespace) -> None:
    modes = {
        f"--{name.replace('_', '-')}": getattr(options, name) for name in ("speculate", "draft_model", "kept_prompt")
    }
    given = [option for option, value in modes.items() if value]
    if len(given) > 1:
        raise UserError(f"give one of {' and '.join(given)} at a time.")
    if options.speculate is not None:
        ngram_tokens(options.speculate)
    others = {"--backend nxdi": options.backend == "nxdi"}
    others |= {f"--{name}": getattr(options, name) is not None for name in ("compare", "json", "plot")}
    for option, is_given in others.items():
        if is_given:
            raise UserError(f"{given[0]} is measured on the cpu beside the same without; leave out {option}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or Hugging Face id (default: the small bundled model)")
    parser.add_argument(
        "--random-weights", metavar="NAME", help=f"real dimensions, random weights: one of {', '.join(family_names())}"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: that of the weights)")
    parser.add_argument("--backend", choices=["cpu", "nxdi"], default="cpu", help="where to run (default: %(default)s)")
    parser.add_argument("--compiled", type=Path, metavar="DIR", help="for nxdi: what the compile command wrote")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1], metavar="N", help="default: 1")
    parser.add_argument("--prompt-length", type=int, nargs="+", default=[128], metavar="N", help="default: 128")
    parser.add_argument("--output-length", type=int, default=32, metavar="N", help="new tokens, default: 32")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="runs that are not counted, default: 1")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs that are counted, default: 3")
    add_cpu_options(parser)
    parser.set_defaults(threads=os.cpu_count() or 1)
    add_speculation(parser)
    parser.add_argument(
        "--kept-prompt", action="store_true", help="measure what a file of an earlier run's prompt saves"
    )
    parser.add_argument("--compare", choices=[TRANSFORMERS], help="run this on the same weights too, and print ratios")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, for example to a .png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
