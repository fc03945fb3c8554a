"""Keeps a chat at a terminal going whatever is typed or pasted, and keeps its conversation if the program must end.

While a message is edited, keys go to `chat_input.TerminalInput`. At all other times the terminal keeps them for the
next message, and Ctrl-C, the only key that is a signal then, calls what `Session` says. Everything else that ends the
program, an error of its own or a signal, passes through `kept_if_it_ends`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from granite4_neuron.system.signals import handling
from granite4_neuron.system.terminal import unguarded

if TYPE_CHECKING:
    from granite4_neuron.generation import Conversation

_SIGNALS_THAT_END = (signal.SIGTERM, signal.SIGHUP)
_MARK_PASTED_TEXT, _NO_MARKS = "\x1b[?2004h", "\x1b[?2004l"
_INPUT_FLAGS, _LOCAL_FLAGS, _KEYS = 0, 3, 6  # of termios.tcgetattr


@contextmanager
def keys_are_kept() -> Iterator[None]:
    """Within the block the terminal keeps typed text unchanged until it is read, and only Ctrl-C is a signal.

    By default a terminal shows typed text in the middle of an answer, edits it, stops all output at Ctrl-S, and ends
    the program at Ctrl-backslash.
    """
    before = termios.tcgetattr(sys.stdin)
    kept = termios.tcgetattr(sys.stdin)
    kept[_INPUT_FLAGS] &= ~termios.IXON
    kept[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    disabled = os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE")
    for key in (termios.VQUIT, termios.VSUSP):
        kept[_KEYS][key] = disabled
    kept[_KEYS][termios.VMIN], kept[_KEYS][termios.VTIME] = 1, 0
    termios.tcsetattr(sys.stdin, termios.TCSANOW, kept)
    try:
        yield
    finally:
        with suppress(OSError, termios.error):  # of a terminal that is gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
            _mark_pasted_text(False)


def mark_pasted_text() -> None:
    """Have the terminal mark pasted text, as the line editor does, until the line editor ends that.

    Pasted text then becomes part of one message, also if somebody pastes it during an answer.
    """
    _mark_pasted_text(True)


def _mark_pasted_text(is_marked: bool) -> None:
    # Not at the top: only a chat at a terminal needs it.
    from prompt_toolkit.utils import is_dumb_terminal

    if not is_dumb_terminal():
        output = unguarded(sys.stdout)
        output.write(_MARK_PASTED_TEXT if is_marked else _NO_MARKS)
        output.flush()


@contextmanager
def kept_if_it_ends(conversation: Conversation) -> Iterator[None]:
    """Write the conversation's messages into a file, and say into which, if an exception ends the block; SIGTERM and
    SIGHUP raise one.

    The file has no state: it is written at once, and an error may have left the state wrong.
    """
    handled = [number for number in _SIGNALS_THAT_END if signal.getsignal(number) != signal.SIG_IGN]  # by nohup
    with handling(handled, _end):
        try:
            yield
        except BaseException:
            for number in handled:
                signal.signal(number, signal.SIG_IGN)
            if conversation.turns:
                said = _keep(conversation)
                with suppress(OSError):  # of a terminal that is gone
                    print(f"granite4-neuron: {said}", file=sys.stderr)
            raise


def state_folder() -> Path:
    """Return the user's folder for what chats keep; make it if need be.

    Raises:
        OSError: it cannot be made.
        RuntimeError: no home folder is known.
    """
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "granite4-neuron"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # as a shell reports a signal; other exceptions would stay within the line editor


def _keep(conversation: Conversation) -> str:
    """Write the messages into a new file that only its owner can read; return a sentence that says where."""
    name = time.strftime("chat_%Y-%m-%d_%H-%M-%S_")
    for folder in (state_folder, lambda: Path(tempfile.gettempdir())):
        try:
            descriptor, file = tempfile.mkstemp(".json", name, folder())
            with open(descriptor, "w", encoding="utf-8", errors="replace") as stream:
                json.dump(conversation.messages, stream, ensure_ascii=False, indent=1)
            return f"the conversation is in {file}; /load {file} continues it in another chat."
        except (OSError, RuntimeError) as error:
            reason = error
    return f"the conversation could not be kept ({reason})."
