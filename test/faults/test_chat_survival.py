"""A conversation in a terminal survives what is typed and pasted, and is kept if the program must end."""

import io
import json
import os
import random
import shutil
import signal
import sys
import time

import pytest

from granite4_neuron.commands.cli import main
from test.support.checkpoints import save_endless
from test.support.pseudo_terminal import COLUMNS, COMMAND, ROWS, PseudoTerminal

pytest.importorskip("prompt_toolkit", reason="prompt_toolkit is not installed")

QUESTION = b"What is the assert statement?\r"
PROMPT = "\x1b[6n\x1b[?2004h"  # prompt_toolkit first asks for the cursor's position and for bracketed paste
ROUNDS = 40


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """Return the bundled model with an end-of-sequence token that it never generates."""
    return save_endless(tmp_path_factory.mktemp("models") / "endless")


@pytest.fixture
def chat(tmp_path):
    """Return a function that starts a chat at a pseudo-terminal and asks a question, if there is one."""
    started = []

    def start(*options, program=COMMAND, question=QUESTION, is_ready=PROMPT, **environment):
        places = dict(cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
        at = PseudoTerminal(*program, "chat", *options, **places, **environment)
        started.append(at)
        at.wait_for(is_ready)
        if question:
            ask(at, question)
        return at

    yield start
    for at in started:
        at.close()


@pytest.fixture(scope="module")
def talk(endless, tmp_path_factory):
    """Return a chat that many tests share and that must survive all of them. Its answers take a while."""
    folder = tmp_path_factory.mktemp("talk")
    with PseudoTerminal(*COMMAND, "chat", "--model", endless, cwd=folder, XDG_STATE_HOME=str(folder)) as at:
        at.folder = folder
        wait_for_prompt(at, 0)
        ask(at, b"/set max_tokens 400\r")
        ask(at, QUESTION)
        yield at


def wait_for_prompt(at, after):
    return at.wait_for(PROMPT, after)


def ask(at, keys):
    before = len(at.written)
    at.type(keys)
    wait_for_prompt(at, before)
    return at.written[before:]


def turns(at):
    """Clear what is typed, and return how many turns /stats shows."""
    for _ in range(20):
        # Three, because one may end pasted text, and Ctrl-Q may quote another.
        at.type(b"\x03\x03\x03")
        time.sleep(0.2)  # when a person presses Ctrl-C, nothing follows it at once
        before = len(at.written)
        at.type(b"/stats\r")
        try:
            shown = at.wait_for("peak memory", before, patience=10)
        except AssertionError:
            assert at.process.poll() is None, at.written[-3000:]
            continue  # an earlier key took a part of /stats
        return int(shown.partition("│ turns       │ ")[2].split()[0])
    raise AssertionError(at.written[-3000:])


def begin_answer(at):
    start = len(at.written)
    at.type(b"talk\r")
    at.wait_for(lambda written: len(written.partition("\x1b[?2004l")[2]) > 100, start)


def kept_in(at):
    """Return the messages in the file that the chat named when it ended."""
    file = at.written.partition("the conversation is in ")[2].partition(";")[0]
    assert os.stat(file).st_mode & 0o777 == 0o600
    with open(file, encoding="utf-8") as stream:
        return file, json.load(stream)


class TestKeys:
    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        "keys",
        [
            b"\x1b[31m",
            b"\x1b[31mred\x1b[0m\r",
            b"\x1b[1;1;1M\x1b[<0;1;1M\x1b[<99;99;99m\x1b[M   \x1b[M\xff\xff\xff\x1b[;m\x1b[<m",
            b"\x1b[0;0R\x1b[99999999;1R\x1b[" + b"9" * 4400 + b";1R",
            b"\xff\xfe\x80\xc3(\xed\xb2\x80\r",
            b"\x1b[200~never ended\r\r\x1c\x1a\x04",
            b"\x1c\x1a\x13\x11\x0f\x16",
            bytes(byte for byte in range(256) if byte not in b"\x04\r\n"),
            b"".join(b"\x1b" + bytes([byte]) for byte in range(256) if byte not in b"\x04\r\n"),
        ],
        ids=lambda keys: repr(keys)[2:30],
    )
    def test_keys_during_an_answer_and_at_the_prompt_do_no_harm(self, talk, keys):
        before = len(talk.written)
        talk.type(keys)
        num_turns = turns(talk)
        assert num_turns >= 1
        begin_answer(talk)
        start = len(talk.written)
        talk.type(keys)
        wait_for_prompt(talk, start)
        assert turns(talk) > num_turns
        assert not complaints(talk.written[before:])

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
    def test_random_input_does_not_end_the_chat(self, talk, seed):
        chance, before = random.Random(seed), len(talk.written)
        ask(talk, b"/set max_tokens 30\r")
        for _ in range(ROUNDS):
            talk.type(chance.choice(KINDS)(chance))
            if chance.random() < 0.3:
                talk.resize(chance.choice([1, 2, 24, 200]), chance.choice([1, 5, 80, 300]))
            if chance.random() < 0.2:
                talk.process.send_signal(signal.SIGINT)
        talk.resize(ROWS, COLUMNS)
        assert turns(talk) >= 1
        ask(talk, b"/set max_tokens 400\r")
        assert not complaints(talk.written[before:])

    def test_pasted_text_is_one_message(self, talk):
        """Also if it is pasted during an answer, when the terminal marks it too."""
        num_turns = turns(talk)
        begin_answer(talk)
        start = len(talk.written)
        assert talk.written.rindex("\x1b[?2004h") > talk.written.rindex("\x1b[?2004l")
        talk.type(b"\x1b[200~two\nlines\x04\x1b[201~")
        wait_for_prompt(talk, start)
        ask(talk, b"\r")
        assert turns(talk) == num_turns + 2

    def test_repeated_ctrl_c_does_not_end_the_chat(self, talk):
        ask(talk, b"/set max_tokens 100000\r")
        num_turns = turns(talk)
        start = len(talk.written)
        begin_answer(talk)
        for _ in range(30):
            talk.type(b"\x03")
            talk.process.send_signal(signal.SIGINT)
        talk.wait_for("(stopped.)", start)
        assert turns(talk) == num_turns + 1 and not complaints(talk.written[start:])
        ask(talk, b"/set max_tokens 400\r")

    def test_ctrl_c_stops_a_command(self, talk):
        os.mkfifo(talk.folder / "pipe")
        num_turns, start = turns(talk), len(talk.written)
        talk.type(b"/read pipe\r")
        # By then the line editor no longer handles Ctrl-C, and the chat has turned bracketed paste on again.
        talk.wait_for(lambda written: "\x1b[?2004h" in written.partition("\x1b[?2004l")[2], start)
        talk.process.send_signal(signal.SIGINT)
        talk.wait_for("stopped.", start)
        assert turns(talk) == num_turns

    @pytest.mark.slow
    def test_a_dumb_terminal_gets_no_escape_sequences(self, chat):
        at = chat(question=None, is_ready="leaves.\n> ", TERM="dumb")
        at.type(QUESTION)
        at.wait_for("if __debug__")
        at.wait_for(lambda written: written.endswith("\n> "))
        at.type(b"\x04")
        assert at.ended() == 0 and "\x1b" not in at.written.partition("/help")[2]

    @pytest.mark.slow
    def test_an_error_of_the_line_editor_does_not_end_the_chat(self, chat):
        """The text typed before the error stays, and further keys work."""
        program = (
            "import prompt_toolkit.key_binding.bindings.named_commands as named, sys\n"
            "from prompt_toolkit.buffer import Buffer\n"
            "def fail(*_, **__): raise ValueError('planted \\x1b[2J')\n"
            "Buffer.undo = fail\n"
            "from granite4_neuron import __main__\n"
            "sys.exit(__main__.main())"
        )
        at = chat(program=(sys.executable, "-c", program))
        at.type(b"/sta\x1f")
        at.wait_for(r"(a key was not understood: ValueError: planted \x1b[2J)")
        at.type(b"ts\r")
        at.wait_for("peak memory")
        at.type(b"\x1f\x1f\x1f")
        assert turns(at) == 1


