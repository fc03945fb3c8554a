"""Tries this project's parts on a PyTorch device, from small to large, and writes what it finds to one file.

    python -m benchmarks.probe --device neuron --out probe.json

Each step runs in a process of its own with a time limit, so a step that fails, crashes or hangs stops no other. --step
runs a single step in this process and shows everything that it prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from benchmarks.errors import reports_errors
from benchmarks.probe.process import OK, Place, Record, Step, run_apart, run_here
from benchmarks.probe.remedies import advice
from granite4_neuron.commands.options import add_declared, at_least, check_folder_of, command_line
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import published_config
from granite4_neuron.config.choices import EXPERTS_DECODE, KV_WRITES, NKI_PREFILL_SCANS
from granite4_neuron.config.json_files import write_json
from granite4_neuron.devices.torch import backend as torch_device
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.errors import check_choice

# Seconds. A compiler for a device may take minutes for a graph.
_GRAPH, _GRAPHS, _BENCHMARK = 600, 3600, 4 * 3600
_OPERATORS = (
    ("embedding",),
    ("linear",),
    ("rms_norm",),
    ("rms_norm_gated",),
    ("residual_add",),
    ("layouts",),
    ("mlp",),
    ("router_logits",),
    ("topk_softmax",),
    ("fused_experts", "chosen"),
    ("fused_experts", "all"),
    ("fused_experts", "blocks"),
    ("rotary",),
    ("cached_attention", "in_order"),
    ("cached_attention", "by_slot"),
    ("convolution",),
    ("mamba_prefill", "chunked"),
    ("mamba_prefill", "quadratic"),
    ("mamba_decode",),
    ("logits",),
    ("drawn",),
)

STEPS = (
    Step("benchmarks.probe.device:versions", 120),
    Step("benchmarks.probe.states:alias", _GRAPH),
    *(Step("benchmarks.probe.states:kv_write", _GRAPHS, (form,)) for form in KV_WRITES),
    Step("benchmarks.probe.states:leading_view", _GRAPH),
    *(Step(f"benchmarks.probe.operators:{name}", _GRAPH, tuple(case)) for name, *case in _OPERATORS),
    *(Step("benchmarks.probe.operators:experts_decode", _GRAPHS, (form,)) for form in EXPERTS_DECODE),
    *(Step("benchmarks.probe.models:layer", _GRAPHS, (kind,)) for kind in ("mamba", "attention", "experts")),
    Step("benchmarks.probe.models:text", _GRAPHS),
    Step("benchmarks.probe.models:warm_up", _GRAPHS),
    *(Step("benchmarks.probe.models:bucket", _GRAPHS, (tokens,)) for tokens in ("128", "512", "2048")),
    Step("benchmarks.probe.models:verification", _GRAPHS),
    Step("benchmarks.probe.models:fallbacks", _GRAPHS),
    *(Step("benchmarks.probe.models:kernels", _GRAPHS, (scan,)) for scan in NKI_PREFILL_SCANS),
    *(
        Step(f"benchmarks.probe.ranks:{name}", _GRAPHS, (*case, degree))
        for name, *case in (
            ("group",),
            ("all_reduce",),
            ("all_gather",),
            *(("layer", kind) for kind in ("mamba", "attention", "experts")),
            ("text",),
        )
        for degree in ("2", "4")
    ),
)


# The probe has its own form of the others. Its steps choose lengths of prompts themselves.
_OWN_OPTIONS = ("device", "dtype", "tp_degree", "prefill_buckets")
MODEL_OPTIONS = [each for each in torch_device.OPTIONS if each.name not in _OWN_OPTIONS]


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, required=True)
    parser.add_argument("--out", type=Path, default=Path("probe.json"), metavar="FILE", help="default: %(default)s")
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        metavar="NAME",
        help="also run benchmark_latency.py with random weights of these sizes, for example h-350m",
    )
    parser.add_argument(
        "--tp-degree", type=at_least(1), default=1, metavar="N", help="split --models over N devices, default: 1"
    )
    parser.add_argument("--step", metavar="NAME", help="run this step only, in this process, and write no file")
    add_declared(parser.add_argument_group("of the steps that run a model"), MODEL_OPTIONS)
    return parser


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the probe; return 0 if all was as it should be, and 1 otherwise."""
    return probe(STEPS, "benchmarks.probe", arguments)


def probe(steps: Sequence[Step], module: str, arguments: Sequence[str] | None = None) -> int:
    """Run a probe with these steps, otherwise like `main`.

    Args:
        module: the module of a program that calls this function with the same steps.
    """
    options = parser().parse_args(arguments)
    for name in options.models:
        published_config(name).rank_dimensions(options.tp_degree)  # if there is such a model
    degree = str(options.tp_degree)
    steps = (*steps, *(Step("benchmarks.probe.models:latency", _BENCHMARK, (name, degree)) for name in options.models))
    if options.step is not None:
        named = {step.name: step for step in steps}
        check_choice("step", options.step, named)
        chosen = {each.name: vars(options)[each.name] for each in MODEL_OPTIONS}
        run_here(named[options.step], Place(options.device, chosen.pop("compiler"), chosen))
        return 0
    check_folder_of(options.out)
    records: list[Record] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=step.name)
            records.append(run_apart(step, _command(step, options, module)))
            progress.advance(task)
            _write(records, options)  # after each step, in case the next one takes the machine down
    _print(records)
    return 0 if all(record.result == OK for record in records) else 1


def _command(step: Step, options: argparse.Namespace, module: str) -> list[str]:
    command = [sys.executable, "-m", module, "--step", step.name, "--device", options.device]
    if options.models:
        command += ["--models", *options.models, "--tp-degree", str(options.tp_degree)]
    return command + command_line(MODEL_OPTIONS, vars(options))


def _write(records: Sequence[Record], options: argparse.Namespace) -> None:
    record = {
        "device": options.device,
        "compiler": options.compiler or "the device's",
        "options": command_line(MODEL_OPTIONS, vars(options)),
        "advice": advice(records),
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "steps": [dataclasses.asdict(record) for record in records],
    }
    write_json(options.out, json.dumps(record, indent=2) + "\n")


def _print(records: Sequence[Record]) -> None:
    table = Table("step", "result")
    table.add_column("seconds", justify="right")
    table.add_column("message")
    for record in records:
        style = None if record.result == OK else "bold red"
        table.add_row(record.name, record.result, f"{record.seconds:.1f}", escape(record.message), style=style)
    print_table(table)
    if advised := advice(records):
        print(*advised, "The probe, the commands and benchmark_latency.py take these options.", sep="\n")
