"""The probe of a PyTorch device, on the CPU: what is wrong, crashes or hangs is seen, and its own steps are right."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import latency_options
from benchmarks.probe import models, states
from benchmarks.probe.command import STEPS, main
from benchmarks.probe.device import compare, judge
from benchmarks.probe.process import EQUAL, FACT, WRONG, Place
from granite4_neuron.runtime import torch_device

HERE = Path(__file__).parents[2]
CPU = Place("cpu", "aot_eager")
# The others take longer, and do the same for other sizes or kinds.
SHORT = [
    step
    for step in STEPS
    if step.name.startswith(("states", "operators"))
    or step.name in ("models layer mamba", "models warm_up", "models fallbacks", "models kernels ssd")
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Run `planted_probe`: return what it printed, and its steps by name."""
    file = tmp_path_factory.mktemp("probe") / "probe.json"
    options = ["--device", "cpu", "--compiler", "aot_eager", "--out", str(file)]
    command = [sys.executable, "-m", "test.support.planted_probe", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 1, done.stderr
    return done.stdout, {step["name"]: step for step in json.loads(file.read_text())["steps"]}


class TestProcesses:
    def test_a_line_for_each_step(self, planted):
        output, steps = planted
        assert {name: step["result"] for name, step in steps.items()} == {
            "planted_probe hangs": "timed out",
            "planted_probe crashes": "crashed",
            "planted_probe is_wrong": "wrong",
            "planted_probe raises": "failed",
            "planted_probe exits": "failed",
            "device versions": "ok",
            "operators topk_softmax": "ok",
        }
        for name, step in steps.items():
            (line,) = (line for line in output.splitlines() if name in line)
            assert step["result"] in line and step["message"][:40] in line

    def test_one_that_hangs_says_where_and_leaves_nothing_behind(self, planted):
        step = planted[1]["planted_probe hangs"]
        assert step["message"] == "not done after 5 seconds" and step["seconds"] < 60
        assert "about to hang" in step["last_lines"]
        assert any("planted_probe.py" in line and "in hangs" in line for line in step["last_lines"])
        status = Path("/proc") / str(step["findings"][0]["numbers"]["pid"]) / "stat"
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    def test_one_that_crashes_keeps_what_it_found(self, planted):
        step = planted[1]["planted_probe crashes"]
        assert step["message"] == "ended by SIGSEGV" and [each["what"] for each in step["findings"]] == ["before"]
        assert any("Segmentation fault" in line for line in step["last_lines"])

    def test_errors_and_exit_codes(self, planted):
        steps = planted[1]
        assert steps["planted_probe is_wrong"]["message"] == "sum 5.0e-01: above 0.1"
        assert steps["planted_probe is_wrong"]["findings"][1]["message"] == "cpu, aot_eager"
        assert steps["planted_probe raises"]["message"] == r"error: RuntimeError: the compiler\nhas given up"
        assert steps["planted_probe raises"]["last_lines"][-1] == "has given up"
        assert steps["planted_probe exits"]["message"] == "exit code 3, without a finding of its own"

    def test_versions(self, planted):
        step = planted[1]["device versions"]
        numbers = step["findings"][0]["numbers"]
        assert numbers["packages"]["torch"] == torch.__version__ and numbers["python"] in sys.version
        assert numbers["environment"]["TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"] == "1"
        assert step["last_lines"] == []

    def test_the_device_is_left_to_the_steps(self):
        program = "import sys, benchmarks.probe.command; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", program], cwd=HERE).returncode == 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--step", "nothing"), "step is 'nothing'; it must be one of device versions, states alias,"),
            (("--models", "h-350m", "h-none"), "h-none"),
            (("--out", "no/such/folder/probe.json"), "cannot be written: there is no such folder"),
        ],
    )
    def test_refusals(self, capsys, options, message):
        assert main(["--device", "cpu", *options]) == 2
        assert message in capsys.readouterr().err


class TestSteps:
    @pytest.fixture(autouse=True)
    def alone(self):
        """In the probe, a step's graphs are the only ones of its process."""
        torch._dynamo.reset()

    def test_names(self):
        assert len({step.name for step in STEPS}) == len(STEPS)
        assert all(callable(pkgutil.resolve_name(step.function)) for step in STEPS)

    @pytest.mark.parametrize("step", SHORT, ids=lambda step: step.name)
    def test_all_is_right_on_the_cpu(self, step, monkeypatch):
        monkeypatch.setattr(states, "MEGABYTES", (8, 16))
        monkeypatch.setattr(models, "MAX_LENGTH", 500)
        monkeypatch.setattr(torch_device, "VERIFY_BUCKETS", (4,))
        findings = list(pkgutil.resolve_name(step.function)(CPU, *step.arguments))
        assert findings and all(finding.verdict in (EQUAL, FACT) for finding in findings), findings

    def test_a_write_to_the_wrong_place_is_seen(self, monkeypatch):
        monkeypatch.setattr(states, "MEGABYTES", (8,))
        write = states.write_cache

        def late(cache, values, positions, *where):
            write(cache, values, (positions + 1) % cache.shape[2], *where)

        monkeypatch.setattr(states, "write_cache_as", lambda form: late)
        assert [finding.verdict for finding in states.kv_write(CPU, "index")] == [WRONG, FACT] * 2

    def test_what_is_wrong(self):
        def less(x):
            return x * 0.999

        assert compare(CPU, "", less, less, torch.ones(3)).verdict == EQUAL
        finding = compare(CPU, "", less, torch.clone, torch.tensor([2.0, 100.0]))
        assert (finding.verdict, finding.error) == (WRONG, pytest.approx(1e-3, rel=1e-3))
        one = torch.ones(2)
        for found in ([one, one * torch.nan], [one * torch.nan, one], [one, one[:1]]):
            finding = judge("", found, [one, one])
            assert (finding.verdict, finding.error) == (WRONG, None)

    def test_latency(self, monkeypatch):
        """The command is one that the benchmark takes."""
        written = {"results": [{"batch_size": 8, "prompt_length": 512, "first_token_ms": 3, "token_ms_p50": 1.5}]}

        def run(command, check):
            options = latency_options.parser("").parse_args(command[2:])
            latency_options.check(options)
            assert Path(command[1]).is_file() and (options.backend, options.random_weights) == ("torch", "h-350m")
            options.json.write_text(json.dumps(written))

        monkeypatch.setattr(models.subprocess, "run", run)
        (finding,) = models.latency(CPU, "h-350m")
        assert (finding.what, finding.message) == ("8 x 512", "first token 3.0 ms, then 1.50")
        assert finding.numbers == written["results"][0]