def complaints(written):
    return [word for word in ("Traceback", "Unhandled", "Warning", "was not understood") if word in written]


SEQUENCES = (
    *(b"\x1b[31m", b"\x1b[A", b"\x1b[5~", b"\x1bOP", b"\x1b[<35;10;10M", b"\x1b[M #!", b"\x1b[3;4R", b"\x1b[200~"),
    *(b"\x1b[201~", b"\x1b]0;x\x07", b"\x1b[I", b"\x1b[?1;2c", b"\x1b[1;5C", b"\x1b9", b"\x18(", b"\x18)", b"\x18e"),
    *(b"\t\t", b"\x12a", b"\x1f", b"\x11", b"\x1d", b"\xff", b"\xe2\x82", b"\x1b", b"\r", b"text\r", b"/undo\r"),
)
KINDS = (
    lambda chance: chance.randbytes(chance.randrange(60)).replace(b"\x04", b""),
    lambda chance: b"".join(chance.choices(SEQUENCES, k=chance.randrange(12))),
    lambda chance: b"\x1b[" + bytes(chance.choices(b"0123456789;<MmR~?", k=chance.randrange(1, 12))),
    lambda chance: b"\x1b[200~" + chance.randbytes(chance.randrange(200)) + chance.choice([b"", b"\x1b[201~"]),
    lambda chance: chance.choice([b"", b"/"]) + "\u202eña\U0001f600\x9b".encode() * chance.randrange(9) + b"\r",
)


