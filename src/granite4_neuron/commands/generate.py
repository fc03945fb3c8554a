"""`granite4-neuron generate`: continue prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from granite4_neuron.commands.adapters import adapters_of, add_adapters
from granite4_neuron.commands.conversations import add_chat, chat_template_kwargs, check_chat
from granite4_neuron.commands.engine_options import (
    add_prefix_cache,
    add_speculation,
    check_prompt_cache,
    drafter,
    drafts_with_mtp,
    prefix_cache,
    save_prompt,
)
from granite4_neuron.commands.help_format import HelpFormatter
from granite4_neuron.commands.json_schema import add_json_schema, constraint
from granite4_neuron.commands.options import (
    add_model,
    add_runtime,
    add_sampling,
    at_least,
    load_runtime,
    model_checkpoint,
    read_text,
    sampling_options,
)
from granite4_neuron.commands.output import ProgressBar, peak_memory_bytes, size, write
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from granite4_neuron.engine import PrefixCache, SlotPrefixCache
    from granite4_neuron.generation import GenerationError, GenerationStats
    from granite4_neuron.generation.prompts import Prompt
    from granite4_neuron.runtime.interface import Runtime

_EXAMPLES = """\
examples:
  granite4-neuron generate "An assignment statement"
  granite4-neuron generate --model ibm-granite/granite-4.0-h-350m --chat "What is a monad?" --temperature 0.7 --seed 1
  granite4-neuron generate --model ./checkpoint --file report.txt --max-tokens 500 --verbose
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue one prompt, printing text as it comes, or several at once as a batch.",
        usage="%(prog)s [PROMPT ...] [--model MODEL] [option ...]",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    generate.add_argument("prompt", nargs="*", help="the text to continue; several make a batch")
    generate.add_argument("--file", help="read the prompt from this file, or from standard input with -")
    add_chat(
        generate, "the prompt is a user's message; use the chat template", "the system message of the conversation"
    )
    add_model(generate)
    generate.add_argument(
        "--max-tokens", type=at_least(1), default=256, metavar="N", help="new tokens (default: %(default)s)"
    )
    generate.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-sequence token")
    add_json_schema(generate)
    add_sampling(generate)
    add_adapters(generate, "with several, each of them continues the prompt")
    add_prefix_cache(generate.add_argument_group("reuse"))
    add_speculation(generate.add_argument_group("speculation"))
    generate.add_argument(
        "--verbose", action="store_true", help="report times, peak memory, and why faster kernels were not used"
    )
    add_runtime(generate)
    generate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    texts = _prompt_texts(options)
    template_kwargs = chat_template_kwargs(options)
    adapters = adapters_of(options)
    _check_prompt_cache(options, len(texts), bool(adapters))
    runtime, tokenizer = load_runtime(
        options, model_checkpoint(options), adapters=adapters, mtp=drafts_with_mtp(options)
    )
    names: list[str | None] = [*adapters] or [None]
    prompts = [_prompt(options, text) for text in texts for _ in names]
    cache = prefix_cache(options, runtime, len(prompts))
    continuations, stats, failed = _continue(
        options, runtime, tokenizer, prompts, names * len(texts), cache, template_kwargs
    )
    if failed is not None and not any(continuations):
        raise failed
    if len(prompts) == 1:
        write("")
    else:
        titles = [text if len(names) == 1 else f"{name}: {text}" for text in texts for name in names]
        for title, continuation in zip(titles, continuations, strict=True):
            write(f"=== {title}\n{continuation}\n")
    if failed is not None:
        raise failed
    if options.prompt_cache is not None:
        save_prompt(options, cache, _prompt_tokens(options, tokenizer, texts[0], template_kwargs))
    if options.verbose:
        _print_stats(stats, cache)
        for fallback in runtime.fallbacks:
            print(fallback, file=sys.stderr)
    return 0


