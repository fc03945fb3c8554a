"""The probe of a PyTorch device, on the CPU: it sees wrong numbers, crashes and hangs, and its own steps are right."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.latency import options as latency_options
from benchmarks.probe import command, models, operators, states
from benchmarks.probe.command import STEPS, main
from benchmarks.probe.device import compare, judge
from benchmarks.probe.process import EQUAL, FACT, OK, WRONG, Finding, Place, Record, run_apart
from benchmarks.probe.remedies import REMEDIES, advice
from granite4_neuron.commands import cli
from granite4_neuron.config.choices import KV_WRITES
from granite4_neuron.devices.torch import runtime as torch_device

HERE = Path(__file__).parents[2]
CPU = Place("cpu", "aot_eager")
# The other steps take longer and repeat these with other sizes or kinds.
SHORT = [
    step
    for step in STEPS
    if step.name.startswith(("states", "operators"))
    or step.name in ("models layer mamba", "models warm_up", "models fallbacks", "models kernels ssd")
]
STEPS_OF_RANKS = ("ranks all_reduce 4", "ranks all_gather 2", "ranks layer experts 2", "ranks text 2")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Run `planted_probe`: return what it printed, and its steps by name."""
    file = tmp_path_factory.mktemp("probe") / "probe.json"
    options = ["--device", "cpu", "--compiler", "aot_eager", "--kv-write", "rows", "--no-prefill-by-view"]
    options += ["--out", str(file)]
    command = [sys.executable, "-m", "test.support.planted_probe", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 1, done.stderr
    return done.stdout, {step["name"]: step for step in json.loads(file.read_text())["steps"]}


class TestProcesses:
    @pytest.mark.slow
    def test_each_step_prints_a_line(self, planted):
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

    @pytest.mark.slow
    def test_a_step_that_hangs_says_where_and_leaves_nothing_behind(self, planted):
        step = planted[1]["planted_probe hangs"]
        assert step["message"] == "not done after 5 seconds" and step["seconds"] < 60
        assert "about to hang" in step["last_lines"]
        assert any("planted_probe.py" in line and "in hangs" in line for line in step["last_lines"])
        status = Path("/proc") / str(step["findings"][0]["numbers"]["pid"]) / "stat"
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    @pytest.mark.slow
    def test_a_step_that_crashes_keeps_its_findings(self, planted):
        step = planted[1]["planted_probe crashes"]
        assert step["message"] == "ended by SIGSEGV" and [each["what"] for each in step["findings"]] == ["before"]
        assert any("Segmentation fault" in line for line in step["last_lines"])

    @pytest.mark.slow
    def test_errors_and_exit_codes(self, planted):
        steps = planted[1]
        assert steps["planted_probe is_wrong"]["message"] == "sum 5.0e-01: above 0.1"
        place = steps["planted_probe is_wrong"]["findings"][1]
        assert place["message"] == "cpu, aot_eager"
        chosen = dict(kv_write="rows", prefill_by_view=False, prefill_scan="chunked")
        assert place["numbers"].items() >= chosen.items() and "compiler" not in place["numbers"]
        assert steps["planted_probe raises"]["message"] == r"error: RuntimeError: the compiler\nhas given up"
        assert steps["planted_probe raises"]["last_lines"][-1] == "has given up"
        assert steps["planted_probe exits"]["message"] == "exit code 3, without a finding of its own"

    @pytest.mark.slow
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
            (("--models", "h-350m", "--tp-degree", "3"), "tp_degree is 3; this model can be split by 1, 2, 4"),
            (("--out", "no/such/folder/probe.json"), "cannot be written: there is no such folder"),
        ],
    )
    def test_bad_options_are_refused(self, capsys, options, message):
        assert main(["--device", "cpu", *options]) == 2
        assert message in capsys.readouterr().err


