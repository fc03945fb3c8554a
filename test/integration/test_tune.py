"""The tune command as users run it. No test depends on the times that it measures."""

import subprocess
import sys

import pytest
import torch

from granite4_neuron import generate, load
from granite4_neuron.commands.cli import main
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.ops.launch_parameters import HEURISTIC, file_name, find_launch_parameters, write_launch_parameters

SIZE = (32, 32, torch.float32)  # of the bundled model


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--output", "/no/such/folder/x"), "cannot be written"),
        (("--output", __file__), "is not a folder"),
        (("--output", "x", "--model", "granite-4.0-350m"), "no Mamba layers"),
        (("--output", "x", "--threads", "0"), "0 is not a whole number of at least 1"),
        ((), "the following arguments are required: --output"),
    ],
)
def test_bad_input_is_refused(arguments, message, capsys):
    assert main(["tune", *arguments]) == 2
    output, error = capsys.readouterr()
    assert output == "" and message in error


@pytest.mark.slow
@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
def test_a_later_run_uses_what_an_earlier_one_wrote(tmp_path):
    folder = tmp_path / "new"
    command = [sys.executable, "-m", "granite4_neuron", "tune", "--output", str(folder), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file = folder / file_name(*SIZE)
    assert f"wrote {file}" in done.stderr and list(folder.iterdir()) == [file]
    parameters = find_launch_parameters(*SIZE, folder)
    for name, value in vars(parameters).items():
        assert f"{name} is {value}: " in done.stdout and f" ms with {getattr(HEURISTIC, name)}" in done.stdout
    write_launch_parameters(file, type(parameters)(32, 1, 256))
    tuned = generate(*load(tuned_configs=folder), "An assignment", max_tokens=3)
    assert tuned == generate(*load(), "An assignment", max_tokens=3)
