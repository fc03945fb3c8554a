import io
import shutil
import sys

import pytest

from granite4_neuron.commands.cli import main


@pytest.fixture
def folder(texting_folder, tmp_path):
    """Copy the random checkpoint with a tokenizer, so that a test can damage it."""
    return shutil.copytree(texting_folder, tmp_path / "model")


@pytest.fixture
def refuses(capsys, monkeypatch):
    """Return a function that runs the command and returns its one-sentence refusal. Any other result is a failure."""

    def refuses(*arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        status = main([str(argument) for argument in arguments])
        output, error = capsys.readouterr()
        return sentence(status, output, error)

    return refuses


def sentence(status: int, output: str, error: str) -> str:
    """Check that a command refused with one sentence on standard error and status 2, and return the sentence."""
    assert (status, output) == (2, ""), (status, output, error)
    assert error.startswith("granite4-neuron: ") and error.endswith((".\n", "?\n")) and error.count("\n") == 1, error
    return error.removeprefix("granite4-neuron: ").removesuffix("\n")
