"""`granite4-neuron graphs`: what the compiled graphs of a model cost."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.compiled_options import (
    add_compiled_state_dtype,
    add_expert_path,
    add_experts_decode,
    add_ranks_and_sequences,
)
from granite4_neuron.commands.options import (
    add_arithmetic,
    add_model,
    at_least,
    check_folder_of,
    config_and_dtype,
    dtype_of,
    kernels_of,
    model_or_bundled,
)
from granite4_neuron.commands.output import print_table, size, write
from granite4_neuron.config.json_files import write_json
from granite4_neuron.devices.neuron.sdk import (
    COMPILED_STATE_DTYPES,
    INSTANCES,
    KERNELS,
    WITHOUT_TORCH_XLA,
    why_not_lowered,
)
from granite4_neuron.devices.neuron.stand_ins import SOURCES, why_not_importable
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from granite4_neuron.config import ModelConfig
    from granite4_neuron.planning.analysis import graphs


def add_parser(commands: argparse._SubParsersAction) -> None:
    graph = commands.add_parser(
        "graphs",
        help="what the compiled graphs of a model cost",
        description="Trace one rank's graphs, without weights, and count them with XLA's cost analysis before "
        "optimisation, beside the least that a step can cost; fused is the number of bytes that would move if "
        "element-wise operations moved none. Temporaries are those of one layer of each kind, compiled for the CPU; in "
        "bfloat16 they include float32 copies of weights. The live set estimates the activations that a prompt's graph "
        "keeps in SBUF. A list below the table has the constructs that the compiler for Trainium is reported to handle "
        "badly.",
    )
    add_model(graph, family=True)
    graph.add_argument(
        "--backend",
        choices=("xla", "torch", "nxdi"),
        default="xla",
        help="xla traces with torch_xla; torch compiles with torch.compile and lowers with torch-mlir, as TorchNeuron "
        "does; nxdi traces what NxD Inference compiles for a device; it needs its package, or its public sources, "
        f"which {' and '.join(SOURCES)} name (default: xla)",
    )
    add_arithmetic(graph, takes_several=True)
    add_expert_path(graph)
    add_experts_decode(graph)
    add_compiled_state_dtype(graph)
    add_ranks_and_sequences(graph, tp_degree=1)
    graph.add_argument(
        "--buckets", type=at_least(1), nargs="+", default=[128, 512], metavar="N", help="default: 128 512"
    )
    graph.add_argument("--max-length", type=at_least(1), default=2048, metavar="N", help="of the cache (default: 2048)")
    graph.add_argument(
        "--verify",
        type=at_least(2),
        metavar="T",
        help="also the graphs that verify T tokens of each sequence, the last one and drafts, and commit them",
    )
    graph.add_argument(
        "--instance", choices=INSTANCES, default="trn2.3xlarge", help="whose SBUF is meant (default: %(default)s)"
    )
    graph.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    graph.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.verify is not None and options.verify > options.max_length:
        raise UserError(f"--verify is {options.verify}; --max-length must be at least as large.")
    if max(options.buckets) > options.max_length:
        raise UserError(f"--buckets has {max(options.buckets)}; --max-length must be at least as large.")
    check_folder_of(options.json)
    if options.backend != "nxdi":
        _check_has_none_of_nxdi(options)
    _check_tools(options.backend)
    # Not at the top: these imports take seconds, and --help does not need them.
    from granite4_neuron.planning.analysis.live_set import live_set, sbuf_bytes

    config, stored_dtype = config_and_dtype(str(model_or_bundled(options)), options.revision)
    dtype = dtype_of(options.dtype or stored_dtype)
    chip = INSTANCES[options.instance].chip
    numbers = []
    for name in dict.fromkeys(options.kernels):
        kernels = kernels_of(options, name)
        reports = [
            each
            if each.prompt_tokens is None
            else replace(each, live_set=live_set(config, options.tp_degree, dtype, each.prompt_tokens, chip))
            for each in _reports(options, kernels, config, dtype)
        ]
        titles = [f"one rank of {options.tp_degree}", str(dtype).removeprefix("torch.")]
        if options.backend == "nxdi":
            titles += [f"{option.replace('_', ' ')} {kernel}" for option, kernel in kernels.items()]
        _print(reports, ", ".join(titles), size(sbuf_bytes(chip)))
        numbers += [{**report.numbers(), "kernels": kernels} for report in reports]
    if options.json:
        write_json(options.json, json.dumps(numbers, indent=2) + "\n")
    return 0


def _check_tools(backend: str) -> None:
    """Check that the packages that trace and count graphs are installed; raise UserError if not."""
    if backend == "xla" and importlib.util.find_spec("torch_xla") is None:
        raise UserError(WITHOUT_TORCH_XLA)
    if backend == "torch" and (reason := why_not_lowered()) is not None:
        raise UserError(reason)
    if backend == "nxdi" and (reason := why_not_importable()) is not None:
        raise UserError(f"--backend nxdi: {reason}.")


def _check_has_none_of_nxdi(options: argparse.Namespace) -> None:
    chosen = [(kernels_of(options, name), options.state_dtype) for name in options.kernels]
    if any(each != (KERNELS["torch"], COMPILED_STATE_DTYPES[0]) for each in chosen):
        raise UserError(
            "--kernels, --prefill-scan, --decode-kernel, --expert-path and --state-dtype belong to --backend nxdi here."
        )
    if options.experts_decode == "kernel":
        raise UserError("--experts-decode kernel is counted with --backend nxdi only, where kernels have their costs.")


def _reports(
    options: argparse.Namespace, kernels: Mapping[str, str], config: ModelConfig, dtype: torch.dtype
) -> Iterator[graphs.GraphReport]:
    from granite4_neuron.planning.analysis import graphs

    sizes = (options.tp_degree, options.batch_size, sorted(options.buckets), options.max_length)
    if options.backend != "nxdi":

        def trace(graph: graphs.Graph) -> graphs.Traced:
            graph = replace(graph, experts_decode=options.experts_decode)
            if options.backend == "xla":
                return graphs.trace_xla(graph)
            from granite4_neuron.planning.analysis.torch_graphs import trace_torch

            return trace_torch(graph)

        return graphs.report(config, dtype, *sizes, options.verify, trace)
    from granite4_neuron.planning.analysis.nxdi_graphs import report

    of_experts = {} if options.experts_decode is None else {"experts_decode": options.experts_decode}
    choices = {**kernels, **of_experts, "state_dtype": options.state_dtype}
    return report(config, dtype, *sizes, choices, options.verify)


def _print(reports: Sequence[graphs.GraphReport], title: str, sbuf: str) -> None:
    """Print a table of graphs, and what is to be said about each."""
    from rich.table import Table

    costs = "graph", "GFLOP", "least", "", "GB accessed", "least", "", "fused", ""
    table = Table(*costs, "instructions", "weights", "state", "temporaries", f"live set, of {sbuf}", title=title)
    for report in reports:
        _add_graph(table, report)
    write(_summary(reports))
    print_table(table)
    for report in reports:
        spill = report.live_set and report.live_set.spill()
        for note in (*report.notes, *report.findings, *([spill] if spill else [])):
            write(f"{report.graph}: {note}")


def _summary(reports: Sequence[graphs.GraphReport]) -> str:
    """Return how far the graphs are from the least that a step can cost, and how much the compiler may handle badly."""
    ratios = [report.fused_ratio for report in reports]
    findings = sum(len(report.findings) for report in reports)
    least = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))))
    badly = f"{findings} constructs that" if findings else "Nothing that"
    return (
        f"If element-wise work moved nothing, the graphs would move {least} times the least bytes of a step. {badly} "
        f"Neuron's compiler is reported to handle badly {'are listed below' if findings else 'was found'}."
    )


def _add_graph(table: Table, report: graphs.GraphReport) -> None:
    """Add a row for the graph, and one for each of its parts."""
    table.add_row(
        report.graph,
        f"{report.cost.flops / 1e9:.4g}",
        f"{report.minimum.flops / 1e9:.4g}",
        f"x {report.flops_ratio:.2f}",
        f"{report.cost.bytes_accessed / 1e9:.4g}",
        f"{report.minimum.bytes_accessed / 1e9:.4g}",
        f"x {report.bytes_ratio:.2f}",
        f"{report.cost.fused_bytes / 1e9:.4g}",
        f"x {report.fused_ratio:.2f}",
        f"{report.cost.instructions:,}",
        size(report.weight_bytes),
        size(report.state_bytes),
        size(report.temporary_bytes),
        "" if report.live_set is None else size(report.live_set.live),
    )
    for name, cost in report.components.items():
        flops, accessed, fused = (f"{each / 1e9:.4g}" for each in (cost.flops, cost.bytes_accessed, cost.fused_bytes))
        table.add_row(f"  {name}", flops, "", "", accessed, "", "", fused, "", f"{cost.instructions:,}")
    table.add_section()
