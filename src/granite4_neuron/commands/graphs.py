"""`granite4-neuron graphs`: what the compiled graphs of a model cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.table import Table

from granite4_neuron import graphs
from granite4_neuron.commands.options import (
    add_model,
    add_ranks_and_sequences,
    check_folder_of,
    chosen_dtype,
    config_and_dtype,
    model_or_bundled,
)
from granite4_neuron.commands.output import print_table, size
from granite4_neuron.config import DTYPES
from granite4_neuron.errors import UserError


def add_parser(commands: argparse._SubParsersAction) -> None:
    graph = commands.add_parser(
        "graphs",
        help="what the compiled graphs of a model cost",
        description="Trace one rank's graphs with torch_xla, without weights, and count them with XLA's cost analysis "
        "before optimisation. Temporaries are those of the module compiled for the CPU, which in bfloat16 include "
        "float32 copies of weights. What the compiler for Trainium is known to handle badly is listed below the table.",
    )
    add_model(graph, family=True)
    graph.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: that of the weights)")
    add_ranks_and_sequences(graph, tp_degree=1)
    graph.add_argument("--buckets", type=int, nargs="+", default=[128, 512], metavar="N", help="default: 128 512")
    graph.add_argument("--max-length", type=int, default=2048, metavar="N", help="of the cache (default: 2048)")
    graph.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    graph.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if min(options.tp_degree, options.batch_size, options.max_length, *options.buckets) < 1:
        raise UserError("--tp-degree, --batch-size, --buckets and --max-length must be at least 1.")
    if max(options.buckets) > options.max_length:
        raise UserError(f"a step of {max(options.buckets)} tokens needs --max-length to be as much at least.")
    check_folder_of(options.json)
    config, dtype = config_and_dtype(str(model_or_bundled(options)))
    dtype = chosen_dtype(options) or dtype
    reports = list(
        graphs.report(config, dtype, options.tp_degree, options.batch_size, options.buckets, options.max_length)
    )
    table = Table("graph", "weights", "state, donated", "GFLOP", "GB accessed", "instructions", "temporaries")
    table.title = f"one rank of {options.tp_degree}, {str(dtype).removeprefix('torch.')}"
    for report in reports:
        table.add_row(
            report.graph,
            size(report.weight_bytes),
            size(report.state_bytes),
            f"{report.flops / 1e9:.4g}",
            f"{report.bytes_accessed / 1e9:.4g}",
            f"{report.instructions:,}",
            size(report.temporary_bytes),
        )
    print_table(table)
    for report in reports:
        for finding in report.findings:
            print(f"{report.graph}: {finding}")
    if options.json:
        options.json.write_text(json.dumps([vars(report) for report in reports], indent=2) + "\n", encoding="utf-8")
    return 0
