"""`granite4-neuron plan`: what fits into the memory of a Neuron core, how long a step is predicted to take, and how
many replicas some traffic needs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from granite4_neuron.commands.compiled_options import (
    add_buckets,
    add_ranks_and_sequences,
    config_and_dtype_on_neuron,
)
from granite4_neuron.commands.options import (
    at_least,
    checkpoint_unless_published,
    config_and_dtype_in,
    dtype_of,
    number_in,
)
from granite4_neuron.commands.output import print_table, size, write
from granite4_neuron.commands.plan_traffic import add_traffic, check_no_traffic, plan_traffic
from granite4_neuron.commands.plot import add_plot, check_plot, save_plot
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.config.published import published_names, short_name
from granite4_neuron.devices.neuron.compiled_graphs import GraphOptions, is_compiled
from granite4_neuron.devices.neuron.sdk import INSTANCES
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.config import ModelConfig
    from granite4_neuron.planning import latency, plan, published_latency
    from granite4_neuron.planning.analysis.device_graphs import DeviceGraphOptions
    from granite4_neuron.planning.analysis.graph_memory import GraphMemory

EXIT_DOES_NOT_FIT, EXIT_OPEN = 1, 3
# None while options are checked, so that --gpu-memory refuses what is given.
_CORE_DEFAULTS: dict[str, Any] = {"instance": "trn2.3xlarge", "tp_degree": 4}
_LATENCY_DEFAULTS: dict[str, Any] = {"prompt": 128, "drafted": 3, "acceptance": 0.7}
_LATENCY_CONTEXT = 2048
_MOST_DRAFTED = 1024


def add_parser(commands: argparse._SubParsersAction) -> None:
    planner = commands.add_parser(
        "plan",
        help="what fits into the memory of a Neuron core, and how fast it would be",
        description="Add up the memory that a model needs on each core of an instance: weights, state, cache and "
        "logits, and estimates, with upper bounds, of what a step and each compiled graph need besides. The exit "
        "status is 0 if all of it fits, 1 if it does not, and 3 if that is open. Without --model: a line for each "
        "published model. With --latency: predicted times of steps, which are no measurements. With --traffic or "
        "--rate: the number of replicas that some traffic needs.",
    )
    planner.add_argument(
        "--model", help=f"a checkpoint folder, a Hugging Face id, or one of {', '.join(published_names())}"
    )
    planner.add_argument(
        "--backend",
        choices=("torch", "nxdi"),
        default="torch",
        help="plan the graphs of PyTorch's device neuron (torch, Neuron SDK 2.33) with --graphs model, whose "
        "--prefill-buckets are --context-buckets here, or those that compile makes for NxD Inference (nxdi, SDK up to "
        "2.31; default: %(default)s)",
    )
    planner.add_argument("--instance", choices=INSTANCES, help=f"default: {_CORE_DEFAULTS['instance']}")
    planner.add_argument("--dtype", choices=DTYPES, help="dtype of all tensors (default: the weights')")
    planner.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="memory: count the weights in this format. No backend for Neuron computes with such weights yet",
    )
    planner.add_argument(
        "--gpu-memory",
        type=number_in(1, 10_000),
        metavar="GIB",
        help="plan one GPU with this memory in GiB instead (--backend torch --device cuda); needs --model",
    )
    add_ranks_and_sequences(planner, tp_degree=_CORE_DEFAULTS["tp_degree"])
    planner.add_argument(
        "--context",
        type=at_least(1),
        metavar="N",
        help=f"tokens of a sequence (default: the model's longest, or {_LATENCY_CONTEXT} with --latency)",
    )
    planner.add_argument(
        "--max-context-length",
        type=at_least(2),
        metavar="N",
        help=f"tokens of the largest graph for prompts, as for compile (default: {GraphOptions.max_context_length})",
    )
    add_buckets(planner)
    planner.add_argument(
        "--verify", type=at_least(2), default=0, metavar="T", help="also graphs that verify T tokens, as for compile"
    )
    planner.add_argument(
        "--draft-model", metavar="NAME", help="with --model and --verify: also a draft model, as for compile"
    )
    planner.add_argument("--latency", action="store_true", help="predict times instead; needs --model")
    planner.add_argument(
        "--prompt",
        type=at_least(1),
        metavar="N",
        help=f"--latency: tokens of a prompt (default: {_LATENCY_DEFAULTS['prompt']})",
    )
    planner.add_argument(
        "--drafted",
        type=at_least(0, _MOST_DRAFTED),
        metavar="K",
        help=f"--latency: tokens drafted ahead (default: {_LATENCY_DEFAULTS['drafted']})",
    )
    planner.add_argument(
        "--acceptance",
        type=number_in(0, 1),
        metavar="P",
        help="--latency: the probability that a drafted token is accepted "
        f"(default: {_LATENCY_DEFAULTS['acceptance']})",
    )
    planner.add_argument(
        "--count-graphs",
        action="store_true",
        help="--latency: also what XLA counts in this package's graphs, which takes minutes and needs torch_xla",
    )
    add_plot(planner, "what --latency predicts, or the latencies of --traffic and --rate over the rate of requests,")
    add_traffic(planner)
    planner.set_defaults(run=run, tp_degree=None)


def run(options: argparse.Namespace) -> int:
    has_traffic = options.traffic is not None or options.rate is not None
    _check_questions(options, has_traffic)
    if options.gpu_memory is not None:
        return _plan_gpu(options)
    for name, default in _CORE_DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.latency:
        return _plan_latency(options)
    if has_traffic:
        return plan_traffic(options, lambda config: _graph_options(options, config))
    if options.draft_model is not None and not (options.model and options.verify):
        raise UserError("--draft-model needs --model, and --verify: the number of tokens to verify.")
    return _plan_all(options) if options.model is None else _plan_model(options)


def _check_questions(options: argparse.Namespace, has_traffic: bool) -> None:
    """Check that at most one of memory, latency and traffic is asked for, with its own options."""
    if not has_traffic:
        check_no_traffic(options)
    if options.plot is not None and not (options.latency or has_traffic):
        raise UserError("--plot belongs to --latency, --traffic or --rate; give one of these, or leave it out.")
    if options.latency:
        if has_traffic:
            raise UserError("--latency and --traffic or --rate cannot be combined.")
        return
    of_latency = [name for name in _LATENCY_DEFAULTS if getattr(options, name) is not None]
    of_latency += ["count_graphs"] if options.count_graphs else []
    _refuse(of_latency, "belongs to --latency; give that too, or leave it out.")
    if has_traffic:
        of_memory = [name for name in ("verify", "draft_model", "context", "quantize") if getattr(options, name)]
        _refuse(of_memory, "is about memory; leave it out with --traffic and --rate.")


def _refuse(names: Sequence[str], why: str) -> None:
    if names:
        raise UserError(f"--{names[0].replace('_', '-')} {why}")


def _plan_gpu(options: argparse.Namespace) -> int:
    """Print what a model needs of a GPU's memory."""
    from rich.markup import escape
    from rich.table import Table

    from granite4_neuron.planning.gpu import LIBRARIES, gpu_plan

    if options.model is None:
        raise UserError("--gpu-memory needs --model: say which model.")
    if options.latency or options.traffic is not None or options.rate is not None:
        raise UserError("--gpu-memory is about memory; leave out --latency, --traffic and --rate.")
    of_cores = ["backend"] if options.backend != "torch" else []
    others = (*_CORE_DEFAULTS, "max_context_length", "context_buckets", "token_buckets", "verify", "draft_model")
    of_cores += [name for name in others if getattr(options, name)]
    _refuse(of_cores, "is for plans of Neuron cores; leave it out with --gpu-memory.")
    checkpoint = checkpoint_unless_published(options.model)
    config, stored_dtype = config_and_dtype_in(checkpoint, options.model)
    context = config.max_position_embeddings if options.context is None else options.context
    dtype = dtype_of(options.dtype or stored_dtype)
    stored = checkpoint if checkpoint is not None and checkpoint.has_weights else None
    planned = gpu_plan(config, dtype, options.quantize, options.batch_size, context, stored)
    table = Table("on the GPU", "GiB")
    in_format = "" if planned.format is None else f" in {planned.format}"
    table.title = f"{escape(options.model)}{in_format}"
    table.add_row("weights", _gibibytes(planned.weights))
    table.add_row(f"Mamba state of {options.batch_size}", _gibibytes(planned.states))
    table.add_row(f"KV cache of {options.batch_size} x {context:,} tokens", _gibibytes(planned.cache))
    table.add_row(f"choices of tokens for {options.batch_size}", _gibibytes(planned.choices))
    table.add_row("graphs of prompts, estimated", _gibibytes(planned.steps))
    table.add_row("libraries and kernels, estimated", _gibibytes(LIBRARIES))
    fits = planned.total <= options.gpu_memory * 2**30
    write(
        f"It {'fits' if fits else 'does not fit'}: by estimate it needs {_gibibytes(planned.total)} of "
        f"{options.gpu_memory:g} GiB."
    )
    print_table(table)
    return 0 if fits else EXIT_DOES_NOT_FIT


