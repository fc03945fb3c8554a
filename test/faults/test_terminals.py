"""Text of a model, a file or a name reaches a terminal without control characters, in every command."""

import json
import os
import pty
import shutil
import sys
import threading

import pytest

from granite4_neuron.commands.cli import main
from granite4_neuron.commands.output import ProgressBar
from granite4_neuron.devices.cpu import build
from granite4_neuron.devices.cpu.tuning import Choice
from granite4_neuron.system import terminal
from test.support.pseudo_terminal import COMMAND, PseudoTerminal, foreign_controls, set_size, visible

# The title, the clipboard, colours that rich does not write, a line up, C1, the direction of text, back to the start.
HOSTILE = "\x1b]0;title\x07\x1b]52;c;eA==\x07\x1b[35;41mred\x1b[1A\x9b2J\x90\u202egnp.\u2066\x08\x7f\r"
NAME = HOSTILE.replace("/", "")
SHOWN = visible(HOSTILE)
RANDOM = ("--temperature", 100, "--seed", 2, "--max-tokens", 550, "--ignore-eos")


@pytest.fixture(scope="module")
def hostile_folder(texting_folder, tmp_path_factory):
    """Return the random checkpoint in a folder with a hostile name, with two more tokens that are hostile."""
    folder = shutil.copytree(texting_folder, tmp_path_factory.mktemp("hostile") / NAME)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    letters = {bytes([byte]): letter for byte, letter in _letters().items()}
    for text in ("\x9b", "\u202e"):
        spelled = "".join(letters[bytes([byte])] for byte in text.encode())
        vocabulary[spelled] = len(vocabulary)
    file.write_text(json.dumps(tokenizer))
    return folder


def _letters():
    """Return the letter of each byte in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


@pytest.fixture
def at_terminal(monkeypatch):
    """Return a function that runs a command whose outputs are a pseudo-terminal; it returns what was written there."""

    def run(*arguments):
        own, theirs = pty.openpty()
        set_size(own)
        written = bytearray()

        def read():
            try:
                while data := os.read(own, 65536):
                    written.extend(data)
            except OSError:  # the other side is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        monkeypatch.setenv("TERM", "xterm-256color")
        with open(theirs, "w", encoding="utf-8") as stream, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream)
            patched.setattr(sys, "stderr", stream)
            patched.setattr(sys, "stdin", None)
            main([str(argument) for argument in arguments])
        reader.join()
        os.close(own)
        return written.decode("utf-8", "replace").replace("\r\n", "\n")

    return run


@pytest.mark.slow
def test_a_models_text_is_shown_without_controls(hostile_folder, at_terminal, capfdbinary):
    """A file gets every byte. A terminal gets the text without the control characters that it would obey."""
    arguments = ("generate", "--model", hostile_folder, *RANDOM, "A")
    assert main(list(map(str, arguments))) == 0
    text = capfdbinary.readouterr().out.decode()
    assert {"\x1b", "\x07", "\r", "\x9b", "\u202e", "\n", "\t"} <= set(text), "it is hostile"
    shown = at_terminal(*arguments)
    assert not foreign_controls(shown)
    assert shown.endswith(visible(text)) and len(visible(text)) < len(text) - 40


def test_escape_sequences_in_pieces_are_caught(monkeypatch, capsys):
    """Text arrives as a model generates it, and one escape sequence may be several tokens."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    terminal.guard_streams()
    for piece in HOSTILE:
        print(piece, end="")
    sys.stdout.writelines(["\ta\x1b", "[2J\n"])
    assert capsys.readouterr().out == f"{SHOWN}\ta[2J\n"


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--model", "MODEL", "--max-tokens", 20, "--verbose", HOSTILE, "--ignore-eos", "--", f"x{HOSTILE}"),
        ("generate", "--file", NAME),
        ("generate", "--model", f"./{NAME}/x", "A"),
        ("info", "--model", "MODEL"),
        ("info", "--model", f"somebody/{NAME}"),
        ("plan", "--model", "MODEL"),
        ("plan", "--model", "MODEL", "--latency", "--context", 256),
        ("check", "--model", "MODEL", "--tokens", 1, "--prompt", HOSTILE, "--cpu-kernels", "torch"),
        ("check", "--model", "MODEL", "--layers", "--tokens", 1, "--prompt", "A", "--cpu-kernels", "torch"),
        ("evaluate", "--model", "MODEL", "FILE", "--cpu-kernels", "torch"),
        ("evaluate", "--model", "MODEL", "--compare", "int8", "--", "FILE"),
        ("convert", "--model", "MODEL", "--output", "NEW"),
        ("convert", "--model", "MODEL", "--adapter", NAME, "--output", "NEW"),
        ("tune", "--output", f"{NAME}/{NAME}"),
        ("graphs", "--json", f"{NAME}/{NAME}"),
        ("compile", "--model", "MODEL", "--output", f"{NAME}/{NAME}"),
        ("serve", "--host", NAME),
        ("chat", "--model", "MODEL", "--tools", NAME),
        ("chat", "--adapter", HOSTILE),
        (HOSTILE,),
        ("info", HOSTILE),
    ],
    ids=lambda arguments: repr(" ".join(map(str, arguments)).replace(HOSTILE, "HOSTILE"))[:60],
)
def test_names_are_shown_without_controls(arguments, hostile_folder, at_terminal, tmp_path):
    (tmp_path / NAME).write_text("Some text with \x1b[2J in it.")
    places = {"MODEL": hostile_folder, "FILE": tmp_path / NAME, "NEW": tmp_path / f"new{NAME}"}
    shown = at_terminal(*(places.get(each, each) for each in arguments))
    assert shown and not foreign_controls(shown)
    assert "\x1b[35;41m" not in shown and "\x1b[1A" not in shown.replace("\x1b[1A\x1b[2K", "")
    assert "Traceback" not in shown


