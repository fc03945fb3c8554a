"""The numbers of a latency benchmark, as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import platform
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import transformers
from rich.markup import escape
from rich.table import Table

from benchmarks.latency.measurement import Result
from benchmarks.latency.states import compare_in_states
from granite4_neuron.commands.options import drawing_options, sampling_in_words
from granite4_neuron.commands.output import print_table
from granite4_neuron.commands.plot import save_plot
from granite4_neuron.config.json_files import write_json
from granite4_neuron.ops.launch_parameters import processor_name


def report(points: list[list[Result]], options: argparse.Namespace) -> None:
    """Print the numbers; write and draw them if the options ask for it."""
    machine = machine_facts(options.threads)
    _print(points, machine, options)
    results = list(itertools.chain.from_iterable(points))
    if options.json:
        record = {
            "machine": machine,
            "model": source(options),
            "dtype": options.dtype or "as stored",
            "quantize": options.quantize,
            "state_dtype": options.state_dtype or "float32",
            "sampling": drawing_options(options),
            "warmup": options.warmup,
            "repeats": options.repeats,
            "results": [dataclasses.asdict(result) for result in results],
        }
        write_json(options.json, json.dumps(record, indent=2) + "\n")
    if options.plot:
        _plot(results, _title(machine, options), options.plot)


def _print(points: list[list[Result]], machine: dict[str, str], options: argparse.Namespace) -> None:
    for results in points:
        print(_glance(results, machine, options))
    times = Table("", "batch", "prompt", "first token ms", "token ms p50", "p90", "p99")
    rates = Table("", "batch", "prompt", "prefill tok/s", "of bound", "decode tok/s", "of bound")
    memory = Table("", "batch", "prompt", "peak MiB", "over weights")
    times.title = escape(_title(machine, options))
    for results in points:
        for result in results:
            point = [_label(result), str(result.batch_size), str(result.prompt_length)]
            times.add_row(*point, *_times(result))
            rates.add_row(*point, *_rates(result))
            memory.add_row(*point, f"{result.peak_memory_mib:.0f}", f"{result.over_weights_mib:.0f}")
            if result is not results[0]:
                prefill, decode, peak = _ratios(_compared_with(result, results), result)
                times.add_row("  ratio", "", "", prefill, decode, "", "")
                rates.add_row("  ratio", "", "", prefill, "", decode, "")
                memory.add_row("  ratio", "", "", peak, "")
        for table in (times, rates, memory):
            table.add_section()
    for table in (times, rates, memory):
        for column in table.columns[1:]:
            column.justify = "right"
        print_table(table)
    first = [results[0] for results in points]
    for line in (*machine_rates(first), *_states(points), *_growth(itertools.chain.from_iterable(points))):
        print(line)


def _glance(results: list[Result], machine: dict[str, str], options: argparse.Namespace) -> str:
    """Return a point in one sentence: the machine, the model, our two times, and the speed beside the others."""
    ours = results[0]
    token = f", {ours.token_ms_p50:.2f} ms a token" if ours.token_ms_p50 else ""
    batch = f"{ours.batch_size} prompts" if ours.batch_size > 1 else "a prompt"
    beside = []
    for theirs in results[1:]:
        if theirs.implementation != ours.implementation:
            prefill, decode, _ = _ratios(_compared_with(theirs, results), theirs)
            beside.append(f"; {' and '.join(filter(None, (prefill, decode)))} the speed of {_label(theirs)}")
    return (
        f"{machine['processor']}: {source(options)}, {options.dtype or 'dtype as stored'}, {batch} of "
        f"{ours.prompt_length:,}: {ours.first_token_ms:.1f} ms to the first token{token}{''.join(beside)}."
    )


def _title(machine: dict[str, str], options: argparse.Namespace) -> str:
    weights = f", {options.quantize} weights" if options.quantize else ""
    weights += f", SSM states in {options.state_dtype}" if options.state_dtype else ""
    ranks = f", split over {options.tp_degree}: memory of the first one" if options.tp_degree > 1 else ""
    numbers = f"{options.dtype or 'dtype as stored'}{weights}{ranks}, {sampling_in_words(drawing_options(options))}"
    return f"{source(options)}, {numbers}\n{', '.join(machine.values())}"


def _compared_with(result: Result, point: list[Result]) -> Result:
    """Return the result to compare with: ours under the same conditions, and for ours the one that runs alone."""
    ours = point[0]
    return next(
        other
        for other in point
        if other.implementation == ours.implementation
        and (result.implementation == ours.implementation or other.busy_processes == result.busy_processes)
    )


def _times(result: Result) -> list[str]:
    tokens = (result.token_ms_p50, result.token_ms_p90, result.token_ms_p99)
    return [f"{result.first_token_ms:.1f}", *(f"{each:.2f}" for each in tokens)]


def _rates(result: Result) -> list[str]:
    return [
        f"{result.prefill_tokens_per_second:.1f}",
        f"{result.prefill_of_bound:.2f}" if result.prefill_of_bound else "",
        f"{result.decode_tokens_per_second:.1f}",
        f"{result.decode_of_bound:.2f}" if result.decode_of_bound else "",
    ]


def _label(result: Result) -> str:
    return result.implementation + (f", {result.busy_processes} busy" if result.busy_processes else "")


def machine_rates(results: list[Result]) -> Iterator[str]:
    """Yield the rates from which the shares of the bound are computed, one line for each result."""
    for result in results:
        if result.machine_gflops:
            yield (
                f"machine, at batch {result.batch_size} and prompt {result.prompt_length}: "
                f"{result.machine_gflops:.0f} GFLOP/s, {result.machine_gbytes_per_second:.1f} GB/s"
            )


def _states(points: list[list[Result]]) -> Iterator[str]:
    """Yield lines that compare the first result of a point with the others within each state of the machine."""
    for point in points:
        for theirs in point[1:]:
            ours = _compared_with(theirs, point)
            for state in compare_in_states(ours, theirs):
                decode = f", decode {state.decode:.2f}x" if state.decode else ""
                yield (
                    f"over {_label(theirs)} at prompt {ours.prompt_length}, threads {state.round_trip_ns:.0f} ns apart "
                    f"in {state.runs[0]} and {state.runs[1]} runs: prefill {state.prefill:.2f}x{decode}"
                )


def _growth(results: Iterable[Result]) -> Iterator[str]:
    """Yield lines on how the time to first token grows with the prompt, if there are several lengths."""
    results = list(results)
    for name, batch_size in dict.fromkeys((_label(result), result.batch_size) for result in results):
        line = [r for r in results if (_label(r), r.batch_size) == (name, batch_size)]
        if len({result.prompt_length for result in line}) > 1:
            logs = [(math.log(result.prompt_length), math.log(result.first_token_ms)) for result in line]
            exponent = statistics.linear_regression(*zip(*logs, strict=True)).slope
            yield f"{name}, batch {batch_size}: time to first token grows as prompt length ^ {exponent:.2f}"


def _ratios(ours: Result, theirs: Result) -> tuple[str, str, str]:
    """Return how many times as fast our prompts and tokens are, and our memory as a multiple of theirs."""
    prefill = f"{ours.prefill_tokens_per_second / theirs.prefill_tokens_per_second:.2f}x"
    decode = "" if not ours.token_ms_p50 else f"{theirs.token_ms_p50 / ours.token_ms_p50:.2f}x"
    return prefill, decode, f"{ours.peak_memory_mib / theirs.peak_memory_mib:.2f}x"


def _plot(results: list[Result], title: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    first = results[0].implementation
    batches = {result.batch_size for result in results}
    for name, batch_size in dict.fromkeys((_label(result), result.batch_size) for result in results):
        line = [r for r in results if (_label(r), r.batch_size) == (name, batch_size)]
        lengths = [r.prompt_length for r in line]
        label = name if len(batches) == 1 else f"{name}, batch {batch_size}"
        style = dict(marker="o", linestyle="-" if name == first else "--", label=label)
        panels[0].plot(lengths, [r.prefill_tokens_per_second for r in line], **style)
        panels[1].plot(lengths, [r.decode_tokens_per_second for r in line], **style)
    for panel, phase in zip(panels, ("prefill", "decode"), strict=True):
        panel.set(title=phase, xlabel="prompt, tokens", ylabel="tokens per second", xscale="log", ylim=(0, None))
        lengths = sorted({result.prompt_length for result in results})
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.minorticks_off()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(title, fontsize="small")
    save_plot(figure, file)


def source(options: argparse.Namespace) -> str:
    """Return the name of the model, for a folder or file the last part of its path."""
    if options.model and Path(options.model).exists():
        return Path(options.model).resolve().name
    return options.random_weights or options.model or "the small model that comes with the package"


def machine_facts(threads: int) -> dict[str, str]:
    """Return the facts besides the model on which the numbers depend."""
    return {
        "processor": f"{processor_name()}, {threads} threads",
        "python": f"Python {platform.python_version()}",
        "torch": f"torch {torch.__version__}",
        "transformers": f"transformers {transformers.__version__}",
    }
