"""The `granite4-neuron` command."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from granite4_neuron.commands import (
    batch,
    chat,
    check,
    compile,
    convert,
    evaluate,
    generate,
    graphs,
    info,
    measure,
    plan,
    serve,
    tune,
    vllm_check,
)
from granite4_neuron.commands.help_format import HelpFormatter
from granite4_neuron.commands.output import OutputError
from granite4_neuron.commands.system_errors import as_user_errors
from granite4_neuron.errors import UserError
from granite4_neuron.system.signals import handling
from granite4_neuron.system.terminal import guard_streams

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_EXAMPLES = """\
examples:
  granite4-neuron generate "An assignment statement"  # the package's small model
  granite4-neuron chat --model ibm-granite/granite-4.0-h-350m
  granite4-neuron plan --model granite-4.0-h-small    # does it fit a Trainium?

Each command has its own help: granite4-neuron generate --help
"""
LOG_LEVELS = ("debug", "info", "warning", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    if sys.stderr is None:  # closed; print would use standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show every character
    guard_streams()
    with _interruptible_imports():
        try:
            with as_user_errors():
                options = _parsed(sys.argv[1:] if arguments is None else arguments)
                if options.command is None:
                    parser().print_help()
                    return 0
                _set_up_logging(options.log_level)
                return options.run(options)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            _drop_output()
            return EXIT_BROKEN_PIPE
        except OutputError as error:
            _drop_output()
            message = f"the output cannot be written ({error})."
        except UserError as error:
            message = str(error)
    print(f"granite4-neuron: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(
        prog="granite4-neuron",
        description="Run IBM's Granite 4.0 hybrid models and NVIDIA's Nemotron 3 on AWS Trainium, CPUs and GPUs.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
        add_help=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    on_any_device = generate, chat, serve, batch, info, convert, check, evaluate, tune, measure
    for command in (*on_any_device, plan, graphs, compile, vllm_check):
        command.add_parser(commands)
    # After the commands, so that the help lists those first.
    options = parser.add_argument_group("options")
    options.add_argument("-h", "--help", action="help", help="show this help message and exit")
    options.add_argument("--version", action=_Version, help="print the version and exit")
    options.add_argument(
        "--print-completion", action=_PrintCompletion, help="print a completion script for this shell and exit"
    )
    options.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="warning",
        help="how much is logged on standard error (default: warning)",
    )
    return parser


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments.

    Raises:
        UserError: they are wrong; for an unknown option with the one that was probably meant.
    """
    main_parser = parser()
    options, unknown = main_parser.parse_known_args(arguments)
    if not unknown:
        return options
    [commands] = (action for action in main_parser._actions if isinstance(action, argparse._SubParsersAction))
    command: argparse.ArgumentParser = commands.choices.get(options.command, main_parser)
    given = unknown[0].partition("=")[0].replace("_", "-")
    command.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(given, command._option_string_actions)}")


def _meant(given: str, known: Iterable[str]) -> str:
    """Return a question for what was probably meant; nothing if nothing is similar."""
    similar = difflib.get_close_matches(given, known, 1)
    return f"; did you mean {similar[0]}?" if similar else ""


class _Parser(argparse.ArgumentParser):
    """Reports bad arguments in one sentence, as all other code does."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _meant(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help).")


class _Version(argparse.Action):
    """Looks up the version only on demand."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None):
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        print(f"granite4-neuron {metadata.version('granite4-neuron')}")
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Prints a script made by shtab, which is imported only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None):
        super().__init__(option_strings, dest, choices=("bash", "zsh", "tcsh"), help=help)

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, *__: object) -> None:
        try:
            import shtab
        except ImportError:
            raise UserError("completion scripts are made by shtab; install it with: pip install shtab.") from None
        print(shtab.complete(parser, shell))
        parser.exit()


def _set_up_logging(level: str) -> None:
    """Set up logging for this package and for libraries, which read their level when they are imported later."""
    import logging

    logging.basicConfig(format="%(message)s", level=level.upper())
    for variable in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        # Their warnings are rarely about something that the user of a command could change.
        os.environ.setdefault(variable, "error" if level == "warning" else level)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def _interruptible_imports() -> Iterator[None]:
    """Let Ctrl-C during an import within the block end the process at once and silently.

    Half-imported C modules may not survive the exception, or may turn it into another one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handling([signal.SIGINT], _on_interrupt):
        yield


def _on_interrupt(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _drop_output() -> None:
    """Keep the interpreter from complaining again when it flushes unwritten output."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
