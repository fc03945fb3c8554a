"""The `granite4-neuron` command."""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from granite4_neuron import accuracy, checkpoint, graphs, neuron_sdk, plan
from granite4_neuron.config import DTYPES, MAMBA, GraniteMoeHybridConfig, family_names
from granite4_neuron.errors import UserError
from granite4_neuron.generation import GenerationStats, bundled_checkpoint, chat_prompt, load, stream_generate
from granite4_neuron.generation.loading import BACKENDS
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.ops import DECODE_KERNELS, PREFILL_SCANS, QUANTIZATIONS
from granite4_neuron.ops.cpu import CPU_KERNELS
from granite4_neuron.ops.launch_parameters import FOLDER_VARIABLE
from granite4_neuron.state import sequence_bytes, token_bytes

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_EXAMPLES = """\
examples:
  granite4-neuron generate "An assignment statement"
  granite4-neuron generate --model ibm-granite/granite-4.0-h-350m --chat "What is a monad?" --temperature 0.7 --seed 1
  granite4-neuron generate --model ./checkpoint --file report.txt --max-tokens 500 --verbose
  granite4-neuron info --model granite-4.0-h-small
  granite4-neuron check --model ./checkpoint --dtype bfloat16
  granite4-neuron graphs --model granite-4.0-h-small --tp-degree 4
  granite4-neuron plan --model granite-4.0-h-small --instance trn2.3xlarge --tp-degree 4
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show every character
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"granite4-neuron: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_output()
        print(f"granite4-neuron: the output cannot be written ({error.strerror}).", file=sys.stderr)
        return EXIT_BAD_INPUT


def _drop_output() -> None:
    """Keep the interpreter from complaining again when it flushes what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_folder_of(file: Path | None) -> None:
    """See, before any work, whether there is a folder to write `file` to.

    Raises:
        UserError: there is not.
    """
    if file and not file.absolute().parent.is_dir():
        raise UserError(f"{file} cannot be written: there is no such folder.")


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _generate(options: argparse.Namespace) -> int:
    texts = _prompt_texts(options)
    model, tokenizer = load(
        _model_or_bundled(options),
        _dtype(options),
        options.prefill_scan,
        options.backend,
        options.decode_kernel,
        options.cpu_kernels,
        options.compiled,
        quantize=options.quantize,
        tuned_configs=options.tuned_configs,
    )
    prompts = [chat_prompt(tokenizer, text, options.system) for text in texts] if options.chat else texts
    continuations = [""] * len(texts)
    stats = GenerationStats()
    with _PromptBar() as progress:
        for response in stream_generate(
            model,
            tokenizer,
            prompts,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            stop=options.stop,
            ignore_eos=options.ignore_eos,
            progress=progress,
        ):
            stats = response.stats
            continuations[response.index] += response.text
            if len(texts) == 1:
                print(response.text, end="", flush=True)
    if len(texts) == 1:
        print()
    else:
        for text, continuation in zip(texts, continuations, strict=True):
            print(f"=== {text}\n{continuation}\n")
    if options.verbose:
        _print_stats(stats)
    return 0


def _info(options: argparse.Namespace) -> int:
    name = str(_model_or_bundled(options))
    config, dtype = _config_and_dtype(name)
    with torch.device("meta"):
        model = GraniteMoeHybridForCausalLM(config)
    table = Table("", escape(name), title="Granite 4 hybrid checkpoint", show_header=True)
    for row in _info_rows(config, dtype, sum(parameter.numel() for parameter in model.parameters())):
        table.add_row(*row)
    _print_table(table)
    return 0


def _check(options: argparse.Namespace) -> int:
    if options.tokens < 1:
        raise UserError(f"--tokens is {options.tokens}, and must be at least 1.")
    if not options.tolerance > 0:
        raise UserError(f"--tolerance is {options.tolerance}, and must be above 0.")
    folder = checkpoint.find(_model_or_bundled(options))
    model, tokenizer = load(
        folder,
        _dtype(options),
        options.prefill_scan,
        decode_kernel=options.decode_kernel,
        cpu_kernels=options.cpu_kernels,
        quantize=options.quantize,
        tuned_configs=options.tuned_configs,
    )
    prompts = [tokenizer.encode(text) for text in options.prompt] or accuracy.default_prompts(tokenizer)
    if not all(prompts):
        raise UserError("a prompt is empty; give at least one token of text.")
    report = accuracy.measure(folder, prompts, options.tokens, model)
    _print_table(_accuracy_table(report, model.model.dtype))
    passed = report.passed(options.tolerance)
    print("passed" if passed else "FAILED", f"({report.criterion(options.tolerance)})")
    return 0 if passed else EXIT_CHECK_FAILED


