"""`granite4-neuron serve`: a server with OpenAI's and Anthropic's APIs over one engine."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.adapters import adapters_of, add_adapters
from granite4_neuron.commands.engine_options import (
    add_prefix_folder,
    add_speculation,
    drafts_with_mtp,
    new_engine,
    num_bytes,
    prefix_folder,
)
from granite4_neuron.commands.help_format import HelpFormatter
from granite4_neuron.commands.options import (
    add_model_alone,
    add_revision,
    add_runtime,
    at_least,
    load_runtime,
    model_checkpoint,
    number_in,
    print_time,
)
from granite4_neuron.commands.output import write
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.engine import PrefixCache, PrefixFolder, SlotPrefixCache
    from granite4_neuron.runtime.interface import Runtime

EXIT_FAILED = 1
# Defaults, of batch, measure and plan --traffic too.
MAX_NUM_SEQS = 8
MODEL_LEN = 8192
MAX_GAP = 100  # milliseconds
PREFIX_CACHE = "1GiB"
_KEY_VARIABLE = "GRANITE4_API_KEY"
_EXTRA = ("starlette", "uvicorn", "prometheus_client", "pydantic")

_EXAMPLES = """\
examples:
  granite4-neuron serve --model ./checkpoint --port 8000
  granite4-neuron serve --model ibm-granite/granite-4.0-h-350m --max-num-seqs 16 --prefix-cache 4GiB
"""


def _origin(text: str) -> str:
    """Parse an origin of web pages, as browsers send it."""
    if text in ("*", "null") or re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#@\s]+", text):
        return text.lower()
    raise argparse.ArgumentTypeError(f"{text!r} is not an origin, such as https://example.org:8080, null, or *")


def add_parser(commands: argparse._SubParsersAction) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model with OpenAI's and Anthropic's APIs",
        description="Serve one model at http://HOST:PORT/v1, with OpenAI's chats, completions and responses and "
        "Anthropic's messages, until SIGTERM, SIGHUP or Ctrl-C. Then the server finishes the requests that it has, for "
        "--shutdown-timeout at most, and refuses new ones.",
        usage="%(prog)s [--model MODEL] [--host HOST] [--port N] [option ...]",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    # Options of daily use come first.
    add_model_alone(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument(
        "--port", type=at_least(0, 65535), default=8000, metavar="N", help="0 for any free port (default: %(default)s)"
    )
    serve.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that clients must send (default: the environment variable {_KEY_VARIABLE}, which does not show in "
        "the list of processes, or none)",
    )
    serve.add_argument(
        "--max-num-seqs",
        type=at_least(1),
        default=MAX_NUM_SEQS,
        metavar="N",
        help="texts at a time (default: %(default)s)",
    )
    add_max_model_len(serve)
    model = serve.add_argument_group("model")
    model.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model for clients (default: the last part of --model); answers and metrics have the first",
    )
    add_revision(model)
    add_adapters(model, "a request names it as its model")
    model.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="for the cpu backend: let clients load adapters from any folder of this machine, and unload them, as "
        "vLLM does with VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    )
    pages = serve.add_argument_group("web pages")
    pages.add_argument("--no-page", action="store_true", help="do not show a chat at http://HOST:PORT/")
    pages.add_argument(
        "--allowed-origins",
        nargs="+",
        type=_origin,
        default=[],
        metavar="ORIGIN",
        help="web pages that may use the server from a browser, such as https://example.org; null for files, * for all",
    )
    pages.add_argument(
        "--allowed-hosts",
        nargs="+",
        type=str.lower,
        default=[],
        metavar="NAME",
        help="names by which requests may call a server that listens on this machine only and has no key, such as "
        "host.docker.internal, beside localhost and its address; a web page could get at it by any other",
    )
    limits = serve.add_argument_group("limits")
    limits.add_argument(
        "--max-gap",
        type=number_in(0, includes_least=False),
        default=MAX_GAP,
        metavar="MS",
        help="most milliseconds that a stream should wait for its next token while prompts of others are read; less "
        "makes streams smoother and first tokens later (default: %(default)s)",
    )
    limits.add_argument(
        "--max-queue",
        type=at_least(0),
        default=64,
        metavar="N",
        help="texts that may wait; further requests are refused with status 429 (default: %(default)s)",
    )
    limits.add_argument(
        "--max-tokens",
        type=at_least(1),
        metavar="N",
        help="most new tokens of a text (default: as many as fit after its prompt)",
    )
    limits.add_argument(
        "--max-body", default="4MiB", metavar="SIZE", help="the longest body of a request (default: %(default)s)"
    )
    limits.add_argument(
        "--timeout-keep-alive",
        type=at_least(0),
        default=5,
        metavar="SECONDS",
        help="how long a connection stays open between two requests (default: %(default)s)",
    )
    limits.add_argument(
        "--shutdown-timeout",
        type=at_least(0),
        default=300,
        metavar="SECONDS",
        help="time to finish running requests after the signal to end (default: %(default)s)",
    )
    reuse = serve.add_argument_group("reuse and speculation")
    reuse.add_argument(
        "--prefix-cache",
        metavar="SIZE",
        help=f"memory of the prefix cache, 0 for none; a draft model takes as much again (default: {PREFIX_CACHE})",
    )
    add_prefix_folder(reuse)
    add_speculation(reuse)
    add_runtime(serve)
    serve.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_extra(options.command)
    max_body, key, adapters = num_bytes(options.max_body), _api_key(options), adapters_of(options)
    # Not at the top: it takes seconds to import, and --help does not need it.
    from granite4_neuron.generation.answer_formats import shows_unknown_calls
    from granite4_neuron.runtime.interface import require
    from granite4_neuron.serving.front_end import FrontEnd
    from granite4_neuron.serving.http.address import bind, in_url, is_for_this_machine, own_names
    from granite4_neuron.serving.http.listener import raise_descriptor_limit
    from granite4_neuron.serving.http.service import ServerOptions
    from granite4_neuron.serving.sequences import Limits

    raise_descriptor_limit()
    with ExitStack() as at_end:
        listener = at_end.enter_context(bind(options.host, options.port))
        is_open = not is_for_this_machine(listener)
        if is_open and key is None:
            print(
                f"Every machine that reaches {options.host} can use the server; {_KEY_VARIABLE} sets a key.",
                file=sys.stderr,
            )
        front_end = at_end.enter_context(closing(FrontEnd(listener)))
        checkpoint = model_checkpoint(options)
        model, *aliases = served_names(options, checkpoint, adapters)
        runtime, tokenizer = load_runtime(options, checkpoint, adapters=adapters, mtp=drafts_with_mtp(options))
        if options.allow_runtime_lora_updating:
            require(runtime, "adapters")
        if shows_unknown_calls(tokenizer):
            print(
                "This checkpoint's chat template shows tools, but calls in no format that is known here; only calls as "
                "Granite 4 writes them are found in answers.",
                file=sys.stderr,
            )
        kept = prefix_folder(options, runtime)
        if kept is not None:
            at_end.callback(kept.close)
        cache = served_prefix_cache(options, runtime, kept)
        longest, max_gap = max_model_len(options, runtime), options.max_gap / 1000
        engine = new_engine(options, runtime, tokenizer, options.max_num_seqs, longest, cache, max_gap=max_gap)

        def on_start(port: int) -> None:
            url = f"http://{in_url(options.host)}:{port}/"
            write(f"Serving {model} at {url}v1" + ("" if options.no_page else f" (a chat in the browser: {url})"))

        started = time.perf_counter()
        engine.warm_up()
        print_time(options, "warm-up", started)
        has_served = front_end.serve(
            engine,
            cache,
            tokenizer,
            on_start,
            ServerOptions(
                limits=Limits(engine.max_length, options.max_tokens, options.max_num_seqs + options.max_queue),
                model=model,
                api_key=key,
                # A client with the key may use any name for the server, such as that of a proxy.
                hosts=None if is_open or key is not None else own_names(options.host) | set(options.allowed_hosts),
                max_body=max_body,
                keep_alive=options.timeout_keep_alive,
                shutdown_timeout=options.shutdown_timeout,
                aliases=aliases,
                allowed_origins=options.allowed_origins,
                has_page=not options.no_page,
                updates_adapters=options.allow_runtime_lora_updating,
            ),
        )
        return 0 if has_served else EXIT_FAILED


def check_extra(command: str) -> None:
    """Check that the packages of the extra `serve` are installed; raise UserError if not."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        how = "pip install 'granite4-neuron[serve]'"
        raise UserError(f"{command} needs {' and '.join(missing)}; install them with: {how}.")