def _check_prompt_cache(options: argparse.Namespace, num_texts: int, has_adapters: bool) -> None:
    if options.prompt_cache is not None and num_texts > 1:
        raise UserError("--prompt-cache takes one prompt; for several with the same beginning use --prefix-cache.")
    if options.prompt_cache is not None and has_adapters:
        raise UserError("--prompt-cache keeps states of the model without adapters; leave out --adapter.")
    check_prompt_cache(options.prompt_cache)


def _prompt(options: argparse.Namespace, text: str) -> Prompt:
    """Return a prompt as `stream_generate` takes it: the text, or messages with it."""
    if not options.chat:
        return text
    system = [{"role": "system", "content": options.system}] if options.system else []
    return [*system, {"role": "user", "content": text}]


def _prompt_tokens(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, text: str, template_kwargs: dict[str, Any]
) -> list[int]:
    from granite4_neuron.checkpoint.tokenizing import encode
    from granite4_neuron.generation import chat_prompt

    if options.chat:
        return chat_prompt(tokenizer, text, options.system, template_kwargs)
    return encode(tokenizer, text)


def _continue(
    options: argparse.Namespace,
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    adapters: Sequence[str | None],
    cache: PrefixCache | SlotPrefixCache | None,
    template_kwargs: dict[str, Any],
) -> tuple[list[str], GenerationStats, GenerationError | None]:
    """Return the texts that follow prompts, each with its adapter, and what failed. A single text is written as it
    comes.
    """
    # Not at the top: it takes seconds to import, and --help does not need it.
    from granite4_neuron.generation import GenerationError, GenerationStats, stream_generate

    drafts, draft_tokens = drafter(options, runtime, tokenizer, len(prompts))
    texts, stats = [""] * len(prompts), GenerationStats()
    with ProgressBar("prompt", "tokens") as progress:
        try:
            for response in stream_generate(
                runtime,
                tokenizer,
                prompts,
                max_tokens=options.max_tokens,
                ignore_eos=options.ignore_eos,
                progress=progress,
                prefix_cache=cache,
                drafter=drafts,
                draft_tokens=draft_tokens,
                adapter=adapters,
                chat_template_kwargs=template_kwargs,
                constraint=constraint(options, runtime, tokenizer),
                **sampling_options(options),
            ):
                stats = response.stats
                texts[response.index] += response.text
                if len(prompts) == 1:
                    write(response.text, end="")
        except GenerationError as error:  # the texts of the other prompts are there
            return texts, stats, error
    return texts, stats, None


def _prompt_texts(options: argparse.Namespace) -> list[str]:
    if options.prompt and options.file is not None:
        raise UserError("give the prompt either as an argument or with --file, not both.")
    check_chat(options)
    texts = options.prompt
    if not texts:
        text = read_text(
            options.file, "there is no prompt; give one as an argument, with --file, or on standard input."
        )
        texts = [text.removesuffix("\n")]  # the newline at the end of a text file
        if texts == [""] and not options.chat:
            raise UserError("the prompt is empty; give at least one token of text.")
    return texts


def _print_stats(stats: GenerationStats, cache: PrefixCache | SlotPrefixCache | None) -> None:
    if cache is not None:
        print(
            f"prefix cache: {stats.cached_tokens} tokens found; {cache.stats.snapshots} snapshots, "
            f"{size(cache.stats.num_bytes)}, {cache.stats.evictions} evicted",
            file=sys.stderr,
        )
    if stats.drafted_tokens:
        print(
            f"speculation: {stats.acceptance_rate:.0%} of {stats.drafted_tokens} drafts accepted, "
            f"{stats.decode_tokens_per_row:.2f} tokens per step",
            file=sys.stderr,
        )
    print(
        f"prefill: {stats.prompt_tokens} tokens, {stats.prompt_tokens_per_second:.1f} tokens/s\n"
        f"decode: {stats.generated_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s\n"
        f"peak memory: {peak_memory_bytes() / 2**20:.0f} MiB",
        file=sys.stderr,
    )
