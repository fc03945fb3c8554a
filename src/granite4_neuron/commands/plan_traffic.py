"""`granite4-neuron plan --traffic` and `--rate`: how many replicas of a server some traffic needs."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from granite4_neuron.commands.compiled_options import config_and_dtype_on_neuron
from granite4_neuron.commands.engine_options import num_bytes
from granite4_neuron.commands.options import at_least, dtype_of, number_in, sampling_in_words
from granite4_neuron.commands.output import ProgressBar, print_table, write
from granite4_neuron.commands.plot import check_plot, save_plot
from granite4_neuron.commands.serve import MAX_GAP, MAX_NUM_SEQS, MODEL_LEN, PREFIX_CACHE
from granite4_neuron.devices.neuron.sdk import INSTANCES
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from granite4_neuron.config import ModelConfig
    from granite4_neuron.devices.neuron.compiled_graphs import GraphOptions
    from granite4_neuron.planning.analysis.device_graphs import DeviceGraphOptions
    from granite4_neuron.planning.simulation.replicas import Result
    from granite4_neuron.planning.simulation.server import Server
    from granite4_neuron.planning.simulation.statistics import Histogram
    from granite4_neuron.planning.simulation.traffic import Arrival

    OptionsOf = Callable[[ModelConfig], GraphOptions | DeviceGraphOptions]  # of a model's compiled graphs

EXIT_NOT_ENOUGH = 1
# Options and their defaults; without --traffic and --rate they are refused.
DEFAULTS: dict[str, Any] = {
    "steps": None,
    "prompt_length": None,
    "output_length": None,
    "shared_prefix": 0,
    "num_requests": 1000,
    "seed": 0,
    "replicas": [1, 2, 4, 8],
    "max_num_seqs": MAX_NUM_SEQS,
    "max_model_len": MODEL_LEN,
    "prefix_cache": PREFIX_CACHE,
    "max_gap": MAX_GAP,
    "first_token": 2.0,
    "price": None,
}
_OF_RATE = ("prompt_length", "output_length", "shared_prefix", "num_requests", "seed")
_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of the rate, in a plot


def add_traffic(planner: argparse.ArgumentParser) -> None:
    """Add the options of traffic as a group."""
    group = planner.add_argument_group(
        "traffic",
        "how many replicas of a server it needs, and what their answers take: the engine's own scheduler and prefix "
        "cache, without a model, with measured or predicted step times",
    )
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--traffic", type=Path, metavar="FILE", help="requests: a line of JSON for each, see docs/planning.md"
    )
    source.add_argument(
        "--rate",
        type=number_in(0, includes_least=False),
        metavar="R",
        help="R requests a second on average, at random; with --prompt-length and --output-length",
    )
    group.add_argument(
        "--steps",
        type=Path,
        metavar="FILE",
        help="step times that granite4-neuron measure wrote (default: those predicted for --instance)",
    )
    for name in ("prompt", "output"):
        group.add_argument(
            f"--{name}-length",
            metavar="LENGTH",
            help="--rate: tokens, such as 512, uniform:128:1024, or normal:512:64 (mean and standard deviation)",
        )
    group.add_argument(
        "--shared-prefix", type=at_least(0), metavar="N", help="--rate: number of tokens that all prompts begin with"
    )
    group.add_argument(
        "--num-requests",
        type=at_least(1),
        metavar="N",
        help=f"--rate: number of requests (default: {DEFAULTS['num_requests']})",
    )
    group.add_argument("--seed", type=at_least(0), metavar="N", help="--rate: seed of the arrivals and lengths")
    group.add_argument(
        "--replicas", type=at_least(1, 4096), nargs="+", metavar="N", help="numbers of them to try (default: 1 2 4 8)"
    )
    group.add_argument(
        "--first-token",
        type=number_in(0, includes_least=False),
        metavar="SECONDS",
        help="replicas are enough if 95 %% of first tokens come within this time "
        f"(default: {DEFAULTS['first_token']:g})",
    )
    group.add_argument("--price", type=number_in(0), metavar="P", help="price of a replica an hour, in any currency")
    for name, what in {"max-num-seqs": "texts at a time", "max-model-len": "most tokens of a text"}.items():
        default = DEFAULTS[name.replace("-", "_")]
        group.add_argument(
            f"--{name}",
            type=at_least(2 if name == "max-model-len" else 1),
            metavar="N",
            help=f"as for serve: {what} (default: {default})",
        )
    group.add_argument(
        "--prefix-cache",
        metavar="SIZE",
        help=f"as for serve: memory of a replica's prefix cache, 0 for none (default: {DEFAULTS['prefix_cache']})",
    )
    group.add_argument(
        "--max-gap",
        type=number_in(0, includes_least=False),
        metavar="MS",
        help=f"as for serve: how long a text waits for its next token while prompts of others run (default: "
        f"{DEFAULTS['max_gap']})",
    )


def check_no_traffic(options: argparse.Namespace) -> None:
    """Check that no option of traffic is given without traffic; raise UserError if one is."""
    for name in DEFAULTS:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} belongs to --traffic or --rate; give one, or leave it out.")


def plan_traffic(options: argparse.Namespace, graph_options: OptionsOf) -> int:
    """Simulate traffic, and print how many replicas it needs and what each number of them does.

    Args:
        graph_options: returns those of a model's compiled graphs.
    """
    _check(options)
    for name, default in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    check_plot(options.plot)
    cache_bytes = num_bytes(options.prefix_cache)
    # Not at the top: these imports take seconds, and --help does not need them.
    from granite4_neuron.planning.simulation.replicas import simulate

    server, where, caveat = _server(options, graph_options, cache_bytes)
    arrivals = _arrivals(options)
    replicas = sorted(set(options.replicas))
    has_conversations = any(arrival.conversation is not None for arrival in arrivals)
    fleets = [(each, keeps) for each in replicas for keeps in _ways(each, has_conversations)]
    with ProgressBar("traffic", "requests") as progress:
        results = simulate(arrivals, server, fleets, os.cpu_count() or 1, progress)
    enough = next((result for result in _by_cost(results) if _is_enough(result, options.first_token)), None)
    write(_answer(enough, results, options, caveat))
    _print(results, where, options.price, has_conversations=has_conversations, is_predicted=bool(caveat))
    if options.plot:
        _plot(arrivals, server, fleets, options.plot)
    return EXIT_NOT_ENOUGH if enough is None else 0


def _check(options: argparse.Namespace) -> None:
    """Check that the options belong together; raise UserError if not."""
    if options.traffic is not None:
        for name in _OF_RATE:
            if getattr(options, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} belongs to --rate; leave it out with --traffic.")
    elif None in (options.prompt_length, options.output_length):
        raise UserError("--rate needs --prompt-length and --output-length.")
    if options.steps is None and options.model is None:
        raise UserError("give --steps FILE, which granite4-neuron measure writes, or --model for a Trainium.")
    if options.steps is not None and options.model is not None:
        raise UserError("--steps names its model; leave --model out.")


def _arrivals(options: argparse.Namespace) -> list[Arrival]:
    from granite4_neuron.planning.simulation.lengths import Lengths
    from granite4_neuron.planning.simulation.traffic import poisson, read_traffic

    if options.traffic is not None:
        return read_traffic(options.traffic)
    prompts, answers = Lengths.parse(options.prompt_length), Lengths.parse(options.output_length)
    sizes = options.num_requests, options.shared_prefix, options.seed
    return poisson(options.rate, prompts, answers, *sizes)


def _server(
    options: argparse.Namespace,
    graph_options: OptionsOf,
    cache_bytes: int,
) -> tuple[Server, str, str]:
    """Return the server, a title that says whose step times it has, and what to know of predicted ones."""
    from granite4_neuron.planning.published_latency import beside
    from granite4_neuron.planning.simulation.server import Server

    if options.steps is not None:
        runtime, where = measured_runtime(options.steps)
    else:
        runtime, where = _predicted(options, graph_options)
    longest = min(options.max_model_len, runtime["max_length"])
    known = "" if options.steps else f"step times are predicted, on no device; {beside(runtime['config'])}"
    return Server(options.max_num_seqs, longest, cache_bytes, options.max_gap / 1000, runtime), where, known


def measured_runtime(file: Path) -> tuple[dict[str, Any], str]:
    """Return the arguments of a `SimulatedRuntime` with the step times of a file, and a title.

    Raises:
        UserError: it is not such a file.
    """
    from granite4_neuron.config import config_from_dict
    from granite4_neuron.planning.simulation.measured_steps import Measured, MeasuredSteps
    from granite4_neuron.runtime.prompt_cuts import from_json

    measured = Measured.load(file)
    config = config_from_dict(measured.config, source=str(file))
    runtime = dict(
        config=config,
        steps=MeasuredSteps(measured),
        dtype=dtype_of(measured.dtype),
        state_dtype=dtype_of(measured.state_dtype),
        tokens_per_step=measured.tokens_per_step,
        rows_per_step=measured.rows_per_step,
        prompt_cuts=from_json(measured.prompt_cuts),
        packs_rows=measured.packs_rows,
        max_length=config.max_position_embeddings,
    )
    made = f"{measured.model} in {measured.dtype}, backend {measured.backend}, measured on {measured.machine}"
    return runtime, f"{made}, {sampling_in_words(measured.sampling)}"


def _predicted(options: argparse.Namespace, graph_options: OptionsOf) -> tuple[dict[str, Any], str]:
    from granite4_neuron.devices.graphs.runtime import cache_buckets
    from granite4_neuron.devices.neuron.compiled_graphs import GraphOptions, default_token_buckets
    from granite4_neuron.planning.plan import check_ranks
    from granite4_neuron.planning.simulation.predicted_steps import PredictedSteps
    from granite4_neuron.runtime.prompt_cuts import Anywhere, Pieces, PromptCuts

    check_ranks(options.instance, options.tp_degree)
    config, stored_dtype = config_and_dtype_on_neuron(options.model, options.backend)
    dtype = dtype_of(options.dtype or stored_dtype)
    graphs = graph_options(config)
    longest = min(options.max_model_len, config.max_position_embeddings)
    slots = max(options.batch_size, options.max_num_seqs)
    cuts: PromptCuts
    if isinstance(graphs, GraphOptions):  # NxD Inference keeps the state in slots, and cuts prompts itself
        caches, tokens, own_slots = list(graphs.token_buckets or default_token_buckets(longest)), longest, slots
        cuts = Anywhere(is_exact=False)
    else:
        caches, tokens, own_slots = cache_buckets(graphs.cache_length(config, longest)), graphs.longest_prompt, 0
        cuts = Pieces(tuple(graphs.context_buckets))
    if caches[-1] < longest:
        raise UserError(f"--token-buckets end at {caches[-1]:,}, and texts have up to {longest:,} tokens.")
    prompt_pieces = functools.partial(graphs.prompt_pieces, seq_len=longest)
    steps = PredictedSteps(
        config,
        options.tp_degree,
        dtype,
        slots=slots,
        prompt_pieces=prompt_pieces,
        cache_buckets=caches,
        chip=INSTANCES[options.instance].chip,
    )
    runtime = dict(
        config=config,
        steps=steps,
        dtype=dtype,
        tokens_per_step=tokens,
        rows_per_step=1,
        prompt_cuts=cuts,
        max_length=longest,
        own_slots=own_slots,
    )
    return runtime, f"{options.model} on {options.tp_degree} cores of {options.instance}, predicted and not measured"


def _ways(replicas: int, has_conversations: bool) -> Sequence[bool]:
    """Return whether to keep conversations on their replica: both, where it makes a difference."""
    return (False, True) if has_conversations and replicas > 1 else (False,)


def _by_cost(results: Sequence[Result]) -> list[Result]:
    """Return them by the number of replicas, with kept conversations first."""
    return sorted(results, key=lambda result: (result.replicas, not result.keeps_conversations))


def _is_enough(result: Result, first_token: float) -> bool:
    return result.first_tokens.percentile(95) <= first_token


def _answer(enough: Result | None, results: Sequence[Result], options: argparse.Namespace, caveat: str) -> str:
    within = f"95 % of first tokens within {options.first_token:g} s"
    known = f" ({caveat})" if caveat else ""
    if enough is None:
        most = max(result.replicas for result in results)
        best = min(result.first_tokens.percentile(95) for result in results)
        are = "is" if most == 1 else "are"
        return f"{_counted(most)} {are} not enough for {within}: the best is {best:.3g} s{known}."
    kept = ", with each conversation on its replica" if enough.keeps_conversations else ""
    price = options.price
    cost = "" if price is None else f"; a million new tokens cost {enough.million_tokens(price):.2f}"
    return (
        f"{_counted(enough.replicas)} {'is' if enough.replicas == 1 else 'are'} enough for {within}{kept}: "
        f"{enough.first_tokens.percentile(95):.3g} s, at {enough.tokens_per_second:,.0f} new tokens a second{cost}"
        f"{known}."
    )


def _counted(replicas: int) -> str:
    return f"{replicas} replica{'' if replicas == 1 else 's'}"


def _print(
    results: Sequence[Result], where: str, price: float | None, *, has_conversations: bool, is_predicted: bool
) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        *("replicas", *(("conversations",) if has_conversations else ()), "tokens/s"),
        *("first token, ms: p50 / p95", "gap, ms: p50 / p95", "found by prefix caches", "waiting: mean / most"),
        *(() if price is None else ("a million tokens",)),
        *(("step times",) if is_predicted else ()),
    )
    table.title = escape(where)
    for result in results:
        table.add_row(
            str(result.replicas),
            *((_way(result),) if has_conversations else ()),
            f"{result.tokens_per_second:,.1f}",
            _percentiles(result.first_tokens),
            _percentiles(result.gaps),
            f"{100 * result.hit_rate:.1f} %",
            f"{result.waiting:.1f} / {result.most_waiting}",
            *(() if price is None else (f"{result.million_tokens(price):.2f}",)),
            *(("predicted",) if is_predicted else ()),
        )
    print_table(table)
    if refused := results[0].refused:
        write(f"{refused:,} requests are refused: their prompts are longer than texts may be (--max-model-len).")


def _way(result: Result) -> str:
    return "" if result.replicas == 1 else "kept" if result.keeps_conversations else "spread"


def _percentiles(seconds: Histogram) -> str:
    return " / ".join(f"{1e3 * seconds.percentile(percent):,.1f}" for percent in (50, 95))


def _plot(arrivals: Sequence[Arrival], server: Server, fleets: Sequence[tuple[int, bool]], file: Path) -> None:
    """Draw the times to the first token and between tokens over the rate of requests."""
    from matplotlib.figure import Figure

    from granite4_neuron.planning.simulation.replicas import simulate
    from granite4_neuron.planning.simulation.traffic import at_rate

    last = arrivals[-1].time - arrivals[0].time
    rate = (len(arrivals) - 1) / last if last else float(len(arrivals))
    by_factor = []
    with ProgressBar("plot", "rates") as progress:
        for factor in _FACTORS:
            by_factor.append(simulate(at_rate(arrivals, factor), server, fleets, os.cpu_count() or 1))
            progress(len(by_factor), len(_FACTORS))
    figure = Figure(figsize=(10, 4), layout="constrained")
    of_first, of_gaps = figure.subplots(1, 2)
    rates = [factor * rate for factor in _FACTORS]
    for axes, name, what in ((of_first, "first_tokens", "first token"), (of_gaps, "gaps", "gap between tokens")):
        for number, (replicas, keeps) in enumerate(fleets):
            label = _counted(replicas) + (", conversations kept" if keeps else "")
            for percent, style in ((50, ":"), (95, "-")):
                times = [1e3 * getattr(results[number], name).percentile(percent) for results in by_factor]
                axes.plot(rates, times, style, color=f"C{number}", label=label if percent == 95 else None)
        axes.set(xlabel="requests per second", ylabel="ms", yscale="log", title=f"{what}: p50 (dotted), p95")
    of_first.legend()
    save_plot(figure, file)
