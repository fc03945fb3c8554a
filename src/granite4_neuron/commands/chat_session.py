"""Handles each message of a chat: answers it, or runs a command that begins with a slash."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from granite4_neuron.commands.output import ProgressBar, peak_memory_bytes, print_table, size, write
from granite4_neuron.commands.system_errors import as_user_errors
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.generation import Conversation

# The argument and the help of each.
COMMANDS = {
    "/system": ("[TEXT]", "show the system message, or set it; - removes it"),
    "/undo": ("", "take back the last message and its answer"),
    "/retry": ("", "answer the last message again"),
    "/clear": ("", "begin a new conversation; the system message stays"),
    "/save": ("FILE", "write the conversation and its state"),
    "/load": ("FILE", "continue a saved conversation"),
    "/stats": ("", "tokens, speed and memory"),
    "/help": ("", "show this"),
    "/exit": ("", "leave, as Ctrl-D does"),
}
# Characters that a terminal would interpret instead of showing; line feeds and tabs are allowed.
_CONTROL_CHARACTERS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class Input(Protocol):
    """A source of messages."""

    def read(self) -> str | None:
        """Read the next message; None at the end."""


class Session:
    """Answers messages until there are no more.

    Args:
        is_terminal: whether it is interactive. Then errors do not end the chat, and Ctrl-C stops an answer.
    """

    def __init__(self, conversation: Conversation, messages: Input, is_terminal: bool):
        self._conversation = conversation
        self._messages = messages
        self._is_terminal = is_terminal

    def run(self) -> int:
        """Run the chat; return the exit status.

        Raises:
            UserError: a message could not be answered, and the chat is not interactive.
        """
        if self._is_terminal:
            write("/help lists commands, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D leaves.")
        while (message := self._messages.read()) is not None and message.strip() != "/exit":
            try:
                with as_user_errors():
                    self._handle(message)
            except UserError as error:
                if not self._is_terminal:
                    raise
                _note(str(error))
        return 0

    def _handle(self, message: str) -> None:
        command, _, argument = message.strip().partition(" ")
        if not command:
            return
        if not command.startswith("/") or command.startswith("//"):
            self._answer(message[1:] if command.startswith("//") else message)
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
        with self._interruptible(), ProgressBar("prompt", "tokens") as progress:
            for text in self._conversation.ask(message, progress):
                self._write(text, end="")
        write("")
        if len(self._conversation.turns) == num_turns:
            _note("stopped before the answer began; the message is not part of the conversation.")
        elif (reason := self._conversation.turns[-1].finish_reason) != "stop":
            _note("stopped." if reason == "interrupted" else "the answer was cut at its longest; see --max-tokens.")

    def _write(self, text: str, end: str = "\n") -> None:
        """Print text of a model or a user."""
        write(text.translate(_CONTROL_CHARACTERS) if self._is_terminal else text, end=end)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let Ctrl-C stop the answer and not the program within the block, if the chat is interactive."""
        if not self._is_terminal:
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self._conversation.interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "-" else text
        else:
            self._write(self._conversation.system or "There is no system message.")

    def _undo(self) -> None:
        _note(f"took back: {self._conversation.undo().user}")

    def _retry(self) -> None:
        turn = self._conversation.undo()
        num_turns = len(self._conversation.turns)
        try:
            self._answer(turn.user)
        finally:
            if len(self._conversation.turns) == num_turns:  # it failed, and the answer that was there stays
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
        conversation, last, cache = self._conversation, self._conversation.last_stats, self._conversation.cache_stats
        yield "turns", f"{len(conversation.turns)}"
        yield "tokens", f"{conversation.num_tokens:,} of {conversation.max_length:,}"
        if last.generated_tokens:
            yield "last prompt", f"{last.cached_tokens:,} tokens kept, {last.prompt_tokens:,} run"
            yield "its speed", f"{last.prompt_tokens_per_second:.1f} tokens/s"
            yield "last answer", f"{last.generated_tokens:,} tokens, {last.decode_tokens_per_second:.1f} tokens/s"
        if last.drafted_tokens:
            yield "speculation", f"{last.acceptance_rate:.0%} of {last.drafted_tokens:,} drafts accepted"
        yield "kept states", f"{cache.snapshots}, {size(cache.num_bytes)}; {cache.evictions} evicted"
        yield "peak memory", size(peak_memory_bytes())

    def _help(self) -> None:
        from rich.table import Table

        table = Table(show_header=False, box=None)
        for command, (takes, what) in COMMANDS.items():
            table.add_row(f"{command} {takes}".replace("[", r"\["), what)
        print_table(table)


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
        raise UserError(f"{file} is in a home folder that is not known; write the whole path.") from None


def _note(text: str) -> None:
    """Print a remark about the chat on standard error."""
    text = text.translate(_CONTROL_CHARACTERS)
    print(f"({text})" if sys.stderr.isatty() else text, file=sys.stderr)
