"""The first run on a Trainium, with stand-ins for its steps' programs."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.first_run import command, running, server, text
from benchmarks.first_run.running import INTERRUPTED, LEFT_OUT, Run
from benchmarks.first_run.steps import NXDI, SDKS, TORCH, Step, steps_of
from benchmarks.latency import options as latency_options
from benchmarks.probe.command import parser as probe_parser
from benchmarks.probe.process import CRASHED, FAILED, OK, TIMED_OUT
from granite4_neuron.commands import cli

ROOT = Path(__file__).parents[2]
FINDING = 'probe finding: {{"what": "{}", "verdict": "equal", "error": 1e-6, "message": "", "numbers": {}}}'
PRINTED = "\n".join(
    [
        "load: 83.1 s",
        "evaluates the expression list",
        "passed",
        FINDING.format("value", "{}"),
        FINDING.format("time of decode", '{"milliseconds": {"8": 1.0}}'),
    ]
)
CODES = {1: FAILED, None: TIMED_OUT, -signal.SIGSEGV: CRASHED}


def steps(sdk):
    return steps_of(sdk, has_h_small=True, vllm="/opt/vllm/bin/vllm" if sdk == NXDI else None)


class StandIn:
    """Runs a command by writing what its program would print; the step of one name fails with `code`."""

    def __init__(self, failing, code):
        self.failing, self.code, self.commands = failing, code, {}

    def __call__(self, words, variables, output, limit):
        self.commands[output.stem] = words
        folder = Path(variables.get("TORCH_NEURONX_DEBUG_DIR") or variables["BASE_COMPILE_WORK_DIR"])
        (folder / "log-neuron-cc.txt").write_text("the compiler's log")
        (folder / "graph.neff").write_text("a program")
        fails = self.failing is not None and folder.name == running._file_name(self.failing)
        output.write_text("no room in SBUF" if fails else PRINTED)
        return self.code if fails else 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("sdk", sorted(SDKS))  # the older one has fewer steps
def test_each_step_may_fail(sdk, tmp_path, capsys, monkeypatch):
    """The others run, unless they need it; the archive has the step's verdict, its output and the compiler's log."""
    # Packing is slow; here it happens once a run. `test_a_killed_run_goes_on` packs after each step.
    pack = Run.pack
    monkeypatch.setattr(Run, "pack", lambda run: None)
    codes = list(CODES)
    for at, failing in enumerate(steps(sdk)):
        code = codes[at % len(codes)]
        run = Run(sdk, steps(sdk), tmp_path / str(at), tmp_path / f"{at}.tgz", {}, StandIn(failing.name, code))
        assert command.follow(run, has_h_small=True) == 1
        out = capsys.readouterr().out
        assert f"{len(run.steps)} of {len(run.steps)} steps are left, with h-small" in out and "Options to use: " in out
        wrong = {failing.name: CODES[code]}
        wrong |= {step.name: LEFT_OUT for step in run.steps if failing.name in step.needs}
        wrong |= {step.name: LEFT_OUT for step in run.steps if any(wrong.get(name) == LEFT_OUT for name in step.needs)}
        pack(run)
        with tarfile.open(run.out) as archive:
            names = archive.getnames()
            report = json.load(archive.extractfile("report.json"))
        assert {step["name"]: step["result"] for step in report["steps"] if step["result"] != OK} == wrong
        name = running._file_name(failing.name)
        assert f"logs/{name}.txt" in names
        assert [each for each in names if each.startswith("artifacts")] == [f"artifacts/{name}/log-neuron-cc.txt"]


# As TorchNeuron does it: neuronx-cc runs in a folder in /tmp, which is deleted unless the process crashes.
COMPILES = """
import os, shutil, signal, subprocess, sys, tempfile
folder = tempfile.mkdtemp(prefix=sys.argv[1], dir="/tmp")
done = subprocess.run(["neuronx-cc", "compile", "module.mlir"], cwd=folder, check=False)
if sys.argv[2:] == ["crash"]:
    os.kill(os.getpid(), signal.SIGKILL)