class TestAdvice:
    @staticmethod
    def records(wrong=(), milliseconds=None, kernels=False):
        """Return a record for each step, as a run on a device gives them."""
        for step in STEPS:
            findings = [Finding("value", EQUAL, 1e-6)] if kernels or "kernels" not in step.name else []
            if "kv_write" in step.name:
                times = {"8": 1.0, "128": (milliseconds or {}).get(step.arguments[0], 1.0)}
                findings.append(Finding("time of decode", FACT, numbers={"milliseconds": times}))
            if "experts_decode" in step.name:
                time = (milliseconds or {}).get(step.arguments[0], 1.0)
                findings.append(Finding("time of 1 tokens", FACT, numbers={"milliseconds": time}))
            yield Record(step.name, WRONG if step.name in wrong else OK, 1.0, "", findings, [])

    @pytest.mark.parametrize(
        ("found", "option"),
        [
            (dict(), None),
            (dict(wrong=["states kv_write select"], milliseconds=dict(rows=3.0)), "--kv-write index"),
            (dict(milliseconds=dict(index=9.0, rows=2.0, select=3.0)), "--kv-write rows"),
            (dict(milliseconds=dict(index=2.0, rows=1.9, select=2.0)), None),
            (dict(wrong=[f"states kv_write {form}" for form in KV_WRITES]), None),
            (dict(milliseconds=dict(gather=3.0, kernel=1.8)), "--experts-decode all"),
            (dict(milliseconds=dict(kernel=0.9)), None),
            (dict(wrong=["operators experts_decode gather"]), "--experts-decode kernel"),
            (dict(wrong=[f"operators experts_decode {form}" for form in ("gather", "kernel")]), "--experts-decode all"),
            (dict(wrong=["states leading_view"]), "--no-prefill-by-view"),
            (dict(wrong=["operators mamba_prefill chunked"]), "--prefill-scan quadratic"),
            (dict(wrong=[f"operators mamba_prefill {scan}" for scan in ("chunked", "quadratic")]), None),
            (
                dict(wrong=[f"operators mamba_prefill {scan}" for scan in ("chunked", "quadratic")], kernels=True),
                "--prefill-scan ssd",
            ),
            (dict(wrong=["operators mamba_decode"]), None),
            (dict(wrong=["operators mamba_decode"], kernels=True), "--decode-kernel nki"),
        ],
    )
    def test_what_is_advised(self, found, option):
        advised = advice(list(self.records(**found)))
        assert len(advised) == (option is not None) and all(option in sentence for sentence in advised)

    @pytest.mark.parametrize(
        "option", [*dict.fromkeys(remedy.option for remedy in REMEDIES), "--kv-write select", "--compiler x"]
    )
    def test_every_command_accepts_the_option(self, option):
        arguments = option.split()
        if "--prefill-buckets" not in arguments:  # the probe's steps have lengths of their own
            command.parser().parse_args(["--device", "cpu", *arguments])
        latency_options.parser("").parse_args(["--backend", "torch", *arguments])
        for name in ("generate", "chat", "serve", "check", "evaluate"):
            cli.parser().parse_args([name, *(["FILE"] if name == "evaluate" else []), "--backend", "torch", *arguments])

    def test_remedies_name_steps_of_the_probe(self):
        names = {step.name for step in STEPS}
        assert {name for remedy in REMEDIES for name in (remedy.step, remedy.other) if name} <= names


class TestSteps:
    @pytest.fixture(autouse=True)
    def alone(self):
        """Reset dynamo: in the probe each step has a process and graphs of its own."""
        torch._dynamo.reset()

    def test_names_are_unique_and_functions_exist(self):
        assert len({step.name for step in STEPS}) == len(STEPS)
        assert all(callable(pkgutil.resolve_name(step.function)) for step in STEPS)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("name", STEPS_OF_RANKS)
    def test_ranks(self, name, monkeypatch):
        """These steps start processes, so each runs in a process of its own here too."""
        monkeypatch.chdir(HERE)
        (step,) = (step for step in STEPS if step.name == name)
        options = ["--step", name, "--device", "cpu", "--compiler", "aot_eager"]
        record = run_apart(step, [sys.executable, "-m", "benchmarks.probe", *options])
        assert record.result == OK, record
        assert any(finding.verdict == EQUAL for finding in record.findings)

    @pytest.mark.slow
    @pytest.mark.parametrize("step", SHORT, ids=lambda step: step.name)
    def test_all_is_right_on_the_cpu(self, step, monkeypatch):
        monkeypatch.setattr(states, "MEGABYTES", (8, 16))
        monkeypatch.setattr(models, "MAX_LENGTH", 500)
        monkeypatch.setattr(operators, "_EXPERTS_OF_H_SMALL", (12, 128, 96, 3))
        monkeypatch.setattr(operators, "_IN_PROJ_OF_H_SMALL", (64, 96))
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
        """The benchmark accepts the command, and the finding has its times."""
        written = {"results": [{"batch_size": 8, "prompt_length": 512, "first_token_ms": 3, "token_ms_p50": 1.5}]}

        def run(command, check):
            options = latency_options.parser("").parse_args(command[2:])
            latency_options.check(options)
            assert Path(command[1]).is_file() and (options.backend, options.random_weights) == ("torch", "h-350m")
            assert (options.compiler, options.kv_write, options.prefill_by_view) == ("aot_eager", "rows", False)
            assert options.tp_degree == 2
            options.json.write_text(json.dumps(written))

        monkeypatch.setattr(models.subprocess, "run", run)
        place = Place("cpu", "aot_eager", dict(kv_write="rows", prefill_by_view=False))
        (finding,) = models.latency(place, "h-350m", "2")
        assert (finding.what, finding.message) == ("8 x 512", "first token 3.0 ms, then 1.50")
        assert finding.numbers == written["results"][0]
