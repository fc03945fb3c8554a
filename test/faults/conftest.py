import io
import shutil
import sys

import pytest

from granite4_neuron.cli import main


@pytest.fixture
def folder(texting_folder, tmp_path):
    """A copy of the random checkpoint with a tokenizer, to damage."""
    return shutil.copytree(texting_folder, tmp_path / "model")


@pytest.fixture
def refuses(capsys, monkeypatch):
    """A function from arguments to the sentence with which the command refuses them; anything else is a failure."""

    def refuses(*arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        status = main([str(argument) for argument in arguments])
        output, error = capsys.readouterr()
        return sentence(status, output, error)

    return refuses


def sentence(status: int, output: str, error: str) -> str:
    """What a command that met a fault said, if it said it as it should: one sentence on standard error, status 2."""
    assert (status, output) == (2, ""), (status, output, error)
    assert error.startswith("granite4-neuron: ") and error.endswith((".\n", "?\n")) and error.count("\n") == 1, error
    return error.removeprefix("granite4-neuron: ").removesuffix("\n")