shutil.rmtree(folder)
sys.exit(done.returncode)
"""


def test_logs_and_times_of_the_compiler_are_kept(tmp_path, monkeypatch):
    """Of a step that fails and of one that crashes; of one that is right only the times."""
    (tmp_path / "sdk").mkdir()
    compiler = tmp_path / "sdk" / "neuronx-cc"
    compiler.write_text("#!/bin/sh\necho its log >log-neuron-cc.txt\nexit $CODE\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'sdk'}:{os.environ['PATH']}")
    prefix = f"neuron_compile_{os.getpid()}_"
    program = shlex.join([sys.executable, "-c", COMPILES, prefix])
    planned = [
        Step("right", f"env CODE=0 {program}", 1, 60),
        Step("wrong", f"env CODE=70 {program}", 1, 60),
        Step("crash", f"env CODE=0 {program} crash", 1, 60),
    ]
    run = Run(TORCH, planned, tmp_path / "work", tmp_path / "out.tgz", {}, running.execute)
    results = [record.result for record in run.all()]
    (left,) = Path("/tmp").glob(f"{prefix}*")
    shutil.rmtree(left)
    assert results == [OK, FAILED, CRASHED]
    with tarfile.open(run.out) as archive:
        logs = [name for name in archive.getnames() if name.startswith("artifacts") and "log_neuron_cc" in name]
        logs += [name for name in archive.getnames() if name.endswith("/log-neuron-cc.txt")]
        assert {archive.extractfile(name).read() for name in logs} == {b"its log\n"}
        times = archive.extractfile("results/compilations.txt").read().decode()
    # Of the one that crashed also from the folder that was left.
    assert sorted(name.split("/")[1] for name in logs) == ["crash", "crash", "wrong"]
    lines = [line.partition(": ")[::2] for line in times.splitlines()]
    assert [name for name, _ in lines] == ["right", "wrong", "crash"]
    assert [text.partition(" s, ")[2] for _, text in lines] == [
        f"exit code {code}: compile module.mlir" for code in (0, 70, 0)
    ]


def test_the_time_to_load_is_printed(tmp_path, capsys):
    command.follow(Run(TORCH, steps(TORCH), tmp_path / "a", tmp_path / "a.tgz", {}, StandIn(None, 0)), has_h_small=True)
    printed = {line.split("  ")[-2]: line for line in capsys.readouterr().out.splitlines() if "load: 83.1 s" in line}
    assert {"text", "text h-small", "serve h-tiny"} <= printed.keys()


def test_what_is_advised_is_used(tmp_path, capsys):
    """Later steps have the options, and the last lines say them."""
    run = Run(TORCH, steps(TORCH), tmp_path / "work", tmp_path / "out.tgz", {}, StandIn("states leading_view", 1))
    command.follow(run, has_h_small=True)
    assert "Options to use: --no-prefill-by-view." in capsys.readouterr().out
    words = {name: shlex.join(words) for name, words in run.execute.commands.items()}
    assert "--no-prefill-by-view" in words["check_layers"] and "--no-prefill-by-view" not in words["models_text"]
    run = Run(NXDI, steps(NXDI), tmp_path / "nxdi", tmp_path / "out.tgz", {}, StandIn("compile h-tiny", 1))
    command.follow(run, has_h_small=True)
    assert "Options to use: --kernels nki --expert-path nxd." in capsys.readouterr().out


def test_a_killed_run_goes_on(tmp_path):
    """The step that was running counts as interrupted, and its processes end; --again tries it once more."""
    texts = "echo one", "sleep 1000", "sh -c 'echo three; exit 3'", "echo four"
    planned = [Step(f"step {number}", text, 1, 60) for number, text in enumerate(texts)]
    program = (
        "from pathlib import Path; from test.integration.test_first_run import *\n"
        f"work = Path({str(tmp_path)!r})\n"
        f"planned = {planned!r}\n"
        "list(Run(NXDI, planned, work / 'work', work / 'out.tgz', {}, running.execute).all())"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=dict(os.environ, PYTHONPATH=_path()))
    group = tmp_path / "work/logs/step_1.group"
    while not (group.is_file() and group.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    child = Path("/proc") / group.read_text().split()[0]
    process.kill()
    process.wait()
    assert child.exists() and (tmp_path / "out.tgz").is_file()
    running.end_left_over(tmp_path / "work")
    while child.exists() and child.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
    run = Run(NXDI, planned, tmp_path / "work", tmp_path / "out.tgz", {}, running.execute)
    records = {record.name: (record.result, record.message) for record in run.all()}
    assert records == {"step 2": (FAILED, "exit code 3: three"), "step 3": (OK, "")}
    assert run.records["step 0"].result == OK and run.records["step 1"].result == INTERRUPTED
    with tarfile.open(tmp_path / "out.tgz") as archive:
        report = json.load(archive.extractfile("report.json"))
        assert archive.extractfile("logs/step_2.txt").read().endswith(b"three\n")
    assert [step["result"] for step in report["steps"]] == [OK, INTERRUPTED, FAILED, OK]
    run.forget(["step 2"])
    assert [record.name for record in run.all()] == ["step 2"]


def _path():
    return f"{ROOT / 'src'}{os.pathsep}{ROOT}"


@pytest.mark.parametrize("sdk", SDKS)
def test_commands_are_accepted(sdk, tmp_path):
    """Every step's options are those of its program."""
    stand_in = StandIn(None, 0)
    for _ in Run(sdk, steps(sdk), tmp_path / "work", tmp_path / "out.tgz", {}, stand_in).all():
        pass
    for words in stand_in.commands.values():
        if words[1:3] == ["-m", "benchmarks.first_run.server"]:
            words = [word.replace("{port}", "8000") for word in words[3:]]
        if words[1:3] == ["-m", "benchmarks.first_run.text"]:
            words = text.parser().parse_args(words[3:]).command
        if words[1:3] == ["-m", "granite4_neuron"]:
            cli.parser().parse_args(words[3:])
        elif words[1:3] == ["-m", "benchmarks.probe"]:
            probe_parser().parse_args(words[3:])
        elif words[1] == "benchmark_latency.py":
            latency_options.parser("").parse_args(words[2:])
        else:
            assert "pytest" in words or words[1] == "serve"
            assert all(Path(ROOT, word).exists() for word in words if word.startswith("test/"))


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": "m"}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = "" if sys.argv[2] == asked.get("prompt") else "text"
        self.answer({"choices": [{"message": {"content": text}, "text": text}]})
    def answer(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(body).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_asked(capsys):
    """A server that gives no text for one of the prompts, or does not start, has failed."""
    assert server.main([sys.executable, "-c", SERVER, "{port}", "none"]) == 0
    assert capsys.readouterr().out == "answer: 'text'\n" * 3
    assert server.main([sys.executable, "-c", SERVER, "{port}", "A"]) == 1
    with pytest.raises(SystemExit, match="ended with 3 before it was ready"):
        server.main([sys.executable, "-c", "raise SystemExit(3)"])


def test_texts_with_drafts_are_compared(tmp_path, monkeypatch, capfd):
    """A text that parts from the one without drafts fails its step, and its output says where."""
    monkeypatch.chdir(tmp_path)
    say = [sys.executable, "-c", "import sys; print(sys.argv[1])"]
    assert text.main(["plain.txt", "--", *say, "a long text"]) == 0
    assert text.main(["drafts.txt", "--same-as", "plain.txt", "--", *say, "a long text"]) == 0
    assert text.main(["ngram.txt", "--same-as", "plain.txt", "--", *say, "a long test"]) == 1
    assert "After 9 of 12 characters the text is 'st\\n', and that of plain.txt 'xt\\n'." in capfd.readouterr().out
    assert Path("ngram.txt").read_text() == "a long test\n"  # to send back
    assert text.main(["none.txt", "--", sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert not Path("none.txt").exists()
    compared = {step.name for step in steps(NXDI) if "--same-as {results}/h-tiny.txt" in step.command}
    assert compared == {"text h-tiny, drafts", "text h-tiny, ngram"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("2.33", "--vllm", "vllm"), "--vllm is for 2.31"),
        (("2.33", "--work", "/no/such/folder/x"), "there is no folder /no/such/folder"),
        (("2.31", "--again", "nothing"), "--again is 'nothing'; it must be one of CPU mode, kernels,"),
    ],
)
def test_bad_options_are_refused(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(options) == 2
    assert message in capsys.readouterr().err