def _graphs(options: argparse.Namespace) -> int:
    if min(options.tp_degree, options.batch_size, options.max_length, *options.buckets) < 1:
        raise UserError("--tp-degree, --batch-size, --buckets and --max-length must be at least 1.")
    if max(options.buckets) > options.max_length:
        raise UserError(f"a step of {max(options.buckets)} tokens needs --max-length to be as much at least.")
    check_folder_of(options.json)
    config, dtype = _config_and_dtype(str(_model_or_bundled(options)))
    dtype = _dtype(options) or dtype
    reports = list(
        graphs.report(config, dtype, options.tp_degree, options.batch_size, options.buckets, options.max_length)
    )
    table = Table(
        "graph", "GFLOP", "least", "", "GB accessed", "least", "", "instructions", "weights", "state", "temporaries"
    )
    table.title = f"one rank of {options.tp_degree}, {str(dtype).removeprefix('torch.')}"
    for report in reports:
        _add_graph(table, report)
    _print_table(table)
    for report in reports:
        for finding in report.findings:
            print(f"{report.graph}: {finding}")
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=2) + "\n", encoding="utf-8")
    return 0


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
        _size(report.weight_bytes),
        _size(report.state_bytes),
        _size(report.temporary_bytes),
    )
    for name, cost in report.components.items():
        flops, accessed = f"{cost.flops / 1e9:.4g}", f"{cost.bytes_accessed / 1e9:.4g}"
        table.add_row(f"  {name}", flops, "", "", accessed, "", "", f"{cost.instructions:,}")
    table.add_section()


def _plan(options: argparse.Namespace) -> int:
    if min(options.tp_degree, options.batch_size) < 1 or (options.context is not None and options.context < 1):
        raise UserError("--tp-degree, --batch-size and --context must be at least 1.")
    if options.model is None:
        return _plan_family(options)
    config, dtype = _config_and_dtype(options.model)
    planned = _planned(config, _dtype(options) or dtype, options)
    batch_size, context = planned.batch_size, planned.context
    table = Table("per logical core", f"GB, of {plan.CORE_BYTES / 1e9:.0f}")
    table.title = f"{escape(options.model)} on {options.instance}, {planned.tp_degree} ranks"
    table.add_row("weights", _gigabytes(planned.weights))
    table.add_row(f"Mamba state of {batch_size}", _gigabytes(batch_size * planned.state))
    table.add_row(f"KV cache of {batch_size} x {context:,} tokens", _gigabytes(batch_size * context * planned.token))
    table.add_row("logits", _gigabytes(batch_size * planned.logits))
    table.add_row("attention scores of a continued prompt", _gigabytes(context * planned.scores))
    temporaries = planned.temporaries
    known = "unknown without torch_xla and jax" if temporaries is None else _gigabytes(temporaries.of(batch_size))
    table.add_row("other temporaries of a step", known)
    table.add_section()
    table.add_row("sum", _gigabytes(planned.total))
    table.add_row("longest context at this batch size", f"{planned.longest_context:,} tokens")
    table.add_row("largest batch of this context", f"{planned.largest_batch:,}")
    _print_table(table)
    print(planned.verdict())
    return 0 if planned.fits else EXIT_CHECK_FAILED


def _plan_family(options: argparse.Namespace) -> int:
    """A line for each member: what fits at its whole context, or at the one that is asked for."""
    table = Table("model", "weights", "context", "state and cache of a sequence", "sum", "", "largest batch")
    table.title = f"{options.instance}, {options.tp_degree} ranks, batch {options.batch_size}: GB per logical core"
    refusals = []
    for name in family_names():
        config, dtype = _config_and_dtype(name)
        try:
            planned = _planned(config, _dtype(options) or dtype, options)
        except UserError as error:
            refusals.append(f"{name}: {error}")
            continue
        sequence = planned.state + planned.context * planned.token
        sizes = [_gigabytes(size) for size in (planned.weights, sequence, planned.total)]
        fits = "fits" if planned.fits else "does not fit"
        short_name = name.removeprefix("granite-4.0-")
        table.add_row(short_name, sizes[0], f"{planned.context:,}", *sizes[1:], fits, f"{planned.largest_batch:,}")
    if not table.rows:
        raise UserError(refusals[0].partition(": ")[2])
    _print_table(table)
    print("\n".join(refusals), end="\n" if refusals else "")
    return 0


def _planned(config: GraniteMoeHybridConfig, dtype: torch.dtype, options: argparse.Namespace) -> plan.Plan:
    context = config.max_position_embeddings if options.context is None else options.context
    return plan.plan(config, dtype, options.instance, options.tp_degree, options.batch_size, context)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f}"


