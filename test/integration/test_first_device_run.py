"""The commands of docs/first-device-run.md and docs/trainium.md, in a shell, as far as they go without a device.

The machine's own programs are replaced by stand-ins. The probe and the first run only parse their options. This
package's commands run until they say that the Neuron SDK or a download is missing.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from granite4_neuron.generation import bundled_checkpoint

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("first-device-run.md", "trainium.md")]
ENVIRONMENT, NVME = "/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference", "/opt/dlami/nvme"
OURS = """#!/bin/sh
{program} "$@" 2>"$LOG.err"
status=$?
cat "$LOG.err" >&2
echo "{name} $* | $status | $(tail -n 1 "$LOG.err")" >>"$LOG"
exit $status
"""
PYTHON = """#!/bin/sh
case "$*" in
-m\\ benchmarks.probe*|-m\\ benchmarks.first_run*) exec {python} "$@" --help ;;
benchmark_latency.py*) shift; exec benchmark_latency "$@" ;;
*) exec {python} "$@" ;;
esac
"""


def blocks():
    """Return the pages' blocks of commands; blocks in Python name their language."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for language, block in found if not language]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Run the pages; return the folder, what was printed, and a line for each of this package's commands."""
    # In another process, as the commands run: this one may have stand-ins for the SDK.
    require = [sys.executable, "-c", "from granite4_neuron.devices.neuron import sdk; sdk.require()"]
    if subprocess.run(require, capture_output=True).returncode == 0:
        pytest.skip("the Neuron SDK is here, and the commands would do their work")
    folder = tmp_path_factory.mktemp("guide")
    for name in ("src", "test", "benchmarks", "benchmark_latency.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for place in ("bin", "nvme", "environment/bin"):
        (folder / place).mkdir(parents=True)
    (folder / "environment/bin/activate").touch()
    python = shlex.quote(sys.executable)
    scripts = {name: f'#!/bin/sh\necho "{name} $*"\n' for name in ("aws", "pip", "sudo")}
    scripts["python"] = PYTHON.format(python=python)
    scripts["granite4-neuron"] = OURS.format(program=f"{python} -m granite4_neuron", name="granite4-neuron")
    scripts["benchmark_latency"] = OURS.format(program=f"{python} benchmark_latency.py", name="benchmark")
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    script = "\n".join(blocks()).replace(ENVIRONMENT, str(folder / "environment")).replace(NVME, str(folder / "nvme"))
    script = re.sub(r"\bFOLDER\b", str(bundled_checkpoint()), script).replace(" GRAPHS", " graphs")
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    variables = dict(os.environ, PATH=path, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}", HF_HUB_OFFLINE="1")
    log = folder / "log"
    run = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=variables | {"LOG": str(log)}, capture_output=True, text=True
    )
    return folder, run.stdout + run.stderr, log.read_text().splitlines()


@pytest.mark.slow
def test_each_command_runs_or_says_what_is_missing(done):
    _, _, lines = done
    missing = re.compile(
        "NxD Inference needs the Neuron SDK|needs the torch-neuronx of Neuron SDK 2.33|HF_HUB_OFFLINE is set"
    )
    for line in lines:
        _, status, message = line.rsplit(" | ", 2)
        assert status == "0" or (status == "2" and missing.search(message)), line
    programs = [line.split()[:2] for line in lines]
    counts = {command: programs.count(["granite4-neuron", command]) for command in ("compile", "serve", "generate")}
    assert counts == dict(compile=1, serve=2, generate=1) and programs.count(["benchmark", "--model"]) == 1
    on_neuron = [line for line in lines if "--device neuron" in line]
    assert len(on_neuron) == 2 and all(missing.search(line) for line in on_neuron), on_neuron


@pytest.mark.slow
def test_nothing_is_missing(done):
    printed = done[1]
    assert printed.count("usage: python -m benchmarks.first_run") == 2
    assert "command not found" not in printed and "No such file" not in printed, printed
