"""`granite4-neuron batch`: answer a file of requests or prompts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.adapters import adapters_of, add_adapters
from granite4_neuron.commands.conversations import add_chat, chat_template_kwargs, check_chat
from granite4_neuron.commands.engine_options import add_speculation, drafts_with_mtp, new_engine
from granite4_neuron.commands.help_format import HelpFormatter
from granite4_neuron.commands.options import (
    add_model,
    add_runtime,
    add_sampling,
    at_least,
    check_folder_of,
    load_runtime,
    model_checkpoint,
    runtime_options,
    sampling_options,
)
from granite4_neuron.commands.output import ProgressBar, write
from granite4_neuron.commands.serve import (
    PREFIX_CACHE,
    add_max_model_len,
    check_extra,
    max_model_len,
    served_names,
    served_prefix_cache,
)
from granite4_neuron.devices.backends import check_backend
from granite4_neuron.devices.neuron.compiled_graphs import compiled_ranks
from granite4_neuron.devices.torch.options import kind_of_device
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.serving.batch.batch import Batch, Result
    from granite4_neuron.serving.batch.lines import Lines
    from granite4_neuron.serving.batch.results import Results

_MAX_TOKENS = 256
# Options that change no result.
_WITHOUT_EFFECT = {"input", "output", "ray", "workers", "threads", "max_num_seqs", "prefix_cache", "cache_weights"}
_WITHOUT_EFFECT |= {"command", "version", "print_completion", "log_level", "run"}
_SHORTEST = 1e-3  # seconds that a speed is computed from

_EXAMPLES = """\
examples:
  granite4-neuron batch requests.jsonl results.jsonl --model ./checkpoint
  granite4-neuron batch prompts.parquet results.jsonl --model ibm-granite/granite-4.0-h-350m --chat --max-tokens 100
  granite4-neuron batch /shared/requests.jsonl results.jsonl --model /shared/checkpoint --ray auto --workers 8
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    batch = commands.add_parser(
        "batch",
        help="answer a file of requests or prompts",
        description="Answer each line of INPUT with a line of OUTPUT, in the same order, in constant memory. An error "
        "becomes the result of its line, and the others go on. You may end the command at any moment; started again, "
        "it continues after the results in OUTPUT.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    batch.add_argument(
        "input",
        type=Path,
        metavar="INPUT",
        help="lines of OpenAI's Batch API, or lines or a Parquet file (.parquet) with a column prompt",
    )
    batch.add_argument("output", type=Path, metavar="OUTPUT", help="a file of JSON lines")
    add_model(batch)
    add_adapters(batch, "a request names it as its model")
    batch.add_argument(
        "--served-model-name",
        nargs=1,
        metavar="NAME",
        help="name of the model in requests (default: the last part of --model)",
    )
    prompts = batch.add_argument_group("lines with a prompt (requests have their own options)")
    add_chat(
        prompts, "a prompt is a user's message; use the chat template", "the system message of these conversations"
    )
    prompts.add_argument(
        "--max-tokens", type=at_least(1), default=_MAX_TOKENS, metavar="N", help="new tokens (default: %(default)s)"
    )
    prompts.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-sequence token")
    add_sampling(batch)
    limits = batch.add_argument_group("limits and reuse")
    limits.add_argument(
        "--max-num-seqs",
        type=at_least(1),
        metavar="N",
        help="texts at a time (default: as many as half of the memory has room for, 64 at most)",
    )
    add_max_model_len(limits)
    limits.add_argument(
        "--prefix-cache", metavar="SIZE", help=f"memory of the prefix cache, 0 for none (default: {PREFIX_CACHE})"
    )
    add_speculation(limits)
    machines = batch.add_argument_group("several machines")
    machines.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster: auto for the one that this machine belongs to, HOST:PORT, or local for one that is "
        "started here and ended again",
    )
    machines.add_argument(
        "--workers", type=at_least(1), metavar="N", help="how many models run there (default: one for each node)"
    )
    add_runtime(batch)
    batch.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_extra("batch")
    check_chat(options)
    chat_template_kwargs(options)  # what is wrong with them is said at once
    if options.workers is not None and options.ray is None:
        raise UserError("--workers belongs to --ray.")
    check_folder_of(options.output)
    # Not at the top: --help does not need pydantic.
    from granite4_neuron.serving.batch.lines import open_lines
    from granite4_neuron.serving.batch.results import Results

    lines = open_lines(options.input)
    if options.output.suffix == ".parquet" or (options.output.exists() and options.output.samefile(options.input)):
        raise UserError(f"{options.output} cannot be the output; give another file, which gets JSON lines.")
    given = {name: value for name, value in vars(options).items() if name not in _WITHOUT_EFFECT}
    with Results(options.output, lines, given) as results:
        start = results.start
        if start < lines.size:
            if results.number:
                print(f"{options.output} has {results.number:,} results; continuing after them.", file=sys.stderr)
            if options.ray:
                _write(_on_cluster(options, lines, start), results, lines, start)
            else:
                with closing(new_batch(options)) as batch, closing(batch.results(lines.read(start))) as found:
                    _write(found, results, lines, start)
        elif results.number:
            print(f"{options.output} has all {results.number:,} results already.", file=sys.stderr)
        else:
            print(f"{options.input} is empty; there is nothing to do.", file=sys.stderr)
    return 0


