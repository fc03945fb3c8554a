"""`granite4-neuron chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from granite4_neuron.commands.chat_input import PipedInput, TerminalInput
from granite4_neuron.commands.chat_session import COMMANDS, Session
from granite4_neuron.commands.json_schema import add_json_schema, constraint
from granite4_neuron.commands.options import (
    add_arithmetic,
    add_backend,
    add_cpu_options,
    add_model,
    add_sampling,
    at_least,
    load_runtime,
    model_or_bundled,
    sampling_options,
)
from granite4_neuron.commands.reuse import add_speculation, new_engine, num_bytes

CACHE_SIZE = "2GiB"


def add_parser(commands: argparse._SubParsersAction) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model, turn by turn. Each turn runs its new tokens only. Ctrl-C stops an answer, Ctrl-D "
        "leaves, and /help lists what else can be typed. Without a terminal each line of standard input is a message.",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message of the conversation")
    add_model(chat)
    add_arithmetic(chat)
    add_cpu_options(chat)
    add_backend(chat)
    chat.add_argument(
        "--max-tokens", type=at_least(1), default=2048, metavar="N", help="of an answer (default: %(default)s)"
    )
    chat.add_argument(
        "--max-length", type=at_least(2), metavar="N", help="of the conversation, in tokens (default: the model's)"
    )
    add_json_schema(chat)
    add_sampling(chat)
    chat.add_argument(
        "--prefix-cache",
        default=CACHE_SIZE,
        metavar="SIZE",
        help="memory for the states of turns, which /undo and /retry need; a draft model takes as much again "
        "(default: %(default)s)",
    )
    add_speculation(chat.add_argument_group("speculation"))
    chat.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    max_bytes = num_bytes(options.prefix_cache)
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    runtime, tokenizer = load_runtime(options, model_or_bundled(options))
    # Not at the top: it takes seconds to import, and --help does not need it.
    from granite4_neuron.engine import PrefixCache, Request
    from granite4_neuron.generation import Conversation, ConversationEncoder, end_of_sequence_tokens

    cache = PrefixCache(runtime, max_bytes, None)
    engine = new_engine(options, runtime, tokenizer, 1, options.max_length, cache)
    request = Request(
        (),
        options.max_tokens,
        stop_token_ids=end_of_sequence_tokens(tokenizer, runtime.generation_config),
        constraint=constraint(options, runtime, tokenizer),
        **sampling_options(options),
    )
    with closing(ConversationEncoder(tokenizer)) as encoder:
        # Check that there is a template before anything is typed.
        encoder.encode([{"role": "user", "content": "a message"}])
        conversation = Conversation(engine, cache, encoder, request, options.system)
        messages = TerminalInput(COMMANDS) if is_terminal else PipedInput()
        return Session(conversation, messages, is_terminal).run()