def _compile(options: argparse.Namespace) -> int:
    counts = (options.tp_degree, options.batch_size, options.max_context_length, options.seq_len)
    if min(counts) < 1 or options.max_context_length > options.seq_len:
        raise UserError(
            "--tp-degree, --batch-size, --max-context-length and --seq-len must be at least 1, and --seq-len no less "
            "than --max-context-length."
        )
    neuron_sdk.require()
    # Not at the top: only this command and the nxdi backend need NxD Inference.
    from granite4_neuron.nxdi.loading import compile_model

    folder = checkpoint.find(options.model)
    dtype = _dtype(options) or checkpoint.stored_dtype(folder)
    compile_model(folder, options.output, dtype, *counts, options.prefill_scan, options.decode_kernel)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _convert(options: argparse.Namespace) -> int:
    folder = checkpoint.find(_model_or_bundled(options))
    model = checkpoint.load_model(folder, _dtype(options))
    checkpoint.save_model(model, options.output, files_from=folder)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _config_and_dtype(name: str) -> tuple[GraniteMoeHybridConfig, torch.dtype]:
    """Of a checkpoint, or of a family member where there is no folder of that name."""
    if not os.path.isdir(name) and GraniteMoeHybridConfig.is_family_member(name):
        config = GraniteMoeHybridConfig.from_family(name)
        return config, getattr(torch, config.torch_dtype)
    folder = checkpoint.find(name)
    return GraniteMoeHybridConfig.from_file(folder / "config.json"), checkpoint.stored_dtype(folder)


def _model_or_bundled(options: argparse.Namespace) -> str | Path:
    if options.model is not None:
        return options.model
    print("Using the small model that comes with the package; --model chooses another.", file=sys.stderr)
    return bundled_checkpoint()


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    return None if options.dtype is None else getattr(torch, options.dtype)


