"""The `granite4-neuron` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import transformers

from granite4_neuron.commands import check, compile, convert, generate, graphs, info, plan
from granite4_neuron.commands.options import EXAMPLES
from granite4_neuron.errors import UserError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="granite4-neuron",
        description="IBM Granite 4.0 hybrid models (Mamba-2, attention, mixture of experts).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")
    for command in (generate, info, check, graphs, plan, compile, convert):
        command.add_parser(commands)
    return parser


def _drop_output() -> None:
    """Keep the interpreter from complaining again when it flushes what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