def _plan_latency(options: argparse.Namespace) -> int:
    """Predict how long steps of a model take, and print it."""
    from granite4_neuron.planning import latency, plan
    from granite4_neuron.planning.analysis.live_set import live_set

    if options.model is None:
        raise UserError("--latency needs --model: say which model.")
    check_plot(options.plot)
    of_memory = [name for name in ("verify", "draft_model", "token_buckets", "quantize") if getattr(options, name)]
    _refuse(of_memory, "is about memory; leave it out with --latency.")
    config, stored_dtype = config_and_dtype_on_neuron(options.model, options.backend)
    dtype = dtype_of(options.dtype or stored_dtype)
    plan.check_ranks(options.instance, options.tp_degree)
    batch_sizes = sorted({1, 4, 8, options.batch_size})
    prompt, drafted, acceptance = (
        default if getattr(options, name) is None else getattr(options, name)
        for name, default in _LATENCY_DEFAULTS.items()
    )
    context = _LATENCY_CONTEXT if options.context is None else options.context
    graphs = _graph_options(options, config)
    pieces = graphs.prompt_pieces(0, prompt, max(prompt, graphs.longest_prompt))
    model = (config, options.tp_degree, dtype)
    chip = INSTANCES[options.instance].chip
    lines = latency.predictions(*model, prompt, context, batch_sizes, drafted, acceptance, pieces=pieces, chip=chip)
    if options.count_graphs:
        lines = latency.with_counted_graphs(lines, *model, prompt, context, drafted, pieces=pieces, chip=chip)
    title = f"{options.model} on {options.tp_degree} cores of {options.instance}, {context:,} tokens of context"
    spills = {tokens: live_set(*model, tokens, chip).spill() for tokens in sorted(set(pieces))}
    _write_latency(lines, config, title, spills)
    if options.plot:
        _plot_latency(lines, title, options.plot)
    return 0


