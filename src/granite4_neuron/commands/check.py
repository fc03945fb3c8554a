"""`granite4-neuron check`: logits, or the hidden states after each layer, against those of transformers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import (
    add_model,
    add_runtime,
    at_least,
    load_runtime,
    model_checkpoint,
    number_in,
)
from granite4_neuron.commands.output import ProgressBar, print_table, write
from granite4_neuron.config.choices import FLOAT32_TOLERANCE, QUANTIZATIONS
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from granite4_neuron.evaluation import accuracy
    from granite4_neuron.evaluation.layers import BoundRuntime, LayerReport

EXIT_CHECK_FAILED = 1


def add_parser(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser(
        "check",
        help="compare logits with transformers",
        description="Compare logits with transformers, token by token. float32 passes when no logit is further off "
        "than the tolerance; other dtypes when the mean error to float32 is not above that of transformers there; "
        "quantized weights, and SSM states in 16 bits, when the likeliest token is the same nine times in ten. It also "
        "prints what AWS judges ports by: the R-ratio, and tolerances for the k likeliest tokens. With "
        "--backend nxdi, only the last token of a prompt is compared. --layers compares the hidden states after each "
        "layer, and so shows in which layer a wrong logit begins.",
    )
    add_model(check)
    check.add_argument("--prompt", action="append", default=[], help="compare on this text; may be repeated")
    check.add_argument(
        "--tokens", type=at_least(1), default=16, help="tokens to decode after each prompt (default: 16)"
    )
    check.add_argument(
        "--tolerance",
        type=number_in(0, includes_least=False),
        default=FLOAT32_TOLERANCE,
        help="for float32 (default: %(default)s)",
    )
    check.add_argument(
        "--layers",
        action="store_true",
        help="compare the hidden states after each layer, and mark the first that is off",
    )
    add_runtime(check)
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    _check_layers_option(options)
    # Not at the top: these imports take seconds, and --help does not need them.
    from transformers import logging

    from granite4_neuron.checkpoint.tokenizing import encode
    from granite4_neuron.evaluation import accuracy
    from granite4_neuron.evaluation.reference import readable_by_transformers
    from granite4_neuron.runtime.bound_model import BoundModel

    checkpoint = model_checkpoint(options)
    if (stored := checkpoint.quantization) is not None:
        raise UserError(
            f"logits are compared with those of the original weights, and the ones in {checkpoint.path} are in "
            f"{stored.name}; check the original with --quantize {' or '.join(QUANTIZATIONS)}."
        )
    runtime, tokenizer = load_runtime(options, checkpoint)
    if options.layers and not isinstance(runtime, BoundModel):
        raise _no_layers(options)
    prompts = [encode(tokenizer, text) for text in options.prompt] or accuracy.default_prompts(tokenizer)
    if not all(prompts):
        raise UserError("a prompt is empty; give at least one token of text.")
    accuracy.longest_of(prompts, options.tokens, runtime)  # before it says what it compares
    logging.disable_progress_bar()  # of transformers' weights
    what = "each layer" if options.layers else f"the logits of {options.tokens} tokens after each prompt"
    print(f"Comparing {what} with transformers, prompts: {len(prompts)} ...", file=sys.stderr)
    with readable_by_transformers(checkpoint) as folder, ProgressBar("comparison", "parts") as progress:
        if isinstance(runtime, BoundModel) and options.layers:
            return _check_layers(options, folder, prompts, runtime, progress)
        report = accuracy.measure(folder, prompts, options.tokens, runtime, progress)
    return _print_accuracy(report, runtime.dtype, options.tolerance)


def _check_layers_option(options: argparse.Namespace) -> None:
    if options.layers and options.backend == "nxdi":
        raise _no_layers(options)  # before it compiles for minutes
    if options.layers and options.tp_degree != 1:
        raise UserError("--layers runs parts of the model, and --tp-degree splits it; leave out one of them.")


def _no_layers(options: argparse.Namespace) -> UserError:
    return UserError(
        f"--backend {options.backend} gives no hidden states, because its model is not ours; leave out --layers."
    )


def _check_layers(
    options: argparse.Namespace,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    runtime: BoundRuntime,
    progress: Callable[[int, int], None],
) -> int:
    from granite4_neuron.evaluation import layers

    reports: list[LayerReport] = []
    num_layers = len(runtime.config.layer_types)
    progress(0, num_layers)
    for report in layers.compare_layers(folder, prompts, options.tokens, runtime, options.tolerance):
        reports.append(report)
        progress(len(reports), num_layers)
    return _print_layers(reports, runtime)


def _print_accuracy(report: accuracy.AccuracyReport, dtype: torch.dtype, tolerance: float) -> int:
    from granite4_neuron.evaluation import accuracy

    print_table(_accuracy_table(report, dtype))
    print_table(_top_k_table(report, dtype))
    if (ratio := report.r_ratio()) is not None:
        most = accuracy.MOST_R_RATIO
        verdict = "" if report.is_compressed else ": " + ("passed" if ratio < most else "not passed")
        write(
            f"R-ratio {ratio:.2f}{verdict} (our error over that of transformers in this dtype; AWS asks for < {most})"
        )
    passed = report.passed(tolerance)
    write(f"{'passed' if passed else 'FAILED'} ({report.criterion(tolerance)})")
    return 0 if passed else EXIT_CHECK_FAILED


def _accuracy_table(report: accuracy.AccuracyReport, dtype: torch.dtype) -> Table:
    import torch
    from rich.table import Table

    table = Table("", "tokens", "max diff", "mean diff", "top-1", "Pearson")
    weights = " with quantized weights" if report.is_quantized else ""
    if report.state_dtype != torch.float32:
        weights += f" with SSM states in {str(report.state_dtype).removeprefix('torch.')}"
    table.title = f"logits in {str(dtype).removeprefix('torch.')}{weights} against transformers in float32"

    def add(label: str, difference: accuracy.Difference) -> None:
        table.add_row(
            label,
            str(difference.tokens),
            f"{difference.maximum:.2e}",
            f"{difference.mean:.2e}",
            f"{difference.top1_agreement:.1%}",
            f"{difference.pearson:.9f}",
        )

    start, width = 0, 1
    while start < report.longest:
        if (difference := report.positions(start, start + width)) is not None:
            add(f"position {start}" if width == 1 else f"positions {start}-{start + width - 1}", difference)
        start, width = start + width, start + width
    table.add_section()
    add("prefill", report.phase(prefill=True))
    add("decode", report.phase(prefill=False))
    add("all", report.overall())
    if (transformers_error := report.transformers_error()) is not None:
        add("transformers in this dtype", transformers_error)
    return table


def _top_k_table(report: accuracy.AccuracyReport, dtype: torch.dtype) -> Table:
    from rich.table import Table

    table = Table("top-k", "tolerance", "largest error", "tokens within", "")
    table.title = "logits after teacher-forced tokens, relative to the largest of the top k, by AWS's tolerances"
    of_transformers = report.transformers_top_k_errors()
    if of_transformers is not None:
        table.add_column(f"transformers in {str(dtype).removeprefix('torch.')}")
        table.add_column("tokens within")
    for number, error in enumerate(report.top_k_errors()):
        row = ["all" if error.k is None else f"{error.k:,}", str(error.tolerance)]
        verdict = "" if report.is_compressed else "passed" if error.passed else "not passed"
        row += [*_largest_and_within(error), verdict]
        if of_transformers is not None:
            row += _largest_and_within(of_transformers[number])
        table.add_row(*row)
    return table


def _largest_and_within(error: accuracy.TopKError) -> list[str]:
    return [f"{max(error.largest, 0):.2g}", f"{error.within:.1%}"]


def _print_layers(reports: Sequence[LayerReport], runtime: BoundRuntime) -> int:
    """Print a table, then the operators of each kind of layer; return the exit status."""
    from granite4_neuron.evaluation.layers import operators_of_layers

    first_off = next((number for number, report in enumerate(reports) if report.is_off), None)
    print_table(_table_of_layers(reports, first_off))
    for kind in dict.fromkeys(runtime.config.layer_types):
        write(f"{kind} layers: {', '.join(operators_of_layers(runtime, kind))}")
    for sentence in runtime.fallbacks:
        write(sentence)
    if first_off is not None:
        write(f"FAILED (layer {first_off}, {reports[first_off].kind}, is the first that is off)")
        return EXIT_CHECK_FAILED
    is_judged = reports[0].limit is not None
    write("passed (no layer is off)" if is_judged else "not judged (quantized weights, or SSM states in 16 bits)")
    return 0


def _table_of_layers(reports: Sequence[LayerReport], first_off: int | None) -> Table:
    """Return a table of all layers, in which the first that is off is marked."""
    from rich.table import Table

    columns = ["layer", "", "prefill\nmax diff", "\nrelative", "decode\nmax diff", "\nrelative", "\nlimit", ""]
    has_ratios = reports[0].r_ratio is not None
    table = Table(*columns, *(["\nR-ratio"] if has_ratios else []))
    table.title = "hidden states after each layer against transformers in float32"
    for number, report in enumerate(reports):
        values = [value for gap in (report.prefill, report.decode) for value in (gap.maximum, gap.relative)]
        limit = "" if report.limit is None else f"{report.limit:.1e}"
        mark = "<-" if number == first_off else ""
        ratio = [] if report.r_ratio is None else [f"{report.r_ratio:.2f}"]
        table.add_row(str(number), report.kind, *(f"{value:.1e}" for value in values), limit, mark, *ratio)
    return table