@pytest.mark.skipif(build.load_kernels() is not None, reason="the fused kernels need a C++ compiler")
def test_tune_shows_a_name_without_controls(hostile_folder, at_terminal, monkeypatch, tmp_path):
    values = {"chunk_size": 64, "heads_per_task": 4, "torch_chunk_size": 64}
    choices = [Choice(name, {value: 1.0}, value) for name, value in values.items()]
    monkeypatch.setattr("granite4_neuron.devices.cpu.tuning.tune", lambda config, dtype, progress: choices)
    shown = at_terminal("tune", "--model", hostile_folder, "--output", tmp_path / NAME)
    assert "wrote" in shown and not foreign_controls(shown)


def test_prints_beside_a_progress_bar_lose_their_controls(monkeypatch, at_terminal):
    def run(options):
        with ProgressBar("weights", "bytes") as progress:
            progress(1, 3)
            print(HOSTILE, file=sys.stderr)
            progress(2, 3)
            print(HOSTILE, file=sys.stderr)
        print(HOSTILE, file=sys.stderr)
        return 0

    monkeypatch.setattr("granite4_neuron.commands.info.run", run)
    shown = at_terminal("info")
    assert not foreign_controls(shown) and shown.count(SHOWN) == 3 and "35;41m" not in shown.replace("[35;41mred", "")
    assert "\x1b[35;41m" not in shown and "weights" in shown


def test_prints_beside_the_compilers_clock_lose_their_controls(monkeypatch, at_terminal):
    def run(options):
        with build._elapsed_time():
            print(HOSTILE, file=sys.stderr)
        return 0

    monkeypatch.setattr("granite4_neuron.commands.info.run", run)
    shown = at_terminal("info")
    assert "compiling" in shown and "\x1b[2K" in shown and SHOWN in shown and not foreign_controls(shown)


def test_bars_of_tqdm_lose_their_controls(monkeypatch, at_terminal):
    """They move the cursor, and their descriptions are the names of files."""
    from tqdm import tqdm

    def run(options):
        with terminal.bars_of_tqdm(), tqdm(total=3, desc=HOSTILE, mininterval=0) as bar:
            bar.update(2)
        return 0

    monkeypatch.setattr("granite4_neuron.commands.info.run", run)
    shown = at_terminal("info")
    assert "\r" in shown and not foreign_controls(shown) and "\x1b]" not in shown and "2/3" in shown


PROGRAM = f"""
import sys, warnings
from granite4_neuron import __main__
from granite4_neuron.commands import info
def run(options):
    warnings.warn({HOSTILE!r})
    raise RuntimeError({HOSTILE!r})
info.run = run
sys.exit(__main__.main())
"""


def test_a_traceback_is_shown_without_controls():
    with PseudoTerminal(sys.executable, "-c", PROGRAM, "info") as at:
        status = at.ended()
        shown = at.written
    assert status == 1 and f"RuntimeError: {SHOWN}" in shown and f"Warning: {SHOWN}" in shown
    assert not foreign_controls(shown) and "\x1b" not in shown


@pytest.mark.slow
def test_the_server_shows_names_without_controls(hostile_folder):
    pytest.importorskip("uvicorn", reason="the server's packages are not installed")
    options = ("--port", 0, "--served-model-name", f"model {HOSTILE}", "--adapter", f"{HOSTILE}=x")
    with PseudoTerminal(*COMMAND, "--log-level", "info", "serve", "--model", hostile_folder, *options[:4]) as at:
        at.wait_for("a chat in the browser")
        at.process.terminate()
        assert at.ended() == 0
        shown = at.written
    assert f"Serving model {SHOWN} at" in shown
    assert not foreign_controls(shown) and "\x1b[35;41m" not in shown
    with PseudoTerminal(*COMMAND, "serve", "--model", hostile_folder, *options) as at:
        assert at.ended() == 2 and not foreign_controls(at.written) and "\x1b" not in at.written


def test_other_streams_are_left_alone(capsys):
    before = sys.stdout, sys.stderr
    terminal.guard_streams()
    assert (sys.stdout, sys.stderr) == before
    print(HOSTILE)
    assert capsys.readouterr().out == f"{HOSTILE}\n"


def test_the_oracle_finds_foreign_controls():
    assert len(foreign_controls("a\x1b[31m b \x1b]0;x\x07 c\x9b \u202e\x00")) == 5
    assert not foreign_controls("\x1b[1;34mblue\x1b[0m\r\x1b[2K\x1b[1A\n\ttext")