def _api_key(options: argparse.Namespace) -> str | None:
    """Return the API key; None for none.

    Raises:
        UserError: clients could not send it.
    """
    key = os.environ.get(_KEY_VARIABLE) if options.api_key is None else options.api_key
    if key is not None and (not key or key != key.strip() or not key.isprintable()):
        raise UserError("the API key must be text in UTF-8, not empty, without control characters or spaces around it.")
    return key


def served_names(options: argparse.Namespace, checkpoint: Checkpoint, adapters: Collection[str]) -> list[str]:
    """Return the model's names in requests; raise UserError if an adapter has one of them."""
    names = list(dict.fromkeys(options.served_model_name or [Path(options.model or checkpoint.path).name]))
    for name in names:
        if name in adapters:
            raise UserError(f"the model and an adapter are both named {name}; --served-model-name names the model.")
    return names


def add_max_model_len(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--max-model-len",
        type=at_least(2),
        metavar="N",
        help=f"most tokens of a text, prompt and new ones (default: {MODEL_LEN}, or the model's longest if less)",
    )


def max_model_len(options: argparse.Namespace, runtime: Runtime) -> int:
    """Return the most tokens of a text.

    Raises:
        UserError: the model has no texts as long as the user asks for.
    """
    asked, longest = options.max_model_len, runtime.max_length
    if asked is not None and asked > longest:
        raise UserError(f"--max-model-len is {asked:,}; the model's longest text has {longest:,} tokens.")
    return min(asked or MODEL_LEN, longest)


def served_prefix_cache(
    options: argparse.Namespace, runtime: Runtime, folder: PrefixFolder | None
) -> PrefixCache | SlotPrefixCache | None:
    """Return the prefix cache; None if it is switched off, or if the runtime has no room for one and the user gave no
    size.

    Raises:
        UserError: the size is malformed, the runtime has no room for the size that was given, or there is a folder for
            a cache that is switched off.
    """
    max_bytes = num_bytes(options.prefix_cache or PREFIX_CACHE)
    if not max_bytes:
        if folder is not None:
            raise UserError("--prefix-cache-dir needs a prefix cache in memory, and --prefix-cache is 0.")
        return None
    from granite4_neuron.engine.prefix.slot_cache import prefix_cache_of

    try:
        return prefix_cache_of(runtime, max_bytes, options.max_num_seqs, at_branches=True, folder=folder)
    except UserError as reason:
        if options.prefix_cache is not None:
            raise
        print(f"There is no prefix cache: {reason}", file=sys.stderr)
        return None
