"""The option --json-schema."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from granite4_neuron.engine import Constraint
    from granite4_neuron.runtime.interface import Runtime


def add_json_schema(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--json-schema",
        metavar="FILE_OR_TEXT",
        help="write JSON that is valid by this schema, which is in a file or begins with {; {} is for any JSON",
    )


def constraint(options: argparse.Namespace, runtime: Runtime, tokenizer: PreTrainedTokenizerFast) -> Constraint | None:
    """Return the constraint of --json-schema; None without it.

    Raises:
        UserError: the file cannot be read, or as `Grammars.constraint`.
    """
    given = options.json_schema
    if given is None:
        return None
    schema = given if given.lstrip().startswith("{") else read_text(given, "--json-schema needs a file or a schema.")
    # Not at the top: without the option nothing needs it.
    from granite4_neuron.generation.structured_outputs import Grammars

    with closing(Grammars(tokenizer, runtime.config.vocab_size)) as grammars:
        return grammars.constraint("json", schema)
