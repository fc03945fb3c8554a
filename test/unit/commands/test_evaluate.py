"""`evaluate` as a person types it: perplexity of files and of standard input, and the table of formats."""

import io
import json
import math
import re
import sys

import pytest

from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.commands.cli import main
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.ops import FORMATS

TEXT = "Words that a model has never seen: brouillé, Καλημέρα. " * 6  # 1 token per byte


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def evaluate(capsys, monkeypatch, texting_folder):
    """Return a function that runs the command and returns (status, standard output, standard error)."""

    def command(*arguments, stdin=None):
        monkeypatch.setattr(sys, "stdin", Terminal() if stdin is None else io.StringIO(stdin))
        status = main([str(argument) for argument in ("evaluate", *arguments, "--model", texting_folder)])
        return status, *capsys.readouterr()

    return command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def without_speed(output):
    return output[: output.index("speed")]


def test_a_file_and_standard_input(evaluate, file, tmp_path):
    status, output, _ = evaluate(file, "--json", tmp_path / "numbers.json")
    length = len(TEXT.encode())
    assert status == 0
    assert f"scored: {length - 1:,} tokens, {length - 1:,} bytes, in one context" in output
    (numbers,) = json.loads((tmp_path / "numbers.json").read_text())
    perplexity = numbers["perplexity"]
    assert f"perplexity: {perplexity:.4f} per token, {perplexity:.4f} per byte" in output, "each token is a byte"
    assert perplexity == pytest.approx(math.exp(numbers["nats_per_token"]))
    assert numbers["format"] is numbers["kl_divergence"] is numbers["weight_bytes"] is None
    assert without_speed(evaluate("-", stdin=TEXT)[1]) == without_speed(output)
    assert without_speed(evaluate(stdin=TEXT)[1]) == without_speed(output)


def test_windows(evaluate, file):
    length = len(TEXT.encode())
    assert f"scored: {length - 1:,} tokens" in evaluate(file, "--window", 100)[1]
    assert (
        f"{length - 1:,} bytes, in {math.ceil((length - 100) / 50) + 1} windows" in evaluate(file, "--window", 100)[1]
    )
    num_windows = math.ceil(length / 100)
    output = evaluate(file, "--window", 100, "--stride", 100)[1]
    assert (
        f"scored: {length - num_windows:,} tokens, {length - num_windows:,} bytes, in {num_windows} windows" in output
    )
    assert "in one context" in evaluate(file, "--stride", 100)[1], "the window is the model's longest sequence"


@pytest.mark.slow
def test_the_table_of_formats(evaluate, file, tmp_path, texting_folder):
    # The model is in float32, for which no format without loss is accepted.
    formats = (*DTYPES, *(name for name in QUANTIZATIONS if FORMATS[name].lossless_dtype is None))
    alone = {}
    for name in formats:
        option = "--quantize" if name in QUANTIZATIONS else "--dtype"
        evaluate(file, option, name, "--json", tmp_path / "one.json")
        (alone[name],) = json.loads((tmp_path / "one.json").read_text())
    status, output, _ = evaluate(file, "--compare", *formats, "--json", tmp_path / "all.json")
    compared = {each["format"]: each for each in json.loads((tmp_path / "all.json").read_text())}
    assert status == 0 and list(compared) == ["float32", *(name for name in formats if name != "float32")]
    assert all(re.search(rf"│ {name} ", output) for name in formats)
    for name in formats:
        assert compared[name]["perplexity"] == alone[name]["perplexity"]
        assert compared[name]["prefill_tokens_per_second"] > 0 and compared[name]["decode_tokens_per_second"] > 0
    assert compared["float32"]["kl_divergence"] == 0
    assert 0 < compared["float16"]["kl_divergence"] < compared["bfloat16"]["kl_divergence"] < 0.1
    weights = sum(weight.numel() for weight in load_model(texting_folder).parameters())
    assert compared["float32"]["weight_bytes"] == 4 * weights
    assert compared["bfloat16"]["weight_bytes"] == 2 * weights
    assert weights <= compared["int8"]["weight_bytes"] <= 1.5 * weights


def test_the_reference_is_always_there(evaluate, file):
    output = evaluate(file, "--compare", "bfloat16")[1]
    assert output.index("float32") < output.index("bfloat16")


def test_refusals(evaluate, file, tmp_path):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    (tmp_path / "long").write_text("x" * 601)
    for arguments, message in (
        ([], "there is no text; give a file, or the text on standard input."),
        ([tmp_path / "none"], "cannot be read (No such file or directory)"),
        ([tmp_path / "latin"], "is not text in UTF-8"),
        ([tmp_path / "long"], "the text has 601 tokens and this model's longest sequence 600; give --window."),
        ([file, "--window", 601], "--window is 601; this model's longest sequence is 600."),
        ([file, "--window", 10, "--stride", 11], "the stride is 11; it must be at least 1 and at most the window, 10."),
        ([file, "--compare", "int3"], "invalid choice: 'int3'"),
        ([file, "--compare", "int8", "--quantize", "int8"], "leave out --quantize and --backend"),
        ([file, "--json", tmp_path / "none" / "x"], "there is no such folder"),
    ):
        status, output, error = evaluate(*arguments)
        assert (status, output) == (2, "") and message in error, error
        assert error.count("\n") == 1
    status, output, error = evaluate(stdin="a")
    assert status == 2 and "the text has 1 tokens" in error
    status, output, error = evaluate("-", stdin="some \udcff bytes")
    assert (status, output, error) == (2, "", "granite4-neuron: standard input is not text in UTF-8.\n")
    assert evaluate(tmp_path / "long", "--window", 600)[0] == 0


def test_a_quantized_checkpoint_has_no_float32_to_compare_with(tmp_path, file, texting_folder, capsys):
    assert main(["convert", "--model", str(texting_folder), "--quantize", "int8", "--output", str(tmp_path / "q")]) == 0
    assert main(["evaluate", str(file), "--model", str(tmp_path / "q")]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(file), "--model", str(tmp_path / "q"), "--compare", "bfloat16"]) == 2
    assert "has its weights in int8; --compare needs the original" in capsys.readouterr().err


def test_closed_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    for arguments in (["evaluate"], ["evaluate", "-"]):
        assert main(arguments) == 2
        assert "there is no text; give a file, or the text on standard input." in capsys.readouterr().err


def test_bytes_of_a_character_in_two_tokens(evaluate):
    assert "scored: 1 tokens, 1 bytes" in evaluate(stdin="é")[1]
