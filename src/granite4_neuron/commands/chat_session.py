"""Handles each message of a chat: answers it, or runs a command that begins with a slash."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from granite4_neuron.commands.options import read_text
from granite4_neuron.commands.output import ProgressBar, peak_memory_bytes, print_table, size, write
from granite4_neuron.commands.system_errors import as_user_errors
from granite4_neuron.commands.terminal_guard import kept_if_it_ends, keys_are_kept, mark_pasted_text
from granite4_neuron.errors import UserError
from granite4_neuron.system.signals import handling

if TYPE_CHECKING:
    from granite4_neuron.generation import Conversation

# The argument and the help of each.
COMMANDS = {
    "/system": ("[TEXT]", "show the system message, or set it; - removes it"),
    "/set": ("[NAME VALUE]", "show the options of answers, or set one; - takes the checkpoint's value"),
    "/read": ("FILE", "put the text in FILE before the next message"),
    "/undo": ("", "take back the last message and its answer"),
    "/retry": ("", "answer the last message again"),
    "/clear": ("", "begin a new conversation; the system message stays"),
    "/save": ("FILE", "write the conversation and its state"),
    "/load": ("FILE", "continue a saved conversation"),
    "/stats": ("", "tokens, speed and memory"),
    "/help": ("", "show this"),
    "/exit": ("", "leave, as Ctrl-D does"),
}
_MOST_DIGITS = 19  # of a seed


class Input(Protocol):
    """A source of messages."""

    def read(self) -> str | None:
        """Read the next message; None at the end."""


class Session:
    """Answers messages until there are no more.

    Args:
        is_terminal: whether it is interactive. Then errors do not end the chat, and Ctrl-C stops an answer.
        is_verbose: whether the speed of each answer is reported.
    """

    def __init__(self, conversation: Conversation, messages: Input, is_terminal: bool, is_verbose: bool = False):
        self._conversation = conversation
        self._messages = messages
        self._is_terminal = is_terminal
        self._is_verbose = is_verbose
        self._read_text = ""  # to go before the next message
        # The handler of Ctrl-C reads these.
        self._is_answering = self._is_stoppable = False

    def run(self) -> int:
        """Run the chat; return the exit status.

        Raises:
            UserError: a message could not be answered, and the chat is not interactive.
        """
        if not self._is_terminal:
            while (message := self._next()) is not None:
                with as_user_errors():
                    self._handle(message)
            return 0
        write("/help lists commands, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D leaves.")
        with keys_are_kept(), handling([signal.SIGINT], self._ctrl_c), kept_if_it_ends(self._conversation):
            while (message := self._next()) is not None:
                mark_pasted_text()
                self._try(message)
        return 0

    def _next(self) -> str | None:
        """Read the next message; None at the end."""
        message = self._messages.read()
        return None if message is None or message.strip() == "/exit" else message

    def _try(self, message: str) -> None:
        """Handle a message; an error or Ctrl-C ends its handling, not the chat."""
        try:
            self._is_stoppable = True
            try:
                with as_user_errors():
                    self._handle(message)
            finally:
                self._is_stoppable = False
        except UserError as error:
            _note(str(error))
        except KeyboardInterrupt:
            _note("stopped.")

    def _ctrl_c(self, *_: object) -> None:
        """End the answer after its current step, or a command at once; between them do nothing."""
        if self._is_answering:
            self._conversation.interrupt()
        elif self._is_stoppable:
            self._is_stoppable = False
            raise KeyboardInterrupt

    def _handle(self, message: str) -> None:
        command, _, argument = message.strip().partition(" ")
        if not command:
            return
        if not command.startswith("/") or command.startswith("//"):
            read, self._read_text = self._read_text, ""
            self._answer(read + (message[1:] if command.startswith("//") else message))
            return
        if command not in COMMANDS:
            raise UserError(f"there is no command {command}; /help lists them, and // begins a message with a slash.")
        takes, argument = COMMANDS[command][0], argument.strip()
        if argument and not takes:
            raise UserError(f"{command} takes nothing.")
        if takes == "FILE" and not argument:
            raise UserError(f"{command} needs a file: {command} FILE.")
        getattr(self, f"_{command[1:]}")(*[argument] if takes else [])

    def _answer(self, message: str) -> None:
        num_turns = len(self._conversation.turns)
        self._is_answering = True
        try:
            with ProgressBar("prompt", "tokens") as progress:
                for text in self._conversation.ask(message, progress):
                    write(text, end="")
        finally:
            self._is_answering = False
        write("")
        if len(self._conversation.turns) == num_turns:
            _note("stopped before the answer began; the message is not part of the conversation.")
        elif (reason := self._conversation.turns[-1].finish_reason) != "stop":
            _note("stopped." if reason == "interrupted" else "the answer was cut at its limit; see --max-tokens.")
        if self._is_verbose:
            _note(", ".join(f"{name}: {value}" for name, value in self._speed()))

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "-" else text
            _note("there is no system message now." if text == "-" else "the system message is set.")
        else:
            write(self._conversation.system or "There is no system message.")

    def _set(self, text: str) -> None:
        options, (name, _, value) = _options(), text.replace("=", " ").partition(" ")
        if not text:
            given = {name: self._conversation.option(name) for name in options}
            write("\n".join(f"{name} {'-' if value is None else value}" for name, value in given.items()))
            return
        if name not in options or not value.strip():
            raise UserError(f"/set takes a name and a value; the names are {', '.join(options)}.")
        value = value.strip()
        self._conversation.set_option(name, _number(value) if name != "adapter" or value == "-" else value)
        default = "no adapter answers." if name == "adapter" else f"{name} is the checkpoint's."
        _note(f"{name} is {value}." if value != "-" else default)

    def _read(self, file: str) -> None:
        text = read_text(str(_path(file)), "")
        self._read_text += f"{text.rstrip()}\n\n"
        _note(f"read {file}: {len(text):,} characters, which go before the next message.")

    def _undo(self) -> None:
        _note(f"took back: {self._conversation.undo().user}")

    def _retry(self) -> None:
        if not self._conversation.turns:
            raise UserError("there is no message to answer again.")
        turn = self._conversation.undo()
        num_turns = len(self._conversation.turns)
        try:
            self._answer(turn.user)
        finally:
            if len(self._conversation.turns) == num_turns:  # it failed, and the earlier answer stays
                self._conversation.turns.append(turn)

    def _clear(self) -> None:
        self._conversation.clear()

    def _save(self, file: str) -> None:
        self._conversation.save(_path(file))
        _note(f"wrote {file}")

    def _load(self, file: str) -> None:
        self._conversation.load(_path(file))
        _note(f"read {file}: {self._conversation.num_tokens:,} tokens")

    def _stats(self) -> None:
        from rich.table import Table

        table = Table(show_header=False)
        for name, value in self._facts():
            table.add_row(name, value)
        print_table(table)

    def _facts(self) -> Iterator[tuple[str, str]]:
        conversation, cache = self._conversation, self._conversation.cache_stats
        yield "turns", f"{len(conversation.turns)}"
        yield "tokens", f"{conversation.num_tokens:,} of {conversation.max_length:,}"
        yield from self._speed()
        yield "kept states", f"{cache.snapshots}, {size(cache.num_bytes)}; {cache.evictions} evicted"
        yield "peak memory", size(peak_memory_bytes())

    def _speed(self) -> Iterator[tuple[str, str]]:
        last = self._conversation.last_stats
        if last.generated_tokens:
            yield "last prompt", f"{last.cached_tokens:,} tokens kept, {last.prompt_tokens:,} run"
            yield "its speed", f"{last.prompt_tokens_per_second:.1f} tokens/s"
            yield "last answer", f"{last.generated_tokens:,} tokens, {last.decode_tokens_per_second:.1f} tokens/s"
        if last.drafted_tokens:
            yield "speculation", f"{last.acceptance_rate:.0%} of {last.drafted_tokens:,} drafts accepted"

    def _help(self) -> None:
        from rich.table import Table

        table = Table(show_header=False, box=None)
        for command, (takes, what) in COMMANDS.items():
            table.add_row(f"{command} {takes}".replace("[", r"\["), what)
        print_table(table)


def _options() -> list[str]:
    """Return the names of the options of answers that /set changes."""
    # Not at the top: it imports torch.
    from granite4_neuron.engine.sampling_params import SAMPLING_OPTIONS

    return [*(name for name, rule in SAMPLING_OPTIONS.items() if rule.is_setting), "max_tokens", "adapter"]


def _number(text: str) -> float | None:
    """Return the value that /set was given; None for -.

    Raises:
        UserError: it is neither a number nor a -.
    """
    if text == "-":
        return None
    try:
        return int(text) if text.lstrip("-").isdecimal() and len(text) <= _MOST_DIGITS else float(text)
    except ValueError:
        raise UserError(f"{text[:40]} is not a number; - takes the checkpoint's value.") from None


def _path(file: str) -> Path:
    """
    Raises:
        UserError: no file can have this name.
    """
    if "\0" in file:
        raise UserError(f"{file} has a null character, which no name of a file has.")
    try:
        return Path(file).expanduser()
    except RuntimeError:
        raise UserError(f"cannot expand ~ in {file}; give an absolute path.") from None


def _note(text: str) -> None:
    """Print a remark about the chat on standard error."""
    print(f"({text})" if sys.stderr.isatty() else text, file=sys.stderr)