def _on_cluster(options: argparse.Namespace, lines: Lines, start: int) -> Iterator[Result]:
    from granite4_neuron.serving.batch.cluster import Cluster

    cluster = Cluster(options.ray, options.workers, _devices(options))
    return cluster.results(partial(new_batch, options), lines, start)


def _devices(options: argparse.Namespace) -> dict[str, float]:
    """Return what a worker needs beside processors, by Ray's names.

    Raises:
        UserError: there are no compiled graphs, which the backend nxdi needs.
    """
    if options.backend == "nxdi":
        check_backend(options.backend, runtime_options(options))
        return {"neuron_cores": compiled_ranks(Path(options.compiled))}
    kind = kind_of_device(options.device)
    if kind == "neuron":
        return {"neuron_cores": options.tp_degree}
    return {"GPU": options.tp_degree} if kind == "cuda" else {}


def new_batch(options: argparse.Namespace) -> Batch:
    """Load the model, here or on a worker."""
    from granite4_neuron.engine.slots import slots_that_fit
    from granite4_neuron.generation.loop import MOST_SEQUENCES
    from granite4_neuron.serving.batch.batch import Batch
    from granite4_neuron.serving.batch.forms import Prompts

    checkpoint, adapters = model_checkpoint(options), adapters_of(options)
    [model] = served_names(options, checkpoint, adapters)
    runtime, tokenizer = load_runtime(options, checkpoint, adapters=adapters, mtp=drafts_with_mtp(options))
    max_length = max_model_len(options, runtime)
    if options.max_num_seqs is None:
        options.max_num_seqs = slots_that_fit(runtime, MOST_SEQUENCES, max_length)
    cache = served_prefix_cache(options, runtime, None)
    engine = new_engine(options, runtime, tokenizer, options.max_num_seqs, max_length, cache)
    engine.warm_up()
    sampling = {name: value for name, value in sampling_options(options).items() if value not in (None, [])}
    seed = sampling.pop("seed", 0)
    fields = {**sampling, "max_tokens": options.max_tokens, "ignore_eos": options.ignore_eos}
    if options.chat:
        fields["chat_template_kwargs"] = chat_template_kwargs(options)
    return Batch(
        engine,
        tokenizer,
        has_prefix_cache=cache is not None,
        model=model,
        prompts=Prompts(fields, options.chat, options.system),
        seed=seed,
    )


def _write(found: Iterator[Result], results: Results, lines: Lines, start: int) -> None:
    """Write the results as they come."""
    started = time.monotonic()
    tokens = failed = number = 0
    with ProgressBar("batch", lines.unit) as progress:
        for result in found:
            results.append(result)
            number, tokens, failed = number + 1, tokens + result.num_tokens, failed + result.has_failed
            speed = tokens / max(time.monotonic() - started, _SHORTEST)
            progress(result.place - start, lines.size - start, f"line {number:,}, {speed:,.0f} tokens/s")
    seconds = max(time.monotonic() - started, _SHORTEST)
    write(f"Lines: {number:,}. Errors: {failed:,}. New tokens: {tokens:,}, {tokens / seconds:,.1f} a second.")
