"""`granite4-neuron check`: logits against those of transformers."""

from __future__ import annotations

import argparse

import torch
from rich.table import Table

from granite4_neuron import accuracy, checkpoint
from granite4_neuron.commands.options import add_arithmetic, add_cpu_options, add_model, chosen_dtype, model_or_bundled
from granite4_neuron.commands.output import print_table
from granite4_neuron.errors import UserError
from granite4_neuron.generation import load

EXIT_CHECK_FAILED = 1


def add_parser(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser(
        "check",
        help="compare logits with transformers",
        description="Compare logits with transformers, token by token. float32 passes when no logit is further off "
        "than the tolerance; other dtypes when the mean error to float32 is not above that of transformers there; "
        "quantized weights when the likeliest token is the same nine times in ten.",
    )
    add_model(check)
    add_arithmetic(check)
    add_cpu_options(check)
    check.add_argument("--prompt", action="append", default=[], help="compare on this text; may be repeated")
    check.add_argument("--tokens", type=int, default=16, help="tokens to decode after each prompt (default: 16)")
    check.add_argument(
        "--tolerance", type=float, default=accuracy.FLOAT32_TOLERANCE, help="for float32 (default: %(default)s)"
    )
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.tokens < 1:
        raise UserError(f"--tokens is {options.tokens}, and must be at least 1.")
    if not options.tolerance > 0:
        raise UserError(f"--tolerance is {options.tolerance}, and must be above 0.")
    folder = checkpoint.find(model_or_bundled(options))
    model, tokenizer = load(
        folder,
        chosen_dtype(options),
        options.prefill_scan,
        decode_kernel=options.decode_kernel,
        cpu_kernels=options.cpu_kernels,
        quantize=options.quantize,
        tuned_configs=options.tuned_configs,
    )
    prompts = [tokenizer.encode(text) for text in options.prompt] or accuracy.default_prompts(tokenizer)
    if not all(prompts):
        raise UserError("a prompt is empty; give at least one token of text.")
    report = accuracy.measure(folder, prompts, options.tokens, model)
    print_table(_accuracy_table(report, model.model.dtype))
    passed = report.passed(options.tolerance)
    print("passed" if passed else "FAILED", f"({report.criterion(options.tolerance)})")
    return 0 if passed else EXIT_CHECK_FAILED


def _accuracy_table(report: accuracy.AccuracyReport, dtype: torch.dtype) -> Table:
    table = Table("", "tokens", "max diff", "mean diff", "top-1", "Pearson")
    weights = " with quantized weights" if report.is_quantized else ""
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
    while (difference := report.positions(start, start + width)) is not None:
        add(f"position {start}" if width == 1 else f"positions {start}-{start + width - 1}", difference)
        start, width = start + width, start + width
    table.add_section()
    add("prefill", report.phase(prefill=True))
    add("decode", report.phase(prefill=False))
    add("all", report.overall())
    if (of_transformers := report.of_transformers()) is not None:
        add("transformers in this dtype", of_transformers)
    return table
