"""`granite4-neuron evaluate`: how well a model predicts a text."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import (
    add_model,
    add_runtime,
    at_least,
    check_folder_of,
    load_runtime,
    model_checkpoint,
    read_text,
)
from granite4_neuron.commands.output import ProgressBar, print_table, size, write
from granite4_neuron.commands.plot import add_plot, check_plot, save_plot
from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.config.json_files import write_json
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerFast

    from granite4_neuron.evaluation.perplexity import Score, Window
    from granite4_neuron.runtime.interface import Runtime

REFERENCE = "float32"
FORMATS = (*DTYPES, *QUANTIZATIONS)
DEFAULT_WINDOW = 4096
_MOST_NATS = 700  # per token in a plot: e to the power of more is beyond double precision


@dataclass(frozen=True)
class Evaluation:
    """One line of the table, and one entry of --json.

    format: of the weights; None for the one that the options name.
    tokens, bytes: how many were scored.
    nats_per_token: the logarithm of `perplexity`.
    kl_divergence: from float32, in nats per token; None where nothing was compared.
    weight_bytes: of all weights; None where nothing was compared.
    prefill_tokens_per_second: of the text. decode_tokens_per_second: of one sequence; None where nothing was compared.
    """

    format: str | None
    tokens: int
    bytes: int
    nats_per_token: float
    perplexity: float
    perplexity_per_byte: float
    kl_divergence: float | None
    weight_bytes: int | None
    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None


def add_parser(commands: argparse._SubParsersAction) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="measure the perplexity of a text",
        description="Measure how well a model predicts a text: perplexity per token and per byte. A hybrid model reads "
        "it as one long context; with --window or --stride, and where every layer is attention, it is read in windows "
        "that overlap, each from a fresh start. The first token has nothing before it and is not scored.",
    )
    evaluate.add_argument("file", nargs="?", help="the text in UTF-8; standard input without it or with -")
    add_model(evaluate)
    evaluate.add_argument(
        "--window",
        type=at_least(2),
        metavar="N",
        help=f"tokens of a window (default: {DEFAULT_WINDOW}, or the model's longest sequence)",
    )
    evaluate.add_argument(
        "--stride",
        type=at_least(1),
        metavar="N",
        help="tokens from the start of one window to that of the next (default: half a window)",
    )
    evaluate.add_argument(
        "--compare",
        nargs="+",
        choices=FORMATS,
        default=[],
        metavar="FORMAT",
        help=f"compare with {REFERENCE}, in one table: perplexity, Kullback-Leibler divergence, size and speed of "
        f"{', '.join(FORMATS)}. Quantized weights have activations in --dtype. All are in memory at a time",
    )
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    add_plot(evaluate, "the perplexity along the text, and of --compare the divergences,")
    add_runtime(evaluate)
    evaluate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_folder_of(options.json)
    check_plot(options.plot)
    if options.compare and (options.backend != "cpu" or options.quantize):
        raise UserError(
            "--compare chooses the weights of the backend cpu by itself; leave out --quantize and --backend."
        )
    text = read_text(options.file, "there is no text; give a file, or the text on standard input.")
    formats = list(dict.fromkeys([REFERENCE, *options.compare])) if options.compare else [None]
    checkpoint = model_checkpoint(options)
    if options.compare and (stored := checkpoint.quantization) is not None:
        raise UserError(
            f"{checkpoint.path} has its weights in {stored.name}; --compare needs the original, which is in "
            f"{REFERENCE}."
        )
    # Not at the top: these imports take seconds, and --help does not need them.
    from granite4_neuron.checkpoint.tokenizing import encode
    from granite4_neuron.evaluation import perplexity

    loaded = [load_runtime(_options_of(options, name), checkpoint) for name in formats]
    runtimes, tokenizer = [runtime for runtime, _ in loaded], loaded[0][1]
    tokens = encode(tokenizer, text)
    windows = _windows(options, runtimes[0].config, len(tokens))
    with ProgressBar("text", "tokens") as progress:
        scores = perplexity.measure(runtimes, tokens, windows, progress)
    num_bytes = _scored_bytes(tokenizer, text, tokens, windows)
    if options.compare:
        decode = perplexity.decode_seconds(runtimes, tokens)
        evaluations = [
            _evaluation(score, num_bytes, name, weight_bytes, seconds)
            for name, weight_bytes, score, seconds in zip(formats, _weight_bytes(runtimes), scores, decode, strict=True)
        ]
        print_table(_table(evaluations))
    else:
        evaluations = [_evaluation(scores[0], num_bytes)]
        _print(evaluations[0], len(windows))
    if options.plot:
        _plot(evaluations, scores, options.plot)
    if options.json:
        write_json(options.json, json.dumps([asdict(each) for each in evaluations], indent=2) + "\n")
    return 0


def _options_of(options: argparse.Namespace, name: str | None) -> argparse.Namespace:
    """Return the options that load the weights in a format."""
    if name is None:
        return options
    choice = dict(quantize=name) if name in QUANTIZATIONS else dict(dtype=name)
    return argparse.Namespace(**{**vars(options), **choice})


def _windows(options: argparse.Namespace, config: ModelConfig, length: int) -> list[Window]:
    from granite4_neuron.evaluation import perplexity

    longest = config.max_position_embeddings
    if options.window is None and options.stride is None and MAMBA in config.layer_types:
        if length > longest:
            raise UserError(
                f"the text has {length:,} tokens and this model's longest sequence {longest:,}; give --window."
            )
        return perplexity.one_window(length)
    window = min(DEFAULT_WINDOW, longest) if options.window is None else options.window
    if window > longest:
        raise UserError(f"--window is {window:,}; this model's longest sequence is {longest:,}.")
    return perplexity.sliding_windows(length, window, options.stride or max(1, window // 2))


def _scored_bytes(
    tokenizer: PreTrainedTokenizerFast, text: str, tokens: Sequence[int], windows: Sequence[Window]
) -> int:
    """Return the bytes of the scored text: tokens that are only context are left out."""
    scored = {position for window in windows for position in range(window.scored, window.stop)}
    others = [token for position, token in enumerate(tokens) if position not in scored]
    # A token that is not a whole character is shown as one of three bytes, and is at least one byte.
    texts = tokenizer.batch_decode([[token] for token in others], skip_special_tokens=True)
    return len(text.encode()) - sum(len(each.replace("\N{REPLACEMENT CHARACTER}", "?").encode()) for each in texts)


def _weight_bytes(runtimes: Sequence[Runtime]) -> list[int]:
    """Return the bytes of the weights of each runtime of the backend cpu."""
    from granite4_neuron.runtime.bound_model import BoundModel

    return [runtime.weight_bytes for runtime in runtimes if isinstance(runtime, BoundModel)]


def _evaluation(
    score: Score,
    num_bytes: int,
    name: str | None = None,
    weight_bytes: int | None = None,
    decode_seconds: float | None = None,
) -> Evaluation:
    return Evaluation(
        format=name,
        tokens=score.tokens,
        bytes=num_bytes,
        nats_per_token=score.nats / score.tokens,
        perplexity=score.perplexity,
        perplexity_per_byte=score.perplexity_per_byte(num_bytes),
        kl_divergence=None if name is None else score.mean_divergence,
        weight_bytes=weight_bytes,
        prefill_tokens_per_second=score.tokens_per_second,
        decode_tokens_per_second=None if decode_seconds is None else 1 / decode_seconds,
    )


def _print(evaluation: Evaluation, num_windows: int) -> None:
    write(
        f"perplexity: {evaluation.perplexity:.4f} per token, {evaluation.perplexity_per_byte:.4f} per byte\n"
        f"scored: {evaluation.tokens:,} tokens, {evaluation.bytes:,} bytes, "
        f"in {'one context' if num_windows == 1 else f'{num_windows:,} windows'}\n"
        f"speed: {evaluation.prefill_tokens_per_second:.1f} tokens/s"
    )


def _table(evaluations: Sequence[Evaluation]) -> Table:
    from rich.table import Table

    table = Table(title=f"{evaluations[0].tokens:,} tokens, {evaluations[0].bytes:,} bytes")
    table.caption = f"KL: divergence from {REFERENCE}, nats per token; prefill, decode: tokens/s"
    table.add_column("format")
    for column in ("perplexity", "per byte", "KL", "weights", "prefill", "decode"):
        table.add_column(column, justify="right")
    for each in evaluations:
        table.add_row(
            each.format,
            f"{each.perplexity:.4f}",
            f"{each.perplexity_per_byte:.4f}",
            f"{each.kl_divergence:.2e}",
            "" if each.weight_bytes is None else size(each.weight_bytes),
            f"{each.prefill_tokens_per_second:.1f}",
            f"{each.decode_tokens_per_second:.1f}",
        )
    return table


def _plot(evaluations: Sequence[Evaluation], scores: Sequence[Score], file: Path) -> None:
    """Draw the perplexity of the tokens up to each place in the text, and what --compare compares."""
    from matplotlib.figure import Figure

    compared = [each for each in evaluations if each.format is not None]
    figure = Figure(figsize=(10 if compared else 6, 4), layout="constrained")
    panels = figure.subplots(1, 2 if compared else 1, squeeze=False)[0]
    for evaluation, score in zip(evaluations, scores, strict=True):
        tokens, nats = zip(*score.progress, strict=True)
        perplexities = [math.exp(min(total / count, _MOST_NATS)) for count, total in zip(tokens, nats, strict=True)]
        panels[0].plot(tokens, perplexities, label=evaluation.format)
    panels[0].set(xlabel="tokens scored", ylabel="perplexity", title="of the tokens so far")
    if compared:
        panels[0].legend()
        panels[1].bar([each.format for each in compared], [each.kl_divergence for each in compared])
        panels[1].set(ylabel="nats per token", title=f"divergence from {REFERENCE}")
    save_plot(figure, file)
