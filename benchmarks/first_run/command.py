"""Runs all steps of the first run on a Trainium for a Neuron SDK, and packs one file to send back.

    python -m benchmarks.first_run 2.33

A step that fails or hangs stops no other. If this program is ended, the same command goes on with the next step;
--again repeats steps. docs/first-device-run.md says what to prepare.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from benchmarks.errors import reports_errors
from benchmarks.first_run import running
from benchmarks.first_run.steps import NXDI, SDKS, steps_of
from benchmarks.probe.process import OK
from benchmarks.probe.remedies import advice
from granite4_neuron.commands.options import check_folder_of
from granite4_neuron.commands.output import print_table
from granite4_neuron.errors import UserError, check_choice

_NVME = Path("/opt/dlami/nvme")
_CORES = 4  # of h-small
# Others report compilations that took this much memory, and h-small's weights are read beside them.
_MEMORY = 190 * 2**30
_DISK, _DISK_OF_H_SMALL = 60 * 2**30, 250 * 2**30


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sdk", choices=SDKS, help="the Neuron SDK: PyTorch's device (2.33) or NxD Inference (2.31)")
    parser.add_argument(
        "--work",
        type=Path,
        default=_NVME / "first_run",
        metavar="FOLDER",
        help="on a fast drive, for weights, graphs and what is done so far (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results.tgz"), metavar="FILE", help="to send back (default: %(default)s)"
    )
    parser.add_argument("--no-h-small", action="store_true", help="leave out h-small, which needs four cores")
    parser.add_argument(
        "--vllm", metavar="PROGRAM", help="for 2.31: also serve with this vllm, of an environment with vLLM 0.16"
    )
    parser.add_argument("--again", nargs="+", default=[], metavar="STEP", help="run these steps again")
    return parser


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that are left; return 0 if all are as they should be, and 1 otherwise."""
    options = parser().parse_args(arguments)
    if options.vllm is not None and options.sdk != NXDI:
        raise UserError(f"--vllm is for {NXDI}; vLLM's plugin for {options.sdk} does not know these models.")
    check_folder_of(options.out)
    cores = running.num_cores()
    has_h_small = not options.no_h_small and (cores is None or cores >= _CORES)
    steps = steps_of(options.sdk, has_h_small, options.vllm)
    for name in options.again:
        check_choice("--again", name, {step.name: step for step in steps})
    if not options.work.exists() and not options.work.parent.is_dir():
        raise UserError(f"there is no folder {options.work.parent}; give --work a folder on a fast drive.")
    facts = running.machine(options.work.parent)
    run = running.Run(options.sdk, steps, options.work, options.out, facts, running.execute)
    running.end_left_over(options.work)
    run.forget(options.again)
    return follow(run, has_h_small)


def follow(run: running.Run, has_h_small: bool) -> int:
    """Run what is left of a run, and print how long it takes, each step, and what follows."""
    left = [step for step in run.steps if step.name not in run.records]
    hours = sum(step.minutes for step in left) / 60
    print(
        f"{len(left)} of {len(run.steps)} steps are left, {'with' if has_h_small else 'without'} h-small. They take "
        f"about {hours:.0f} hours by what others report of compilers; nobody has run them. {run.out} has what is done."
    )
    for caution in cautions(run.work, has_h_small):
        print(f"Before you go on: {caution}")
    print(flush=True)
    for record in run.all():
        print(f"{record.result:>11}  {record.seconds:8.1f} s  {record.name}  {record.message}", flush=True)
    run.pack()
    return summary(run)


def cautions(work: Path, has_h_small: bool) -> Iterator[str]:
    """Yield what the machine lacks for compilers; docs/first-device-run.md has the commands."""
    if sum(running.memory().values()) < _MEMORY:
        yield "memory and swap are less than 190 GB, and compilations of others took 88 GB each; add swap."
    if os.stat("/tmp").st_dev != os.stat(work).st_dev:
        yield f"/tmp is not on the drive of {work}, and compilers write there whatever TMPDIR says; bind it."
    needed = _DISK_OF_H_SMALL if has_h_small else _DISK
    if shutil.disk_usage(work).free < needed:
        yield f"{work} has less than {needed >> 30} GB left."


def summary(run: running.Run) -> int:
    """Print what was not right and which options to use; return the exit status."""
    records = list(run.records.values())
    failed = [record for record in records if record.result != OK]
    if failed:
        table = Table("step", "result", "message")
        for record in failed:
            table.add_row(escape(record.name), record.result, escape(record.message))
        print_table(table)
    print(f"{len(records) - len(failed)} of {len(records)} steps are right.")
    for sentence in advice(records):
        print(sentence)
    print(f"Options to use: {' '.join(run.options) or 'none'}.")
    print(f"Please send back {run.out}; it has no weights.")
    return 1 if failed else 0
