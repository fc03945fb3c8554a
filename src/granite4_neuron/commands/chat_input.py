"""Sources of a chat's messages: a terminal, or the lines of standard input."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from granite4_neuron.commands.terminal_guard import state_folder
from granite4_neuron.errors import UserError, printable
from granite4_neuron.system.terminal import unguarded

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

CONTINUATION = "\\"  # at the end of a line: the message goes on in the next one
_PASTE_BEGINS, _PASTE_ENDS = "\x1b[200~", "\x1b[201~"
_MOST_DIGITS = 10  # of a row
_MOST_ERRORS = 100  # of the line editor in one message
_EXIT_TERMINAL_GONE = 128 + signal.SIGHUP


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
        from prompt_toolkit.output import create_output
        from prompt_toolkit.utils import is_dumb_terminal

        self._session: PromptSession[str] = PromptSession(
            message="> ",
            prompt_continuation="  ",
            multiline=True,
            history=_history(),
            key_bindings=_key_bindings(),
            completer=WordCompleter(sorted(commands), sentence=True),
            complete_while_typing=False,
            enable_history_search=True,
            input=_keys(),
            # Without one, prompt_toolkit writes no escape sequences to a dumb terminal.
            output=None if is_dumb_terminal() else create_output(unguarded(sys.stdout)),
        )

    def read(self) -> str | None:
        """Read the next message; empty if Ctrl-C cleared the line, None at the end.

        Raises:
            SystemExit: the terminal is gone.
        """
        typed, num_errors = "", 0
        while True:
            try:
                return self._session.prompt(default=typed, pre_run=self._raise_errors, set_exception_handler=False)
            except KeyboardInterrupt:
                return ""
            except EOFError:
                if self._session.input.closed:
                    raise SystemExit(_EXIT_TERMINAL_GONE) from None
                return None
            except Exception as error:  # of the line editor or the history: a conversation is worth more than a key
                num_errors += 1
                if num_errors == _MOST_ERRORS:
                    raise
                typed = self._session.default_buffer.text
                print(printable(f"(a key was not understood: {type(error).__name__}: {error})"), file=sys.stderr)

    def _raise_errors(self) -> None:
        """Have `prompt` raise the errors of keys. By default prompt_toolkit raises only those of keys that
        were typed before, and shows a traceback of the rest.
        """
        app = self._session.app

        def end(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if app.is_running and not app.is_done:
                app.exit(exception=context.get("exception") or RuntimeError(context["message"]))

        asyncio.get_running_loop().set_exception_handler(end)


def _keys() -> Input:
    """Return standard input as keys. Bytes that are not text become the replacement character. Ctrl-C ends a pasted
    text whose end is not marked.
    """
    from prompt_toolkit.input.posix_utils import PosixStdinReader
    from prompt_toolkit.input.vt100 import Vt100Input

    class Reader(PosixStdinReader):
        is_in_paste, last = False, ""

        def read(self, count: int = 1024) -> str:
            text = super().read(count)
            if self.is_in_paste and text and not text.strip("\x03"):
                text = _PASTE_ENDS + text
            seen = self.last + text
            begins, ends = seen.rfind(_PASTE_BEGINS), seen.rfind(_PASTE_ENDS)
            if begins != ends:  # one of them is there
                self.is_in_paste = begins > ends
            self.last = seen[1 - len(_PASTE_BEGINS) :]
            return text

    keys = Vt100Input(sys.stdin)
    keys.stdin_reader = Reader(sys.stdin.fileno(), errors="replace", encoding=sys.stdin.encoding)
    return keys


def _history() -> History:
    """Return a history in the user's state folder, readable only by its owner; in memory if no file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class LenientHistory(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            with suppress(OSError):
                yield from super().load_history_strings()

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    try:
        file = state_folder() / "chat_history"
        file.touch(mode=0o600)
        with file.open("ab"):
            return LenientHistory(file)
    except (OSError, RuntimeError):  # no HOME is a RuntimeError
        return InMemoryHistory()


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUATION):
            buffer.delete_before_cursor(len(CONTINUATION))
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add(Keys.Vt100MouseEvent)
    def ignore(event: KeyPressEvent) -> None:
        """Colours look like a report of the mouse, and prompt_toolkit's own function takes nothing else."""

    @bindings.add(Keys.CPRResponse, save_before=lambda _: False)
    def report_row(event: KeyPressEvent) -> None:
        """Typed text may also look like a report of the cursor's place, with any number."""
        row = event.data[2:-1].partition(";")[0]
        if len(row) < _MOST_DIGITS and 1 <= int(row) <= event.app.output.get_size().rows:
            event.app.renderer.report_absolute_cursor_row(int(row))

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