def _write_latency(
    lines: Sequence[latency.Prediction], config: ModelConfig, title: str, spills: Mapping[int, str | None]
) -> None:
    """Print what is published, then predictions, first that of a prompt's first token, and how they are made.

    Args:
        spills: a sentence on what spills in each graph for prompts, by its tokens; None if nothing does.
    """
    from rich.markup import escape
    from rich.table import Table

    from granite4_neuron.planning import latency, published_latency

    of_first = published_latency.held(config, published_latency.FIRST_TOKENS)
    of_tokens = published_latency.held(config, published_latency.TOKENS)
    as_counted = ["as counted, ms"] if any(line.counted is not None for line in lines) else []
    table = Table("step", "batch", "bound, ms", *as_counted, "predicted, ms", "range, ms", "per token, ms", "tokens/s")
    table.add_column("most of it")
    table.title = escape(title)
    first, *later = lines
    for line in lines:
        held = of_first if line is first else of_tokens
        table.add_row(
            line.step,
            str(line.batch_size),
            f"{line.latency.bound * 1e3:.2f}",
            *(["" if line.counted is None else f"{line.counted * 1e3:.2f}"] if as_counted else []),
            f"{line.latency.predicted * 1e3:.2f}",
            held.of(line.latency.predicted) if line.batch_size == line.tokens == 1 else "",
            f"{line.seconds_per_token * 1e3:.2f}",
            f"{line.tokens_per_second:,.0f}",
            line.latency.limit,
        )
    write(_published(published_latency.of_model(config)))
    alone = [line for line in later if line.batch_size == line.tokens == 1]
    token = next((line for line in alone if "(default)" in line.step), alone[0])
    _, _, form = token.step.partition(", ")
    in_form = f" ({form})" if form else ""
    write(
        f"Predicted, not measured: a token of one sequence every {token.latency.predicted * 1e3:.1f} ms"
        f"{in_form}, {of_tokens.of(token.latency.predicted)} by the range that has held; the first token after "
        f"{first.latency.predicted * 1e3:.0f} ms, {of_first.of(first.latency.predicted)} by that range."
    )
    print_table(table)
    write(
        f"The range: for one sequence, {published_latency.beside(config)}. "
        "python -m benchmarks.planning.predicted_latency lists each figure with its source and date."
    )
    write(
        "The bound is what the busiest of HBM, TensorE, VectorE and links takes; the "
        f"prediction adds {latency.COLLECTIVE_SECONDS * 1e6:.0f} us for each collective, and for each layer "
        f"{latency.LAUNCH_SECONDS * 1e6:.0f} us, as published figures of other models imply."
    )
    for tokens, spill in spills.items():
        if spill:
            write(f"A graph for {tokens:,} tokens of a prompt: {spill} That is in the bound.")