class TestKept:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "number",
        [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive)],
        ids=lambda number: number.name,
    )
    def test_a_signal_keeps_the_conversation(self, chat, endless, number, capsys, monkeypatch):
        at = chat("--model", endless, "--max-tokens", 20, "--system", "Be brief.")
        if number == signal.SIGTERM:  # during an answer
            ask(at, b"/set max_tokens 100000\r")
            begin_answer(at)
        at.process.send_signal(number)
        assert at.ended() == 128 + number
        file, messages = kept_in(at)
        roles = [message["role"] for message in messages]
        assert roles == ["system", "user", "assistant"] and messages[1]["content"] == QUESTION.decode().strip()
        assert not complaints(at.written)
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"/load {file}\n/system\nGo on.\n/stats\n"))
        assert main(["chat", "--max-tokens", "5"]) == 0
        assert capsys.readouterr().out.startswith("Be brief.\n")

    @pytest.mark.slow
    def test_a_closed_terminal_keeps_the_conversation(self, chat, tmp_path):
        at = chat()
        at.hang_up()
        assert at.process.wait(60) == 128 + signal.SIGHUP
        (file,) = (tmp_path / "state" / "granite4-neuron").glob("chat_*.json")
        assert json.loads(file.read_text())[0]["content"] == QUESTION.decode().strip()

    @pytest.mark.slow
    def test_an_error_of_the_program_keeps_the_conversation(self, chat):
        program = (
            "import sys\n"
            "from granite4_neuron import __main__\n"
            "from granite4_neuron.commands.chat_session import Session\n"
            "def fail(self, *_): raise ZeroDivisionError('planted')\n"
            "Session._help = fail\n"
            "sys.exit(__main__.main())"
        )
        at = chat(program=(sys.executable, "-c", program))
        at.type(b"/help\r")
        assert at.ended() == 1
        _, messages = kept_in(at)
        assert len(messages) == 2 and "ZeroDivisionError: planted" in at.written

    @pytest.mark.slow
    def test_it_is_kept_elsewhere_if_no_folder_can_be_made(self, chat, tmp_path):
        at = chat()
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "state").write_text("a file")
        at.type(b"/system a message whose history cannot be written\r")
        assert turns(at) == 1
        at.process.terminate()
        at.ended()
        file, _ = kept_in(at)
        os.remove(file)

    @pytest.mark.slow
    def test_an_empty_chat_and_a_normal_exit_keep_nothing(self, chat, tmp_path):
        at = chat(question=None)
        at.process.terminate()
        assert at.ended() == 128 + signal.SIGTERM
        at = chat()
        at.type(b"\x04")
        assert at.ended() == 0
        assert not list((tmp_path / "state").rglob("*.json"))
