"""A model split over Neuron cores, with a stand-in for TorchNeuron: which process takes which cores, and when.

The stand-in's device is the CPU and its process group is gloo, see test/support/neuron_stand_in.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from granite4_neuron.commands.cli import main
from granite4_neuron.devices.neuron.torchneuron.cores import visible_cores

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a program with the stand-in and returns the process and the cores it used."""

    def run(*command, **variables):
        (tmp_path / "log").mkdir()
        path = os.pathsep.join([str(ROOT / "test/support/neuron_stand_in"), str(ROOT)])
        environment = dict(PYTHONPATH=path, NEURON_STAND_IN_LOG=str(tmp_path / "log"), OMP_NUM_THREADS="1", **variables)
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
            timeout=600,
        )
        return done, sorted(path.name for path in (tmp_path / "log").iterdir())

    return run


GENERATE = ("-m", "granite4_neuron", "generate", "An assignment statement", "--max-tokens", "6", "--temperature", "0")
ON_NEURON = ("--backend", "torch", "--device", "neuron")


@pytest.mark.slow
def test_the_probes_process_group(run):
    """The probe starts one process for each visible core."""
    command = ("-m", "benchmarks.probe", "--step", "ranks group 4", "--device", "neuron")
    done, cores = run(*command, NEURON_RT_VISIBLE_CORES="0-3")
    assert (done.returncode, cores) == (0, ["core0", "core1", "core2", "core3"]), done.stderr
    assert done.stdout.count('"verdict": "equal"') == 4


@pytest.mark.exhaustive
def test_generate(run, capsys):
    """The text is the CPU's."""
    assert main(GENERATE[2:]) == 0
    done, cores = run(*GENERATE, *ON_NEURON, "--tp-degree", "2")
    assert (done.returncode, done.stdout, cores) == (0, capsys.readouterr().out, ["core0", "core1"]), done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "used"),
    [
        ((*GENERATE, *ON_NEURON), 4),
        (("-m", "granite4_neuron", "evaluate", *ON_NEURON, "--tp-degree", "2", "pyproject.toml"), 2),
        (("-m", "granite4_neuron", "check", *ON_NEURON, "--tp-degree", "2"), 2),
        (("benchmark_latency.py", *ON_NEURON, "--tp-degree", "4", "--prompt-length", "16", "--output-length", "2"), 4),
        (("benchmark_latency.py", *ON_NEURON, "--prompt-length", "16", "--output-length", "2"), 4),
    ],
    ids=["generate on one", "evaluate", "check", "benchmark", "benchmark on one"],
)
def test_commands_use_the_right_cores(run, command, used):
    """A model on one device takes all visible cores, so no other process of the command may use one."""
    done, cores = run(*command)
    assert done.returncode == 0, done.stderr
    assert cores == [f"core{core}" for core in range(used)]


USED = """
import torch
from granite4_neuron import load
torch.empty(0, device="neuron")
load(backend="torch", device="neuron", tp_degree=2)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "variables", "sentence"),
    [
        (("-c", USED), {}, "this process has used a Neuron core already; split a model before it uses any."),
        (
            (*GENERATE, *ON_NEURON, "--tp-degree", "4"),
            dict(NEURON_RT_VISIBLE_CORES="0,2"),
            "tp_degree is 4 and NEURON_RT_VISIBLE_CORES has 2 cores.",
        ),
        (
            (*GENERATE, *ON_NEURON, "--tp-degree", "2"),
            dict(NEURON_RT_VISIBLE_CORES="3-4"),
            "the processes of a split model cannot connect to each other (nrt_init failed: there is no core 4).",
        ),
    ],
    ids=["used", "too few", "absent"],
)
def test_unusable_cores_are_reported(run, command, variables, sentence):
    done, _ = run(*command, **variables)
    assert done.returncode != 0 and sentence in done.stderr


@pytest.mark.parametrize(
    ("text", "cores"), [(None, None), ("", None), ("2", [2]), ("0-3", [0, 1, 2, 3]), ("4,6-7", [4, 6, 7])]
)
def test_visible_cores(monkeypatch, text, cores):
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    if text is not None:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", text)
    assert visible_cores() == cores
