"""`granite4-neuron graphs`: what the compiled graphs of a model cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table

from granite4_neuron import graphs, neuron_stand_ins
from granite4_neuron.commands.options import (
    add_arithmetic,
    add_expert_path,
    add_model,
    add_ranks_and_sequences,
    check_folder_of,
    chosen_dtype,
    config_and_dtype,
    model_or_bundled,
)
from granite4_neuron.commands.output import print_table, size
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.neuron_sdk import EXPERT_PATHS
from granite4_neuron.ops import DECODE_KERNELS, PREFILL_SCANS


def add_parser(commands: argparse._SubParsersAction) -> None:
    graph = commands.add_parser(
        "graphs",
        help="what the compiled graphs of a model cost",
        description="Trace one rank's graphs with torch_xla, without weights, and count them with XLA's cost analysis "
        "before optimisation, beside the least that a step can cost. Temporaries are those of one layer of each kind, "
        "compiled for the CPU, which in bfloat16 include float32 copies of weights. What the compiler for Trainium is "
        "known to handle badly is listed below the table.",
    )
    add_model(graph, family=True)
    graph.add_argument(
        "--backend",
        choices=("xla", "nxdi"),
        default="xla",
        help="nxdi traces what NxD Inference compiles for a device; it needs its package, or its public sources, "
        f"which {' and '.join(neuron_stand_ins.SOURCES)} name (default: xla)",
    )
    add_arithmetic(graph)
    add_expert_path(graph)
    add_ranks_and_sequences(graph, tp_degree=1)
    graph.add_argument("--buckets", type=int, nargs="+", default=[128, 512], metavar="N", help="default: 128 512")
    graph.add_argument("--max-length", type=int, default=2048, metavar="N", help="of the cache (default: 2048)")
    graph.add_argument(
        "--verify",
        type=int,
        metavar="T",
        help="of the backend xla: also the graph that verifies T tokens of each sequence, the last one and drafts",
    )
    graph.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    graph.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if min(options.tp_degree, options.batch_size, options.max_length, *options.buckets) < 1:
        raise UserError("--tp-degree, --batch-size, --buckets and --max-length must be at least 1.")
    if options.verify is not None and not 2 <= options.verify <= options.max_length:
        raise UserError("--verify is the last certain token and drafts: 2 tokens at least, --max-length at most.")
    if max(options.buckets) > options.max_length:
        raise UserError(f"a step of {max(options.buckets)} tokens needs --max-length to be as much at least.")
    check_folder_of(options.json)
    config, dtype = config_and_dtype(str(model_or_bundled(options)))
    dtype = chosen_dtype(options) or dtype
    reports = list(_reports(options, config, dtype))
    table = Table(
        "graph", "GFLOP", "least", "", "GB accessed", "least", "", "instructions", "weights", "state", "temporaries"
    )
    table.title = f"one rank of {options.tp_degree}, {str(dtype).removeprefix('torch.')}"
    for report in reports:
        _add_graph(table, report)
    print_table(table)
    for report in reports:
        for note in (*report.notes, *report.findings):
            print(f"{report.graph}: {note}")
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=2) + "\n", encoding="utf-8")
    return 0


def _reports(
    options: argparse.Namespace, config: GraniteMoeHybridConfig, dtype: torch.dtype
) -> Iterator[graphs.GraphReport]:
    sizes = (options.tp_degree, options.batch_size, sorted(options.buckets), options.max_length)
    kernels = {name: getattr(options, name) for name in ("prefill_scan", "decode_kernel", "expert_path")}
    if options.backend == "xla":
        if kernels != dict(prefill_scan=PREFILL_SCANS[0], decode_kernel=DECODE_KERNELS[0], expert_path=EXPERT_PATHS[0]):
            raise UserError("--prefill-scan, --decode-kernel and --expert-path belong to --backend nxdi here.")
        return graphs.report(config, dtype, *sizes, options.verify)
    if options.verify is not None:
        raise UserError("--verify belongs to the backend xla; NxD Inference's graphs verify nothing here.")
    reason = neuron_stand_ins.why_not_importable()
    if reason:
        raise UserError(f"--backend nxdi: {reason}.")
    from granite4_neuron.nxdi.graphs import report

    return report(config, dtype, *sizes, kernels)


def _add_graph(table: Table, report: graphs.GraphReport) -> None:
    """A row for the graph, and one for each of its parts."""
    table.add_row(
        report.graph,
        f"{report.cost.flops / 1e9:.4g}",
        f"{report.minimum.flops / 1e9:.4g}",
        f"x {report.flops_ratio:.2f}",
        f"{report.cost.bytes_accessed / 1e9:.4g}",
        f"{report.minimum.bytes_accessed / 1e9:.4g}",
        f"x {report.bytes_ratio:.2f}",
        f"{report.cost.instructions:,}",
        size(report.weight_bytes),
        size(report.state_bytes),
        size(report.temporary_bytes),
    )
    for name, cost in report.components.items():
        flops, accessed = f"{cost.flops / 1e9:.4g}", f"{cost.bytes_accessed / 1e9:.4g}"
        table.add_row(f"  {name}", flops, "", "", accessed, "", "", f"{cost.instructions:,}")
    table.add_section()
