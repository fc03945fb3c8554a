"""Runs steps one after another, remembers each on disk, and packs what there is to send back.

Nothing here imports torch: a device may belong to one process only, and the step's process needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.first_run.steps import REMEDIES_OF_NXDI, TORCH, Step
from benchmarks.probe.process import ENVIRONMENT, FAILED, OK, Finding, Record, judge, read_findings
from benchmarks.probe.remedies import advised_options

ROOT = Path(__file__).parents[2]
INTERRUPTED, LEFT_OUT = "interrupted", "left out"
_LAST_LINES = 40
_TIMES = ("load: ", "warm-up: ")  # lines of this package's commands
_TOO_LARGE = (".neff", ".safetensors", ".bin", ".npy", ".pt")  # what compilers leave beside logs and graphs
_LARGEST, _MOST = 20 * 2**20, 200 * 2**20  # bytes of an archived file, and of a failed step's files
# In /tmp: what is written when a device has no memory left, and the log of a compiler that was ended.
_LEFT_IN_TMP = ("neuron_mem_table_device_*", "neuron_compile_*/log-neuron-cc.txt")
# TorchNeuron looks for the compiler in PATH, runs it in a folder in /tmp and deletes that, with the log. Source: its
# public beta, csrc/core/compilation/NeuronCompiler.cpp.
_COMPILER = """#!/bin/sh
started=$(date +%s)
{compiler} "$@"
code=$?
kept="$TORCH_NEURONX_DEBUG_DIR/compiler/$$"
mkdir -p "$kept" && cp log-neuron-cc.txt "$kept"
echo "$(basename "$TORCH_NEURONX_DEBUG_DIR"): $(($(date +%s) - started)) s, exit code $code: $*" >>{times}
exit $code
"""


@dataclass
class Run:
    """A run in a folder, which keeps what is done: a run that was killed goes on where it was.

    out: the archive to send back, written again after each step.
    machine: facts for the report.
    execute: runs a command with variables, its output into a file, for at most so many seconds; returns the exit code,
        None if it took longer.
    """

    sdk: str
    steps: Sequence[Step]
    work: Path
    out: Path
    machine: Mapping[str, object]
    execute: Callable[[Sequence[str], Mapping[str, str], Path, float], int | None]
    records: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self):
        self.work = self.work.absolute()  # a compiler runs in another folder
        for name in ("results", "artifacts", "logs", "tmp", "bin"):
            (self.work / name).mkdir(parents=True, exist_ok=True)
        compiler = shutil.which("neuronx-cc")
        if self.sdk == TORCH and compiler is not None:
            times = shlex.quote(str(self.work / "results" / "compilations.txt"))
            wrapper = self.work / "bin" / "neuronx-cc"
            wrapper.write_text(_COMPILER.format(compiler=shlex.quote(compiler), times=times))
            wrapper.chmod(0o755)
        for line in self._done.read_text().splitlines() if self._done.is_file() else ():
            if line.endswith("}"):  # the last line is cut off if the run was killed while it wrote it
                record = json.loads(line)
                findings = [Finding(**each) for each in record.pop("findings")]
                self.records[record["name"]] = Record(**record, findings=findings)

    @property
    def _done(self) -> Path:
        """A record a line; of several of a step the last counts."""
        return self.work / "steps.jsonl"

    @property
    def options(self) -> list[str]:
        """The options that the steps so far advise."""
        if self.sdk == TORCH:
            return advised_options(list(self.records.values()))
        return [
            word
            for step, option, other in REMEDIES_OF_NXDI
            if self._result(step) not in (None, OK) and self._result(other) == OK
            for word in option.split()
        ]

    def forget(self, names: Sequence[str]) -> None:
        """Let these steps run again."""
        for name in names:
            self.records.pop(name, None)

    def all(self) -> Iterator[Record]:
        """Run each step that has not run, and yield its record. One that was running when the run was killed is not
        tried again, since it may have taken the machine down.
        """
        for step in self.steps:
            if step.name not in self.records:
                missing = [name for name in step.needs if self._result(name) != OK]
                if missing:
                    self._remember(Record(step.name, LEFT_OUT, 0.0, f"needs {missing[0]}", [], []))
                else:
                    self._remember(Record(step.name, INTERRUPTED, 0.0, "the run was ended during this step", [], []))
                    self._remember(self._run(step))
                self.pack()
                yield self.records[step.name]

    def _result(self, name: str) -> str | None:
        return self.records[name].result if name in self.records else None

    def _run(self, step: Step) -> Record:
        place, artifacts = self._place(step), self._artifacts(step)
        artifacts.mkdir(exist_ok=True)
        words = dict(python=shlex.quote(sys.executable), work=self.work, results=self.work / "results", port="{port}")
        command = shlex.split(step.command.format(**words, options=shlex.join(self.options)))
        started, since = time.monotonic(), time.time()
        code = self.execute(command, self._variables(artifacts), place, step.limit)
        lines = place.read_text(encoding="utf-8", errors="replace").splitlines()
        findings = read_findings(lines) if step.is_probed else []
        if step.is_probed or code is None or code < 0:
            result, message = judge(code, findings, step.limit)
        elif code:
            last = [line for line in lines if line.strip()][-1:]
            result, message = FAILED, f"exit code {code}" + "".join(f": {line.strip()[:200]}" for line in last)
        elif step.expects not in " ".join(lines):
            result, message = FAILED, f"its output does not have {step.expects!r}"
        else:
            result, message = OK, ", ".join(line for line in lines if line.startswith(_TIMES))
        if result == OK:
            shutil.rmtree(artifacts, ignore_errors=True)
        else:
            for file in (file for pattern in _LEFT_IN_TMP for file in Path("/tmp").glob(pattern)):
                if file.stat().st_mtime >= since:
                    shutil.copy(file, artifacts / f"{_file_name(str(file.relative_to('/tmp')))}.txt")
        seconds = round(time.monotonic() - started, 1)
        return Record(step.name, result, seconds, message, findings, [] if result == OK else lines[-_LAST_LINES:])

    def _place(self, step: Step) -> Path:
        return self.work / "logs" / f"{_file_name(step.name)}.txt"

    def _artifacts(self, step: Step) -> Path:
        return self.work / "artifacts" / _file_name(step.name)

    def _variables(self, artifacts: Path) -> dict[str, str]:
        """Return the variables of a step. The caller's own take precedence."""
        work = self.work
        variables = {
            "PATH": f"{work}/bin:{os.environ['PATH']}",
            "HF_HOME": f"{work}/huggingface",
            "TMPDIR": f"{work}/tmp",
            "NEURON_RT_EXEC_TIMEOUT": "600",  # 30 s otherwise, and a rank may wait for another's compiler
        }
        if self.sdk == TORCH:
            variables |= ENVIRONMENT
            variables |= {
                "TORCH_NEURONX_NEFF_CACHE_DIR": f"{work}/neffs",
                "TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS": "1",
                "TORCH_NEURONX_DEBUG_DIR": str(artifacts),
            }
        else:
            variables |= {
                "BASE_COMPILE_WORK_DIR": f"{artifacts}/",
                "NEURON_COMPILE_CACHE_URL": f"{work}/compile-cache",
            }
        return variables | {name: value for name, value in os.environ.items() if name != "PATH"}

    def _remember(self, record: Record) -> None:
        self.records[record.name] = record
        with self._done.open("a") as file:
            file.write(f"\n{json.dumps(dataclasses.asdict(record))}")

    def pack(self) -> None:
        """Write the archive: the report, all output and results, and the compilers' files of steps that failed."""
        report = {
            "sdk": self.sdk,
            "machine": self.machine,
            "options": self.options,
            "steps": [dataclasses.asdict(each) for each in self.records.values()],
        }
        (self.work / "report.json").write_text(json.dumps(report, indent=1))
        incomplete = self.out.with_name(f"{self.out.name}.incomplete")
        with tarfile.open(incomplete, "w:gz", compresslevel=1) as archive:
            for name in ("report.json", "logs", "results"):
                archive.add(self.work / name, name)
            for step in self.steps:
                if self._result(step.name) not in (None, OK):
                    left = _MOST
                    files = (file for file in self._artifacts(step).rglob("*") if file.suffix not in _TOO_LARGE)
                    sizes = {file: file.stat().st_size for file in files if file.is_file()}
                    for file in sorted(sizes, key=sizes.__getitem__):
                        left -= sizes[file]
                        if sizes[file] <= _LARGEST and left >= 0:
                            archive.add(file, file.relative_to(self.work))
        incomplete.replace(self.out)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def execute(command: Sequence[str], variables: Mapping[str, str], output: Path, limit: float) -> int | None:
    """Run a command of a `Run` in a process group of its own, all of which ends with it."""
    group = output.with_suffix(".group")
    with output.open("w") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            cwd=ROOT,
            start_new_session=True,
        )
        group.write_text(f"{process.pid} {_started(process.pid)}")
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            group.unlink()