def _prompt_texts(options: argparse.Namespace) -> list[str]:
    if options.prompt and options.file is not None:
        raise UserError("give the prompt either as an argument or with --file, not both.")
    if options.system is not None and not options.chat:
        raise UserError("--system is part of a conversation; give --chat too.")
    if options.prompt:
        return options.prompt
    if options.file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UserError("there is no prompt; give one as an argument, with --file, or on standard input.")
    try:
        text = sys.stdin.read() if options.file in (None, "-") else Path(options.file).read_text(encoding="utf-8")
        return [text.removesuffix("\n")]  # the end of a text file, not part of what it says
    except OSError as error:
        raise UserError(f"{options.file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UserError(f"{options.file or 'standard input'} is not text in UTF-8.") from None


class _PromptBar:
    """Shows how far prefill is, on standard error, when it takes more than one step."""

    def __init__(self) -> None:
        columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> _PromptBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        if not self._progress.tasks and done < total:
            self._progress.add_task("", total=total)
            self._progress.start()
        if self._progress.tasks:
            self._progress.update(self._progress.tasks[0].id, completed=done)
        if done == total:
            self.__exit__()

    def __exit__(self, *exception: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


def _print_table(table: Table) -> None:
    """Through print: rich would turn a closed pipe into an exit status of its own."""
    console = Console()
    with console.capture() as text:
        console.print(table)
    print(text.get(), end="")


def _print_stats(stats: GenerationStats) -> None:
    print(
        f"prefill: {stats.prompt_tokens} tokens, {stats.prompt_tokens_per_second:.1f} tokens/s\n"
        f"decode: {stats.generated_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s\n"
        f"peak memory: {peak_memory_bytes() / 2**20:.0f} MiB",
        file=sys.stderr,
    )


def _info_rows(config: GraniteMoeHybridConfig, dtype: torch.dtype, total: int) -> list[tuple[str, str]]:
    mamba = config.layer_types.count(MAMBA)
    attention = [index for index, kind in enumerate(config.layer_types) if kind != MAMBA]
    expert = 3 * config.intermediate_size * config.hidden_size
    idle = config.num_hidden_layers * (config.num_local_experts - config.num_experts_per_tok) * expert
    active = total - idle if config.num_local_experts else total
    rows = [
        ("layers", f"{mamba} Mamba-2, {len(attention)} attention"),
        ("attention at", "every layer" if not mamba else ", ".join(map(str, attention)) or "none"),
        ("hidden size, vocabulary", f"{config.hidden_size}, {config.vocab_size}"),
    ]
    if mamba:
        heads = f"{config.mamba_n_heads} x {config.mamba_d_head}, {config.mamba_d_state}, {config.mamba_n_groups}"
        rows.append(("Mamba heads, state, groups", heads))
    if attention:
        rows.append(
            (
                "attention heads, key heads, width, positions",
                f"{config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}, "
                f"{'rope' if config.uses_rope else 'none'}",
            )
        )
    if config.num_local_experts:
        rows.append(("experts, per token", f"{config.num_local_experts}, {config.num_experts_per_tok}"))
    return [
        *rows,
        ("parameters", f"{total:,}"),
        ("active per token", f"{active:,}"),
        ("weights", f"{_size(total * dtype.itemsize)} in {str(dtype).removeprefix('torch.')}"),
        ("state per sequence", _size(sequence_bytes(config, dtype))),
        ("KV cache per token", f"{token_bytes(config, dtype):,} bytes"),
        ("longest context", f"{config.max_position_embeddings:,} tokens"),
    ]


def _accuracy_table(report: accuracy.AccuracyReport, dtype: torch.dtype) -> Table:
    table = Table("", "tokens", "max diff", "mean diff", "top-1", "Pearson")
    weights = " with quantized weights" if report.is_quantized else ""
    table.title = f"logits in {str(dtype).removeprefix('torch.')}{weights} against transformers in float32"

    def add(label: str, difference: accuracy.Difference) -> None:
        table.add_row(
            label,
            str(difference.tokens),
            f"{difference.maximum:.2e}",
            f"{difference.mean:.2e}",
            f"{difference.top1_agreement:.1%}",
            f"{difference.pearson:.9f}",
        )

    start, width = 0, 1
    while (difference := report.positions(start, start + width)) is not None:
        add(f"position {start}" if width == 1 else f"positions {start}-{start + width - 1}", difference)
        start, width = start + width, start + width
    table.add_section()
    add("prefill", report.phase(prefill=True))
    add("decode", report.phase(prefill=False))
    add("all", report.overall())
    if (of_transformers := report.of_transformers()) is not None:
        add("transformers in this dtype", of_transformers)
    return table


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="granite4-neuron",
        description="IBM Granite 4.0 hybrid models (Mamba-2, attention, mixture of experts).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")
    _add_generate(commands)

    info = commands.add_parser("info", help="what a checkpoint is: layers, parameters, bytes, state and cache sizes")
    _add_model(info, family=True)
    info.set_defaults(run=_info)

    check = commands.add_parser(
        "check",
        help="compare logits with transformers",
        description="Compare logits with transformers, token by token. float32 passes when no logit is further off "
        "than the tolerance; other dtypes when the mean error to float32 is not above that of transformers there; "
        "quantized weights when the likeliest token is the same nine times in ten.",
    )
    _add_model(check)
    _add_arithmetic(check)
    add_cpu_options(check)
    check.add_argument("--prompt", action="append", default=[], help="compare on this text; may be repeated")
    check.add_argument("--tokens", type=int, default=16, help="tokens to decode after each prompt (default: 16)")
    check.add_argument(
        "--tolerance", type=float, default=accuracy.FLOAT32_TOLERANCE, help="for float32 (default: %(default)s)"
    )
    check.set_defaults(run=_check)

    graph = commands.add_parser(
        "graphs",
        help="what the compiled graphs of a model cost",
        description="Trace one rank's graphs with torch_xla, without weights, and count them with XLA's cost analysis "
        "before optimisation, beside the least that a step can cost. Temporaries are those of one layer of each kind, "
        "compiled for the CPU, which in bfloat16 include float32 copies of weights. What the compiler for Trainium is "
        "known to handle badly is listed below the table.",
    )
    _add_model(graph, family=True)
    graph.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: that of the weights)")
    _add_ranks_and_sequences(graph, tp_degree=1)
    graph.add_argument("--buckets", type=int, nargs="+", default=[128, 512], metavar="N", help="default: 128 512")
    graph.add_argument("--max-length", type=int, default=2048, metavar="N", help="of the cache (default: 2048)")
    graph.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    graph.set_defaults(run=_graphs)

    planner = commands.add_parser(
        "plan",
        help="what fits into the memory of a Trainium2 core",
        description="Add up what each core of an instance holds of a model: weights, state, cache, logits, and what a "
        "step of prefill needs besides. Without --model: a line for each member of the family.",
    )
    planner.add_argument(
        "--model", help=f"a checkpoint folder, a Hugging Face id, or one of {', '.join(family_names())}"
    )
    planner.add_argument("--instance", choices=plan.INSTANCES, default="trn2.3xlarge", help="default: %(default)s")
    planner.add_argument("--dtype", choices=DTYPES, help="of weights, activations and cache (default: the weights')")
    _add_ranks_and_sequences(planner, tp_degree=4)
    planner.add_argument("--context", type=int, metavar="N", help="tokens of a sequence (default: the model's longest)")
    planner.set_defaults(run=_plan)

    compiler = commands.add_parser(
        "compile",
        help="compile a model for Trainium2",
        description="Compile the graphs of a model with NxD Inference, for generate --backend nxdi. Needs the Neuron "
        "SDK.",
    )
    compiler.add_argument("--model", required=True, help="a checkpoint folder or a Hugging Face id")
    _add_arithmetic(compiler)
    _add_ranks_and_sequences(compiler, tp_degree=4)
    compiler.add_argument(
        "--max-context-length",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of the largest graph for prompts; longer prompts take several steps (default: %(default)s)",
    )
    compiler.add_argument(
        "--seq-len", type=int, default=4096, metavar="N", help="longest prompt and continuation (default: %(default)s)"
    )
    compiler.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    compiler.set_defaults(run=_compile)

    convert = commands.add_parser("convert", help="write a checkpoint in another dtype, in one format and naming")
    _add_model(convert)
    convert.add_argument("--dtype", choices=DTYPES, help="default: that of the stored weights")
    convert.add_argument("--output", required=True, metavar="FOLDER", help="a folder that does not exist yet")
    convert.set_defaults(run=_convert)
    return parser


