"""Sources of a chat's messages: a terminal, or the lines of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

CONTINUATION = "\\"  # at the end of a line: the message goes on in the next one


class PipedInput:
    """One message a line."""

    def read(self) -> str | None:
        """Read the next message; None at the end.

        Raises:
            UserError: it is not text.
        """
        lines = []
        try:
            while line := sys.stdin.readline() if sys.stdin is not None else "":
                lines.append(line.removesuffix("\n"))
                if not lines[-1].endswith(CONTINUATION):
                    break
        except UnicodeDecodeError:
            raise UserError("standard input is not text in UTF-8.") from None
        if not lines:
            return None
        return "\n".join([*(line.removesuffix(CONTINUATION) for line in lines[:-1]), lines[-1]])


class TerminalInput:
    """A line editor with a history that is kept between chats.

    Enter sends a message; Alt-Enter, and Enter after a backslash, begin a new line. Pasted text is one message.

    Args:
        commands: to complete.
    """

    def __init__(self, commands: Iterable[str]):
        # Not at the top: --help does not need it.
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter

        self._session: PromptSession[str] = PromptSession(
            message="> ",
            prompt_continuation="  ",
            multiline=True,
            history=_history(),
            key_bindings=_key_bindings(),
            completer=WordCompleter(sorted(commands), sentence=True),
            complete_while_typing=False,
            enable_history_search=True,
        )

    def read(self) -> str | None:
        """Read the next message; empty if Ctrl-C cleared the line, None at the end."""
        try:
            return self._session.prompt()
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None


def _history() -> History:
    """Return a history in the user's state folder, readable only by its owner; in memory if no file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "granite4-neuron"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "chat_history"
        file.touch(mode=0o600)
        with file.open("ab"):
            return FileHistory(file)
    except (OSError, RuntimeError):  # no HOME is a RuntimeError
        return InMemoryHistory()


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUATION):
            buffer.delete_before_cursor(len(CONTINUATION))
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
