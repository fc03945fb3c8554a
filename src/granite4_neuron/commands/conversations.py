"""Options of commands that show a conversation to the model."""

from __future__ import annotations

import argparse
from typing import Any

from granite4_neuron.config.json_files import parse_json
from granite4_neuron.errors import UserError


def add_chat(parser: argparse._ActionsContainer, chat: str, system: str) -> None:
    """Add --chat, which makes prompts users' messages, and the options of their conversations.

    Args:
        chat, system: the help of --chat and --system.
    """
    parser.add_argument("--chat", action="store_true", help=chat)
    parser.add_argument("--system", metavar="TEXT", help=system)
    add_chat_template_kwargs(parser)


def add_chat_template_kwargs(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help='an object of further variables for the chat template, such as {"enable_thinking": false}',
    )


def check_chat(options: argparse.Namespace) -> None:
    """Check that options of a conversation come with --chat; raise UserError if one comes without it."""
    for name, value in (("--system", options.system), ("--chat-template-kwargs", options.chat_template_kwargs)):
        if value is not None and not options.chat:
            raise UserError(f"{name} is part of a conversation; give --chat too.")


def chat_template_kwargs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the object of --chat-template-kwargs; an empty one without it.

    Raises:
        UserError: it is not an object in JSON.
    """
    variables = parse_json(options.chat_template_kwargs or "{}", "--chat-template-kwargs")
    if not isinstance(variables, dict):
        raise UserError("--chat-template-kwargs must be an object in JSON.")
    return variables
