"""`granite4-neuron plan`: what fits into the memory of a Trainium2 core, and how long a step is predicted to take."""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from granite4_neuron.commands.compiled_options import add_buckets, add_ranks_and_sequences
from granite4_neuron.commands.options import (
    at_least,
    config_and_dtype,
    dtype_of,
    number_in,
)
from granite4_neuron.commands.output import print_table, write
from granite4_neuron.config import family_names
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.errors import UserError
from granite4_neuron.neuron.compiled_graphs import GraphOptions, default_context_buckets
from granite4_neuron.neuron_sdk import INSTANCES, KERNELS

if TYPE_CHECKING:
    from granite4_neuron.config import GraniteMoeHybridConfig
    from granite4_neuron.neuron.analysis import plan

EXIT_DOES_NOT_FIT = 1
_LATENCY_DEFAULTS: dict[str, Any] = {"prompt": 128, "drafted": 3, "acceptance": 0.7}
_LATENCY_CONTEXT = 2048
_MOST_DRAFTED = 1024


def add_parser(commands: argparse._SubParsersAction) -> None:
    planner = commands.add_parser(
        "plan",
        help="what fits into the memory of a Trainium2 core, and how fast it would be",
        description="Add up what each core of an instance holds of a model: weights, state, cache and logits, and "
        "estimates of what a step of prefill and each compiled graph need besides. Without --model: a line for each "
        "member of the family. With --latency: how long steps are predicted to take, which is no measurement.",
    )
    planner.add_argument(
        "--model", help=f"a checkpoint folder, a Hugging Face id, or one of {', '.join(family_names())}"
    )
    planner.add_argument("--instance", choices=INSTANCES, default="trn2.3xlarge", help="default: %(default)s")
    planner.add_argument("--dtype", choices=DTYPES, help="dtype of all tensors (default: the weights')")
    add_ranks_and_sequences(planner, tp_degree=4)
    planner.add_argument(
        "--context",
        type=at_least(1),
        metavar="N",
        help=f"tokens of a sequence (default: the model's longest, or {_LATENCY_CONTEXT} with --latency)",
    )
    planner.add_argument(
        "--max-context-length",
        type=at_least(2),
        default=GraphOptions.max_context_length,
        metavar="N",
        help="tokens of the largest graph for prompts, as for compile (default: %(default)s)",
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
    planner.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.latency:
        return _plan_latency(options)
    given = {name: getattr(options, name) is not None for name in _LATENCY_DEFAULTS}
    for name, is_given in {**given, "count_graphs": options.count_graphs}.items():
        if is_given:
            raise UserError(f"--{name.replace('_', '-')} belongs to --latency; give that too, or leave it out.")
    if options.draft_model is not None and not (options.model and options.verify):
        raise UserError("--draft-model needs --model, and --verify: the number of tokens to verify.")
    return _plan_family(options) if options.model is None else _plan_model(options)


def _plan_latency(options: argparse.Namespace) -> int:
    """Print how long steps of a model are predicted to take."""
    from rich.markup import escape
    from rich.table import Table

    from granite4_neuron.neuron.analysis import latency, plan, published_latency

    if options.model is None:
        raise UserError("--latency needs --model: say which model.")
    for name in ("verify", "draft_model", "token_buckets"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} is about memory; leave it out with --latency.")
    config, stored_dtype = config_and_dtype(options.model)
    dtype = dtype_of(options.dtype or stored_dtype)
    plan.check_ranks(options.instance, options.tp_degree)
    batch_sizes = sorted({1, 4, 8, options.batch_size})
    prompt, drafted, acceptance = (
        default if getattr(options, name) is None else getattr(options, name)
        for name, default in _LATENCY_DEFAULTS.items()
    )
    context = _LATENCY_CONTEXT if options.context is None else options.context
    buckets = _ascending(options.context_buckets) or default_context_buckets(options.max_context_length)
    model = (config, options.tp_degree, dtype)
    lines = latency.predictions(*model, prompt, context, batch_sizes, drafted, acceptance, buckets)
    if options.count_graphs:
        lines = latency.with_counted_graphs(lines, *model, prompt, context, drafted, buckets)
    table = Table(
        "step", "batch", "bound, ms", "as counted, ms", "predicted, ms", "per token, ms", "tokens/s", "most of it"
    )
    table.title = (
        f"{escape(options.model)} on {options.tp_degree} cores of {options.instance}, {context:,} tokens of context"
    )
    for line in lines:
        table.add_row(
            line.step,
            str(line.batch_size),
            f"{line.latency.bound * 1e3:.2f}",
            "" if line.counted is None else f"{line.counted * 1e3:.2f}",
            f"{line.latency.predicted * 1e3:.2f}",
            f"{line.seconds_per_token * 1e3:.2f}",
            f"{line.tokens_per_second:,.0f}",
            line.latency.limit,
        )
    print_table(table)
    write(
        "Predicted, not measured. The bound is what the busiest of HBM, TensorE, VectorE and links takes; the "
        f"prediction adds {latency.COLLECTIVE_SECONDS * 1e6:.0f} us for each collective, and for each layer "
        f"{latency.LAUNCH_SECONDS * 1e6:.0f} us, as published figures of other models imply."
    )
    names = {"times per token": published_latency.TOKENS, "times to the first token": published_latency.FIRST_TOKENS}
    distances = (
        f"{least:.2f} to {most:.2f} of {len(figures)} {name}"
        for name, figures in names.items()
        for least, most in [published_latency.ratios(figures)]
    )
    write(
        f"Where times are published, predictions made in the same way are {' and '.join(distances)}; "
        "benchmarks/predicted_latency.py lists them."
    )
    return 0


def _plan_model(options: argparse.Namespace) -> int:
    """Print the parts of one model's sum, and what would fit."""
    # Not at the top: these imports take seconds, and --help does not need them.
    from rich.markup import escape
    from rich.table import Table

    from granite4_neuron.neuron.analysis import graph_memory, plan

    planned = _planned(options.model, options)
    batch_size, context = planned.batch_size, planned.context
    table = Table("per logical core", f"GB, of {plan.CORE_BYTES / 1e9:.0f}", "of that")
    table.title = f"{escape(options.model)} on {options.instance}, {planned.tp_degree} ranks"
    table.add_row("weights", _gigabytes(planned.weights))
    table.add_row(f"Mamba state of {batch_size}", _gigabytes(batch_size * planned.state))
    table.add_row(f"KV cache of {batch_size} x {context:,} tokens", _gigabytes(batch_size * context * planned.token))
    table.add_row("logits", _gigabytes(batch_size * planned.logits))
    table.add_row("attention scores of a continued prompt", _gigabytes(context * planned.scores))
    alone = _of_step(planned.temporaries, batch_size, "torch_xla and jax")
    with_kernels = _of_step(_temporaries_with_kernels(planned), batch_size, "NxD Inference")
    table.add_row("other temporaries of a step", alone, f"with --kernels nki {with_kernels}")
    if planned.draft is not None:
        table.add_row(f"{escape(options.draft_model)}, with its graphs", _gigabytes(planned.draft.resident))
    table.add_section()
    table.add_row("microcode, at most", _gigabytes(graph_memory.MICROCODE_BYTES))
    for memory in planned.graphs:
        name = f"graph, estimated: {memory.graph.kind} {memory.graph.bucket:,}"
        parts = {"code": memory.code, "DMA rings": memory.dma_rings, "collectives": memory.collectives}
        listed = ", ".join(f"{part} {_gigabytes(count)}" for part, count in parts.items())
        table.add_row(name, _gigabytes(memory.total), listed)
    table.add_section()
    table.add_row("sum", _gigabytes(planned.total))
    table.add_row("longest context at this batch size", f"{planned.longest_context:,} tokens")
    table.add_row("largest batch of this context", f"{planned.largest_batch:,}")
    write(planned.verdict())
    print_table(table)
    write(f"To compile: {_counted(planned)}.")
    if planned.draft is not None:
        write(f"Also those of {options.draft_model}: {_counted(planned.draft)}.")
    return 0 if planned.fits else EXIT_DOES_NOT_FIT


def _temporaries_with_kernels(planned: plan.Plan) -> plan.Temporaries | None:
    """Count the temporaries of NxD Inference's graphs with the NKI kernels; None where it is not."""
    from granite4_neuron.neuron.analysis.plan import find_temporaries
    from granite4_neuron.neuron.stand_ins import why_not_importable

    if why_not_importable():
        return None
    from granite4_neuron.neuron.nxdi.graph_costs import report

    with_kernels = partial(report, kernels=KERNELS["nki"])
    return find_temporaries(planned.config, planned.tp_degree, planned.context, with_kernels)


def _of_step(temporaries: plan.Temporaries | None, batch_size: int, needed: str) -> str:
    return f"unknown without {needed}" if temporaries is None else _gigabytes(temporaries.of(batch_size))


def _counted(planned: plan.Plan) -> str:
    """Return "3 graphs: 1 context, 1 continuation, 1 token"."""
    kinds = Counter(memory.graph.kind for memory in planned.graphs)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{len(planned.graphs)} graphs: {listed}"


def _plan_family(options: argparse.Namespace) -> int:
    """Print a line for each member: what fits at its whole context, or at the requested one."""
    from rich.table import Table

    table = Table("model", "weights", "context", "state and cache of a sequence", "graphs", "sum", "", "largest batch")
    table.title = f"{options.instance}, {options.tp_degree} ranks, batch {options.batch_size}: GB per logical core"
    refusals = []
    for name in family_names():
        try:
            planned = _planned(name, options)
        except UserError as error:
            refusals.append(f"{name}: {error}")
            continue
        sequence = planned.state + planned.context * planned.token
        table.add_row(
            name.removeprefix("granite-4.0-"),
            _gigabytes(planned.weights),
            f"{planned.context:,}",
            _gigabytes(sequence),
            str(len(planned.graphs)),
            _gigabytes(planned.total),
            _fit(planned),
            f"{planned.largest_batch:,}",
        )
    if not table.rows:
        raise UserError(refusals[0].partition(": ")[2])
    print_table(table)
    write("\n".join(refusals), end="\n" if refusals else "")
    return 0


def _fit(planned: plan.Plan) -> str:
    if planned.fits:
        return "fits"
    return "fits with fewer graphs" if planned.with_fewest_graphs.fits else "does not fit"


def _planned(name: str, options: argparse.Namespace) -> plan.Plan:
    """Plan a model by its name, and the draft model beside it if there is one."""
    from granite4_neuron.neuron.analysis import plan

    names = [name] if options.draft_model is None else [name, options.draft_model]
    models = [config_and_dtype(each) for each in names]
    longest = min(config.max_position_embeddings for config, _ in models)
    context = longest if options.context is None else options.context
    buckets = (_ascending(options.context_buckets), _ascending(options.token_buckets))
    graphs = GraphOptions(options.max_context_length, options.verify, *buckets)
    sizes = (options.instance, options.tp_degree, options.batch_size, context)

    def plan_one(config: GraniteMoeHybridConfig, stored_dtype: str, draft: plan.Plan | None = None) -> plan.Plan:
        return plan.plan(config, dtype_of(options.dtype or stored_dtype), *sizes, graphs, draft=draft)

    model, *drafts = models
    return plan_one(*model, *(plan_one(*draft) for draft in drafts))


def _ascending(buckets: list[int] | None) -> list[int] | None:
    return None if buckets is None else sorted(set(buckets))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f}"