def end_left_over(work: Path) -> None:
    """End what a run that was killed has left running: it would keep the device."""
    for group in (work / "logs").glob("*.group"):
        pid, started = group.read_text().split()
        if _started(int(pid)) == started:
            os.killpg(int(pid), signal.SIGKILL)
        group.unlink()


def _started(pid: int) -> str:
    """Return when a process has started, which with its number names it; "gone" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def machine(work: Path) -> dict[str, object]:
    """Return facts of the machine on which results depend."""
    product = Path("/sys/devices/virtual/dmi/id/product_name")
    driver = Path("/sys/module/neuron/version")
    return {
        "instance": product.read_text().strip() if product.is_file() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": dict(sorted((each.name, each.version) for each in importlib.metadata.distributions())),
        "commit": _printed("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "driver": driver.read_text().strip() if driver.is_file() else None,
        "neuron-ls": _printed("neuron-ls", "--json-output"),
        "memory_bytes": memory(),
        "free_bytes": {place: shutil.disk_usage(place).free for place in (str(work), "/tmp")},
        "variables": {name: value for name, value in sorted(os.environ.items()) if "NEURON" in name},
    }


def memory() -> dict[str, int]:
    """Return the machine's memory and swap space in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    return {name: sizes[name] for name in ("MemTotal", "SwapTotal")}


def num_cores() -> int | None:
    """Return the number of logical cores that neuron-ls lists; None if it does not say."""
    printed = _printed("neuron-ls", "--json-output")
    try:
        return sum(device["nc_count"] for device in json.loads(printed or "null"))
    except (ValueError, TypeError, KeyError):
        return None


def _printed(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
