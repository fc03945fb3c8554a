"""`granite4-neuron chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from granite4_neuron.commands.adapters import adapters_of, add_adapters
from granite4_neuron.commands.chat_input import PipedInput, TerminalInput
from granite4_neuron.commands.chat_session import COMMANDS, Session
from granite4_neuron.commands.conversations import add_chat_template_kwargs, chat_template_kwargs
from granite4_neuron.commands.engine_options import add_speculation, drafts_with_mtp, new_engine, num_bytes
from granite4_neuron.commands.help_format import HelpFormatter
from granite4_neuron.commands.json_schema import add_json_schema, constraint
from granite4_neuron.commands.options import (
    add_model_alone,
    add_revision,
    add_runtime,
    add_sampling,
    at_least,
    load_runtime,
    model_checkpoint,
    read_text,
    sampling_options,
)
from granite4_neuron.config.json_files import parse_json
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.generation import ConversationEncoder

CACHE_SIZE = "2GiB"
_EXAMPLES = """\
examples:
  granite4-neuron chat --model ibm-granite/granite-4.0-h-350m --system "You answer in one sentence."
  granite4-neuron chat --model ./checkpoint --temperature 0.7 --verbose
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model, turn by turn. Each turn runs its new tokens only. Ctrl-C stops an answer, Ctrl-D "
        "leaves, and /help lists what else can be typed. Without a terminal each line of standard input is a message.",
        usage="%(prog)s [--model MODEL] [--system TEXT] [option ...]",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    # Options of daily use come first.
    add_model_alone(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system message of the conversation")
    chat.add_argument(
        "--max-tokens",
        type=at_least(1),
        default=2048,
        metavar="N",
        help="most tokens of an answer (default: %(default)s)",
    )
    chat.add_argument("--verbose", action="store_true", help="report the speed of each answer")
    add_sampling(chat)
    conversation = chat.add_argument_group("conversation")
    for name, what in (("tools", "functions, as OpenAI's API describes them"), ("documents", "to answer from")):
        help = f"a JSON list of {name} for the chat template: {what}"
        conversation.add_argument(f"--{name}", metavar="FILE", help=help)
    add_chat_template_kwargs(conversation)
    add_json_schema(conversation)
    conversation.add_argument(
        "--max-length",
        type=at_least(2),
        metavar="N",
        help="most tokens of the conversation (default: the model's limit)",
    )
    conversation.add_argument(
        "--prefix-cache",
        default=CACHE_SIZE,
        metavar="SIZE",
        help="memory for the states of turns, which /undo and /retry need; a draft model takes as much again "
        "(default: %(default)s)",
    )
    model = chat.add_argument_group("model")
    add_revision(model)
    add_adapters(model, "the first one answers, and /set adapter changes to another")
    add_speculation(chat.add_argument_group("speculation"))
    add_runtime(chat)
    chat.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    max_bytes = num_bytes(options.prefix_cache)
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    shown: dict[str, Any] = {name: _objects(getattr(options, name), name) for name in ("tools", "documents")}
    shown["chat_template_kwargs"] = chat_template_kwargs(options)
    adapters = adapters_of(options)
    runtime, tokenizer = load_runtime(
        options, model_checkpoint(options), adapters=adapters, mtp=drafts_with_mtp(options)
    )
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
        adapter=next(iter(adapters), None),
        **sampling_options(options),
    )
    with closing(ConversationEncoder(tokenizer)) as encoder:
        # Check that there is a template, and that it shows them, before anything is typed.
        _check_template(encoder, shown)
        conversation = Conversation(engine, cache, encoder, request, options.system, shown)
        messages = TerminalInput(COMMANDS) if is_terminal else PipedInput()
        return Session(conversation, messages, is_terminal, options.verbose).run()


def _check_template(encoder: ConversationEncoder, shown: Mapping[str, Any]) -> None:
    encoder.encode([{"role": "user", "content": "a message"}], **shown)
    for name in ("tools", "documents"):
        objects = shown[name]
        if objects and not encoder.shows(name, objects):
            raise UserError(f"this checkpoint's chat template does not show {name}; leave --{name} out.")


def _objects(file: str | None, name: str) -> list[dict[str, Any]] | None:
    """Read the file of --tools or --documents; None without one.

    Raises:
        UserError: it is not a list of objects in JSON.
    """
    if file is None:
        return None
    objects = parse_json(read_text(file, f"--{name} needs a file."), file)
    if not isinstance(objects, list) or not all(isinstance(each, dict) for each in objects):
        raise UserError(f"{file} must hold a list of {name}, each an object.")
    return objects