def _published(figures: Sequence[published_latency.Published]) -> str:
    """Return a sentence with the published figures of a model."""
    if not figures:
        return "Published: nothing for this model on a Trainium."
    by_port: dict[str, list[str]] = {}
    for figure in figures:
        form = figure.name.partition(", ")[2]
        what = "a token" if figure.tokens == 1 else f"the first token of a prompt of {figure.tokens:,}"
        port = f"on {figure.tp_degree} cores{f', {form}' if form else ''} ({figure.source})"
        by_port.setdefault(port, []).append(f"{what} in {figure.milliseconds:g} ms")
    listed = "; ".join(f"{', '.join(times)} {port}" for port, times in by_port.items())
    return f"Published, of other ports: {listed}."


def _plot_latency(lines: Sequence[latency.Prediction], title: str, file: Path) -> None:
    """Draw the predicted time of each step beside its lower bound, and the tokens a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1 + 0.4 * len(lines)), layout="constrained")
    of_steps, of_tokens = figure.subplots(1, 2, sharey=True)
    names = [f"{line.step}, batch {line.batch_size}" for line in lines]
    of_steps.barh(names, [1e3 * line.latency.predicted for line in lines], color="C1", label="predicted")
    of_steps.barh(names, [1e3 * line.latency.bound for line in lines], color="C0", label="bound")
    of_steps.set(xlabel="ms of a step", xscale="log")
    of_steps.invert_yaxis()
    of_steps.legend()
    of_tokens.barh(names, [line.tokens_per_second for line in lines])
    of_tokens.set(xlabel="tokens/s, predicted", xscale="log")
    figure.suptitle(f"{title}; predicted, not measured", fontsize="small")
    save_plot(figure, file)


def _plan_model(options: argparse.Namespace) -> int:
    """Print the parts of one model's sum, and what would fit."""
    # Not at the top: these imports take seconds, and --help does not need them.
    from rich.markup import escape
    from rich.table import Table

    from granite4_neuron.planning import plan
    from granite4_neuron.planning.analysis import graph_memory

    planned = _planned(options.model, options)
    batch_size = planned.batch_size
    table = Table("per logical core", f"GiB, of {_gibibytes(planned.core_bytes)}", "at most", "")
    ranks = f"{planned.tp_degree} ranks, --backend {options.backend}"
    table.title = f"{escape(options.model)} on {options.instance}, {ranks}"

    def add(name: str, count: int, at_most: float = 1, remark: str = "") -> None:
        table.add_row(name, _gibibytes(count), _gibibytes(round(count * at_most)), remark)

    in_format = "" if planned.quantize is None else f"in {planned.quantize}, which no backend for Neuron runs yet"
    add("weights", planned.weights, remark=in_format)
    add(f"Mamba state of {batch_size}", batch_size * planned.state)
    null_slot = "with a null slot, for padding" if planned.options.null_slots else ""
    add(f"KV cache of {batch_size} x {planned.cache_length:,} tokens", planned.cache, remark=null_slot)
    add("logits", batch_size * planned.logits)
    if planned.draft is not None:
        add(f"{escape(options.draft_model)}, its weights and sequences", planned.draft.tensors)
    table.add_section()
    add("temporaries of a step", planned.temporaries, plan.TEMPORARIES_AT_MOST, "estimated")
    add("microcode", graph_memory.MICROCODE_BYTES)
    for name, graphs in _like_graphs(planned).items():
        count = sum(graph.total for graph in graphs)
        one = graphs[0]
        parts = {"code": one.code, "DMA rings": one.dma_rings, "collectives": one.collectives}
        listed = ", ".join(f"{part} {_gibibytes(each)}" for part, each in parts.items())
        add(name, count, graph_memory.GRAPHS_AT_MOST, f"each: {listed}")
    if planned.draft is not None:
        count = sum(graph.total for graph in planned.draft.graphs)
        name = f"{_counted_graphs(len(planned.draft.graphs))} of {escape(options.draft_model)}"
        add(name, count, graph_memory.GRAPHS_AT_MOST)
    table.add_section()
    table.add_row("sum", _gibibytes(planned.total), _gibibytes(planned.at_most), "")
    table.add_row("longest context at this batch size", f"{planned.longest_context:,} tokens", "", "")
    table.add_row("largest batch of this context", f"{planned.largest_batch:,}", "", "")
    if (split := planned.fewest_ranks) is not None:
        table.add_row("fewest ranks", f"{split.tp_degree}, on {split.chips_in_words}", "", "")
    write(planned.verdict())
    print_table(table)
    _write_live_sets(planned)
    write(f"To compile: {_counted(planned)}.")
    if planned.draft is not None:
        write(f"Also those of {options.draft_model}: {_counted(planned.draft)}.")
    return {plan.FITS: 0, plan.OPEN: EXIT_OPEN, plan.DOES_NOT_FIT: EXIT_DOES_NOT_FIT}[planned.outcome]


