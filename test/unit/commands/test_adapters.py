"""--adapter as a person types it: texts of generate and chat, and one sentence for every bad input."""

import io
import sys

import pytest

pytest.importorskip("peft", reason="peft is not installed")

from granite4_neuron import generate, load
from granite4_neuron.commands.cli import main
from granite4_neuron.devices.cpu import operators as cpu
from test.support.adapters import save_adapter

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

PROMPT = "A text"
COMMON = ("--ignore-eos", "--max-tokens", "6")


@pytest.fixture(scope="module")
def adapters(texting_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(texting_folder, folder / name, seed) for seed, name in enumerate(["red", "blue"])}


@pytest.fixture(scope="module")
def texts(texting_folder, adapters):
    """Return the text of the model and of each adapter."""
    model = load(texting_folder, adapters=adapters)
    return {name: generate(*model, PROMPT, max_tokens=6, ignore_eos=True, adapter=name) for name in (None, *adapters)}


@pytest.fixture
def run(capsys, texting_folder):
    """Return a function that runs a command and returns (status, standard output, standard error)."""

    def command(name, *arguments):
        return main([name, "--model", str(texting_folder), *map(str, arguments)]), *capsys.readouterr()

    return command


def test_generate(run, adapters, texts):
    assert len(set(texts.values())) == 3
    assert run("generate", PROMPT, *COMMON, "--adapter", f"red={adapters['red']}")[1] == texts["red"] + "\n"
    options = [part for name, folder in adapters.items() for part in ("--adapter", f"{name}={folder}")]
    _, output, _ = run("generate", PROMPT, *COMMON, *options, "--prefix-cache", "1GiB")
    assert output == "".join(f"=== {name}: {PROMPT}\n{texts[name]}\n\n" for name in adapters)


def test_chat(run, adapters, monkeypatch, tmp_path):
    """Both adapters answer as the conversation goes on; the second is set on the way."""
    file = tmp_path / "saved"
    lines = ["Hello", "/undo", "/set adapter blue", "Hello", "/undo", "/set adapter -", "Hello", f"/save {file}"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    options = [part for name, folder in adapters.items() for part in ("--adapter", f"{name}={folder}")]
    status, output, error = run("chat", *options, "--max-tokens", 6)
    assert status == 0 and file.exists()
    assert "adapter is blue." in error and "no adapter answers." in error
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    _, one, _ = run("chat", "--adapter", f"blue={adapters['blue']}", "--max-tokens", 6)
    answers = output.removesuffix("\n").split("\n")
    assert len(answers) == 3 and len(set(answers)) == 3 and answers[1] == one.removesuffix("\n")


@pytest.mark.parametrize(
    ("command", "lines", "message"),
    [
        ("chat", "/set adapter green", "no adapter 'green'; there are red"),
        ("chat", "Hello\n/save saved", "the state of the model without adapters"),
    ],
)
def test_refusals_of_chat(run, adapters, monkeypatch, tmp_path, command, lines, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    status, _, error = run(command, "--adapter", f"red={adapters['red']}", "--max-tokens", 2)
    assert status != 0 and message in error
    assert not list(tmp_path.iterdir())


BAD = {
    "no name": (["--adapter", "RED"], "must be NAME=FOLDER"),
    "an empty name": (["--adapter", "=RED"], "must be NAME=FOLDER"),
    "two of a name": (["--adapter", "a=RED", "--adapter", "a=RED"], "two adapters a"),
    "no folder": (["--adapter", "a=nowhere"], "nowhere is not a folder"),
    "another backend": (["--adapter", "a=RED", "--backend", "torch"], "convert --adapter FOLDER merges"),
    "other kernels": (["--adapter", "a=RED", "--cpu-kernels", "torch"], "convert --adapter FOLDER merges"),
    "a file of a state": (["--adapter", "a=RED", "--prompt-cache", "f"], "leave out --adapter"),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals_of_generate(run, adapters, case):
    options, message = BAD[case]
    status, output, error = run("generate", PROMPT, *(each.replace("RED", str(adapters["red"])) for each in options))
    assert status != 0 and not output
    assert message in error and "Traceback" not in error


def test_serve_refuses_one_name_for_two(run, adapters):
    status, _, error = run("serve", "--served-model-name", "red", "--adapter", f"red={adapters['red']}", "--port", 0)
    assert status != 0 and "both named red" in error
