"""Load on OpenAI-compatible servers: this package's, vLLM's, llama.cpp's.

    granite4-neuron serve --port 8000
    python -m benchmarks.serving http://127.0.0.1:8000/v1 --concurrency 8
    python -m benchmarks.serving ours=http://127.0.0.1:8000/v1 theirs=http://127.0.0.1:8001/v1 --prompt-length 512 \\
        --output-length 128 --num-requests 32 --repeats 3 --goodput first-token:2000 per-token:100

Prompts are random token ids. Answers are greedy, or sampled with --temperature, --top-p and --top-k, and have exactly
the requested number of tokens. With several addresses the servers take turns with the same questions, and each
repetition has new questions. The report has the time to the first token, the time per output token (the mean over a
request's tokens after the first), the time between two parts of a stream, tokens per second, and goodput: requests per
second within all limits. Times are in milliseconds, over all repetitions. Rates are medians of the repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.errors import reports_errors
from benchmarks.serving.load import Answer, Lengths, Question, Run, ask_all, moments, questions, random_tokens
from granite4_neuron.commands.options import (
    add_drawing,
    at_least,
    check_folder_of,
    drawing_options,
    number_in,
)
from granite4_neuron.commands.output import print_table
from granite4_neuron.commands.plot import add_plot, check_plot, save_plot
from granite4_neuron.config.json_files import write_json
from granite4_neuron.errors import UserError

GOODPUT_TIMES = {"first-token": "first_token_ms", "per-token": "per_token_ms", "total": "total_ms"}
PERCENTILES = (50, 90, 99)
STATISTICS = ("mean", *(f"p{percent}" for percent in PERCENTILES))


@dataclass(frozen=True)
class Result:
    """One server. Times in milliseconds: the mean, and p50, p90, p99; rates per second."""

    server: str
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_ms: Sequence[float]
    per_token_ms: Sequence[float]
    between_tokens_ms: Sequence[float]
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    goodput_requests_per_second: float


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code, 1 if a request failed."""
    options = _parser().parse_args(arguments)
    check_folder_of(options.json)
    check_folder_of(options.traffic)
    if options.traffic and options.concurrency:
        raise UserError("--traffic needs requests that do not wait for others; leave --concurrency out.")
    check_plot(options.plot)
    limits = _goodput_limits(options.goodput)
    runs = asyncio.run(_measure(_servers(options.servers), options))
    results = [_result(server, of_server, limits) for server, of_server in runs.items()]
    _print(results)
    answers = [answer for of_server in runs.values() for run in of_server for answer in run.answers]
    for message in {answer.error for answer in answers if answer.error}:
        print(f"a request failed: {message}", file=sys.stderr)
    if options.json:
        write_json(options.json, json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if options.plot:
        _plot(results, options.plot)
    return 1 if any(result.errors for result in results) else 0


async def _measure(servers: dict[str, str], options: argparse.Namespace) -> dict[str, list[Run]]:
    """The servers in turns. The first `warmup` questions are sent one by one and not counted."""
    prompts, outputs = Lengths.parse(options.prompt_length), Lengths.parse(options.output_length)
    runs: dict[str, list[Run]] = {server: [] for server in servers}
    pace = options.concurrency, options.request_rate
    sampling = drawing_options(options)
    prefix = random_tokens(options.shared_prefix, options.vocab_size, random.Random(options.seed))
    for repeat in range(options.repeats + 1):
        number = options.num_requests if repeat else options.warmup
        seed = options.seed + repeat + 1
        asked = questions(number, prompts, outputs, prefix, options.vocab_size, random.Random(seed))
        if repeat == 1 and options.traffic:
            _write_traffic(options.traffic, asked, len(prefix), options.request_rate, seed)
        for server, address in servers.items():
            run = await ask_all(address, asked, *(pace if repeat else (1, None)), seed, sampling)
            if repeat:
                runs[server].append(run)
    return runs


def _write_traffic(file: Path, asked: Sequence[Question], prefix: int, rate: float | None, seed: int) -> None:
    """Write questions as a file of traffic for `granite4-neuron plan`."""
    shared = dict(prefix="shared", prefix_tokens=prefix) if prefix else {}
    lines = []
    for question, moment in zip(asked, moments(len(asked), rate, seed), strict=True):
        lengths = dict(prompt_tokens=len(question.prompt), answer_tokens=question.new_tokens)
        lines.append(json.dumps(dict(arrival=moment, **lengths, **shared)))
    write_json(file, "\n".join(lines) + "\n")


def _result(server: str, runs: Sequence[Run], limits: dict[str, float]) -> Result:
    answers = [answer for run in runs for answer in run.answers]
    good = [answer for answer in answers if answer.error is None]

    def rate(count) -> float:
        return statistics.median(sum(count(answer) for answer in _good(run)) / run.seconds for run in runs)

    return Result(
        server=server,
        requests=len(answers),
        errors=len(answers) - len(good),
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        cached_tokens=sum(answer.cached_tokens for answer in good),
        output_tokens=sum(answer.tokens for answer in good),
        first_token_ms=_statistics([answer.first_token_ms for answer in good]),
        per_token_ms=_statistics([answer.per_token_ms for answer in good]),
        between_tokens_ms=_statistics([gap for answer in good for gap in answer.between_tokens_ms]),
        output_tokens_per_second=rate(lambda answer: answer.tokens),
        total_tokens_per_second=rate(lambda answer: answer.tokens + answer.prompt_tokens),
        requests_per_second=rate(lambda answer: 1),
        goodput_requests_per_second=rate(lambda answer: _is_within(answer, limits)),
    )


def _good(run: Run) -> list[Answer]:
    return [answer for answer in run.answers if answer.error is None]


def _is_within(answer: Answer, limits: dict[str, float]) -> bool:
    """Return whether an answer is within all limits. An answer of one token passes the limit per further token."""
    return not any(getattr(answer, name) > limit for name, limit in limits.items())


def _statistics(values: Sequence[float]) -> list[float]:
    """Return the mean, and percentiles by nearest rank; NaN without values."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return [math.nan] * len(STATISTICS)
    percentiles = (ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in PERCENTILES)
    return [statistics.fmean(ordered), *percentiles]


def _servers(given: Sequence[str]) -> dict[str, str]:
    """Return {name: address}. An address without a name is its own name."""
    servers = {}
    for text in given:
        name, _, address = text.rpartition("=") if "=" in text.partition("://")[0] else (text, "", text)
        servers[name] = address.rstrip("/")
    if len(servers) < len(given):
        raise UserError("two servers have the same name; write NAME=ADDRESS.")
    return servers


def _goodput_limits(given: Sequence[str]) -> dict[str, float]:
    limits = {}
    for text in given:
        name, _, number = text.partition(":")
        if name not in GOODPUT_TIMES or not number.isdecimal():
            raise UserError(
                f"{text!r} is no limit; write {', '.join(GOODPUT_TIMES)} with milliseconds, such as per-token:100."
            )
        limits[GOODPUT_TIMES[name]] = float(number)
    return limits


def _print(results: Sequence[Result]) -> None:
    table = Table()
    table.add_column("")
    for result in results:
        table.add_column(result.server, justify="right")
    rows = {"requests, of which failed": lambda r: f"{r.requests}, {r.errors}"}
    rows["prompt tokens, of which cached"] = lambda r: f"{r.prompt_tokens:,}, {r.cached_tokens:,}"
    rows["output tokens"] = lambda r: f"{r.output_tokens:,}"
    for name, what in (
        ("first_token_ms", "time to first token"),
        ("per_token_ms", "time per output token"),
        ("between_tokens_ms", "between two parts"),
    ):
        for place, statistic in enumerate(STATISTICS):
            rows[f"{what}, {statistic}, ms"] = lambda r, name=name, place=place: f"{getattr(r, name)[place]:.1f}"
    rows["output tokens/s"] = lambda r: f"{r.output_tokens_per_second:.1f}"
    rows["tokens/s, prompts included"] = lambda r: f"{r.total_tokens_per_second:.1f}"
    rows["requests/s"] = lambda r: f"{r.requests_per_second:.3f}"
    rows["requests/s within the limits"] = lambda r: f"{r.goodput_requests_per_second:.3f}"
    for what, show in rows.items():
        table.add_row(what, *map(show, results))
    print_table(table)


def _plot(results: Sequence[Result], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    axes = figure.subplots(1, 4)
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        places = [place + number * width for place in range(len(STATISTICS))]
        for axis, name in zip(axes, ("first_token_ms", "per_token_ms", "between_tokens_ms"), strict=False):
            axis.bar(places, getattr(result, name), width, label=result.server)
            axis.set_xticks([place + 0.4 - width / 2 for place in range(len(STATISTICS))], STATISTICS)
            axis.set_title(name.removesuffix("_ms").replace("_", " ") + ", ms")
        axes[3].bar(number, result.output_tokens_per_second)
    axes[3].set_xticks(range(len(results)), [result.server for result in results])
    axes[3].set_title("output tokens/s")
    axes[0].legend()
    save_plot(figure, file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "servers", nargs="+", metavar="[NAME=]ADDRESS", help="address of an API, such as http://HOST:PORT/v1"
    )
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=at_least(1), metavar="N", help="requests at a time (default: all)")
    pace.add_argument(
        "--request-rate",
        type=number_in(0, includes_least=False),
        metavar="R",
        help="requests per second, at random moments (default: all at once)",
    )
    lengths = "always N, uniform:LOW:HIGH or normal:MEAN:DEVIATION (default: %(default)s)"
    parser.add_argument("--prompt-length", default="512", metavar="N", help=f"tokens: {lengths}")
    parser.add_argument("--output-length", default="128", metavar="N", help=f"tokens: {lengths}")
    parser.add_argument(
        "--shared-prefix",
        type=at_least(0),
        default=0,
        metavar="N",
        help="tokens that all prompts of all turns begin with",
    )
    add_drawing(parser)
    parser.add_argument("--num-requests", type=at_least(1), default=16, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--warmup", type=at_least(0), default=1, metavar="N", help="requests before that are not counted (default: 1)"
    )
    parser.add_argument("--repeats", type=at_least(1), default=1, metavar="N", help="turns (default: %(default)s)")
    parser.add_argument(
        "--vocab-size", type=at_least(2), default=1000, metavar="N", help="prompts' token ids are below it"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="seed of the prompts and their times")
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="LIMIT",
        help="limits in ms, such as first-token:1000 per-token:50 total:9000",
    )
    parser.add_argument(
        "--traffic",
        type=Path,
        metavar="FILE",
        help="write the requests of the first turn to this file, for granite4-neuron plan",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    add_plot(parser, "the numbers")
    return parser