def _write_live_sets(planned: plan.Plan) -> None:
    """Print the live set of each graph for prompts, and what spills."""
    from granite4_neuron.planning.analysis.live_set import live_set, sbuf_bytes

    lengths = planned.prompt_lengths
    lives = {
        tokens: live_set(planned.config, planned.tp_degree, planned.dtype, tokens, planned.chip) for tokens in lengths
    }
    listed = ", ".join(f"{size(live.live)} for {tokens:,}" for tokens, live in lives.items())
    capacity = size(sbuf_bytes(planned.chip))
    write(f"Live set of the graphs for prompts, of {capacity} of SBUF, by estimate: {listed} tokens.")
    for tokens, live in lives.items():
        if spill := live.spill():
            write(f"Prompts of {tokens:,}: {spill}")


def _like_graphs(planned: plan.Plan) -> dict[str, list[GraphMemory]]:
    """Return graphs that differ in their bucket only, and so have the same memory, by a name for them."""
    alike: dict[tuple[str, int | None], list[GraphMemory]] = {}
    for memory in planned.graphs:
        alike.setdefault((memory.graph.name, memory.graph.tokens), []).append(memory)
    named = {}
    for (name, tokens), graphs in alike.items():
        of_tokens = "" if tokens is None else f" of {tokens:,}"
        buckets = ", ".join(f"{each.graph.bucket:,}" for each in graphs)
        named[f"{_counted_graphs(len(graphs), name)}{of_tokens}: {buckets}"] = graphs
    return named


def _counted(planned: plan.Plan) -> str:
    """Return "3 graphs: 1 context, 1 continuation, 1 token"."""
    kinds = Counter(memory.graph.name for memory in planned.graphs)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{_counted_graphs(len(planned.graphs))}: {listed}"


def _counted_graphs(count: int, kind: str = "") -> str:
    return f"{count} {kind}{' ' if kind else ''}graph{'' if count == 1 else 's'}"