def _add_generate(commands: argparse._SubParsersAction) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue one prompt, printing text as it comes, or several at once as a batch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.add_argument("prompt", nargs="*", help="the text to continue; several make a batch")
    generate.add_argument("--file", help="read the prompt from this file, or from standard input with -")
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message; use the chat template")
    generate.add_argument("--system", metavar="TEXT", help="the system message of the conversation")
    _add_model(generate)
    _add_arithmetic(generate)
    add_cpu_options(generate)
    generate.add_argument("--backend", choices=BACKENDS, default="cpu", help="where to run (default: %(default)s)")
    generate.add_argument("--compiled", metavar="DIR", help="for --backend nxdi: what the compile command wrote")
    generate.add_argument("--max-tokens", type=int, default=256, metavar="N", help="new tokens (default: %(default)s)")
    generate.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-sequence token")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before it; may be repeated")
    sampling = generate.add_argument_group("sampling", "without any of these: as the checkpoint says, mostly greedy")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="among the likeliest that make up probability P")
    sampling.add_argument("--min-p", type=float, metavar="P", help="among those P times as likely as the likeliest")
    sampling.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1 discourages repetition")
    sampling.add_argument("--seed", type=int, metavar="N", help="repeatable random numbers")
    generate.add_argument("--verbose", action="store_true", help="report tokens per second and peak memory at the end")
    generate.set_defaults(run=_generate)


def _add_model(parser: argparse.ArgumentParser, family: bool = False) -> None:
    names = f", or one of {', '.join(family_names())}" if family else ""
    parser.add_argument(
        "--model",
        help=f"a checkpoint folder or a Hugging Face id{names} (default: the small model that comes with the package)",
    )


def _add_arithmetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: that of the weights)")
    parser.add_argument(
        "--prefill-scan",
        choices=PREFILL_SCANS,
        default="chunked",
        help="how Mamba layers scan a prompt: linear in its length, with one decay matrix per step, or, on Neuron "
        "devices, with an NKI kernel that goes token by token (scan) or chunk by chunk (ssd)",
    )
    parser.add_argument(
        "--decode-kernel",
        choices=DECODE_KERNELS,
        default="torch",
        help="how Mamba layers advance by one token: in torch, or, on Neuron devices, with an NKI kernel",
    )


def _add_ranks_and_sequences(parser: argparse.ArgumentParser, tp_degree: int) -> None:
    parser.add_argument(
        "--tp-degree", type=int, default=tp_degree, metavar="T", help="ranks of the model (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences at a time (default: 1)")


def add_cpu_options(parser: argparse.ArgumentParser) -> None:
    """Options of the cpu backend: which kernels it runs, and how they are launched."""
    parser.add_argument(
        "--cpu-kernels",
        choices=CPU_KERNELS,
        default="fused",
        help="what the cpu backend computes with: kernels compiled for this processor at first use, or plain torch "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tuned-configs",
        metavar="DIR",
        help="of the cpu backend: a folder of launch parameters that benchmark_latency.py --tune wrote (default: the "
        f"one in the environment variable {FOLDER_VARIABLE}, if any)",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="of the cpu backend: hold the large weights in int8 with a scale per output channel (default: in --dtype)",
    )


if __name__ == "__main__":
    sys.exit(main())