def _plan_all(options: argparse.Namespace) -> int:
    """Print a line for each published model: what fits at its whole context, or at the requested one."""
    from rich.table import Table

    from granite4_neuron.planning import plan

    table = Table("model", "weights", "context", "state and cache", "sum", "at most", "", "largest batch")
    batch = f"{options.tp_degree} ranks, --backend {options.backend}, batch {options.batch_size}"
    room = _gibibytes(INSTANCES[options.instance].chip.core_bytes)
    table.title = f"{options.instance}, {batch}: GiB of a logical core's {room}"
    refusals, outcomes = [], {}
    for name in published_names():
        try:
            planned = _planned(name, options)
        except UserError as error:
            refusals.append(f"{name}: {error}")
            continue
        short = short_name(name)
        fit = _fit(planned)
        does_not_fit = fit == plan.DOES_NOT_FIT
        outcomes[short] = f"{fit}; over more ranks {planned.where_it_fits()}" if does_not_fit else fit
        table.add_row(
            short,
            _gibibytes(planned.weights),
            f"{planned.context:,}",
            _gibibytes(planned.batch_size * planned.state + planned.cache),
            _gibibytes(planned.total),
            _gibibytes(planned.at_most),
            fit,
            f"{planned.largest_batch:,}",
        )
    if not table.rows:
        raise UserError(refusals[0].partition(": ")[2])
    write(_fitting(outcomes))
    print_table(table)
    write("\n".join(refusals), end="\n" if refusals else "")
    return 0


def _fitting(outcomes: Mapping[str, str]) -> str:
    """Return a sentence on which models fit, and one on each that may not."""
    from granite4_neuron.planning.plan import FITS

    others = {name: outcome for name, outcome in outcomes.items() if outcome != FITS}
    fitting = f"{len(outcomes) - len(others)} of {len(outcomes)} models fit a core's memory."
    return " ".join([fitting, *(f"{name}: {outcome}." for name, outcome in others.items())])


def _fit(planned: plan.Plan) -> str:
    from granite4_neuron.planning.plan import FITS

    if planned.outcome == FITS or planned.with_fewest_graphs.outcome != FITS:
        return planned.outcome
    return f"{planned.outcome}; fits with fewer graphs"


def _planned(name: str, options: argparse.Namespace) -> plan.Plan:
    """Plan a model by its name, and the draft model beside it if there is one."""
    from granite4_neuron.planning import plan

    names = [name] if options.draft_model is None else [name, options.draft_model]
    models = [config_and_dtype_on_neuron(each, options.backend) for each in names]
    longest = min(config.max_position_embeddings for config, _ in models)
    context = longest if options.context is None else options.context
    graphs = _graph_options(options, *(config for config, _ in models))
    sizes = (options.instance, options.tp_degree, options.batch_size, context)

    def plan_one(config: ModelConfig, stored_dtype: str, draft: plan.Plan | None = None) -> plan.Plan:
        planned = plan.plan(config, dtype_of(options.dtype or stored_dtype), *sizes, graphs, draft=draft)
        return planned if options.quantize is None else planned.quantized(options.quantize)

    model, *drafts = models
    return plan_one(*model, *(plan_one(*draft) for draft in drafts))


def _graph_options(options: argparse.Namespace, *configs: ModelConfig) -> GraphOptions | DeviceGraphOptions:
    """Return those of --backend for these models."""
    prompts, cache = _ascending(options.context_buckets), _ascending(options.token_buckets)
    if options.backend == "nxdi":
        refused = [config.architecture for config in configs if not is_compiled(config)]
        if refused:
            raise UserError(f"compile does not take {refused[0]}; --backend torch plans it.")
        longest = options.max_context_length or GraphOptions.max_context_length
        return GraphOptions(longest, options.verify, prompts, cache)
    from granite4_neuron.planning.analysis.device_graphs import DeviceGraphOptions

    for name in ("max_context_length", "token_buckets", "draft_model"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} belongs to --backend nxdi; give that too, or leave it out.")
    return DeviceGraphOptions(prompts or DeviceGraphOptions.context_buckets, options.verify)


def _ascending(buckets: list[int] | None) -> list[int] | None:
    return None if buckets is None else sorted(set(buckets))


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f}"
