"""Steps of a probe, each in a process of its own: one that hangs or crashes ends no other.

Nothing here imports torch: if a device belongs to one process only, the step's process needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import pkgutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from granite4_neuron.errors import printable

# Status of a finding and of a step; a fact is neither right nor wrong.
EQUAL, FACT = "equal", "fact"
WRONG, FAILED = "wrong", "failed"
# Status of a step.
OK, CRASHED, TIMED_OUT = "ok", "crashed", "timed out"

# A graph that fails to compile is an error, and so is a tensor on the CPU among its inputs. TorchNeuron would otherwise
# run both on the CPU silently. The caller's own settings take precedence.
ENVIRONMENT = {
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
    "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY": "1",
}
_MARK = "probe finding: "  # a device's library may print too
_LAST_LINES = 40


@dataclass(frozen=True)
class Place:
    """The place of steps: a device of the backend torch, and a backend of torch.compile, None for the device's own.

    options: further options of the backend, for the steps that run a model.
    """

    device: str
    compiler: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One result of a step.

    what: the subject.
    verdict: "equal", "wrong", "failed" or "fact".
    error: the largest difference, relative to the largest expected value; None if nothing is compared or it is not
        finite.
    message: for people.
    numbers: for programs.
    """

    what: str
    verdict: str
    error: float | None = None
    message: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A part of the probe.

    function: "module:name" of a function that yields findings; it takes a `Place` and `arguments`.
    limit: seconds.
    """

    function: str
    limit: float
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        module, _, function = self.function.rpartition(":")
        return " ".join((module.rpartition(".")[2], function, *self.arguments))


@dataclass(frozen=True)
class Record:
    """The result of a step. last_lines: its last lines of output, if the result is not OK."""

    name: str
    result: str
    seconds: float
    message: str
    findings: list[Finding]
    last_lines: list[str]


def run_here(step: Step, place: Place) -> None:
    """Run a step in this process, and print each finding as it comes, so that a crash does not lose earlier ones.

    Raises:
        Exception: the step raised it. It has been printed as a finding.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    try:
        for finding in pkgutil.resolve_name(step.function)(place, *step.arguments):
            _print(finding)
    except Exception as error:
        _print(Finding("error", FAILED, message=printable(f"{type(error).__name__}: {error}")))
        raise


def _print(finding: Finding) -> None:
    print(f"\n{_MARK}{json.dumps(dataclasses.asdict(finding))}", flush=True)


def run_apart(step: Step, command: Sequence[str]) -> Record:
    """Run a step as a process. At the step's limit end the process and all that it started.

    Args:
        command: the command of a program that calls `run_here`.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        code = _run(command, log, step.limit)
        log.seek(0)
        lines = log.read().splitlines()
    findings = read_findings(lines)
    result, message = judge(code, findings, step.limit)
    seconds = round(time.monotonic() - started, 1)
    output = [line for line in lines if line and not line.startswith(_MARK)]
    return Record(step.name, result, seconds, message, findings, [] if result == OK else output[-_LAST_LINES:])


def _run(command: Sequence[str], log: Any, limit: float) -> int | None:
    """Return the exit code, or None if the process reached the limit."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**ENVIRONMENT, **os.environ},
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # the process prints its stack
        time.sleep(1)
        return None
    finally:
        # Compilers run in processes of their own, which outlive the step.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_findings(lines: Sequence[str]) -> list[Finding]:
    """Return the findings in a step's output. The last line is cut off if the process was killed while it wrote it."""
    found = (line.removeprefix(_MARK) for line in lines if line.startswith(_MARK) and line.endswith("}"))
    return [Finding(**json.loads(each)) for each in found]


def judge(code: int | None, findings: Sequence[Finding], limit: float) -> tuple[str, str]:
    """Return a step's result, and a line that describes it."""
    if code is None:
        return TIMED_OUT, f"not done after {limit:g} seconds"
    if code < 0:
        return CRASHED, f"ended by {signal.Signals(-code).name}"
    for verdict in (FAILED, WRONG):
        bad = [finding for finding in findings if finding.verdict == verdict]
        if bad:
            return verdict, _line(bad[0])
    if code or not findings:
        return FAILED, f"exit code {code}, without a finding of its own"
    errors = [finding.error for finding in findings if finding.error is not None]
    largest = [f"largest error {max(errors):.1e}"] if errors else []
    return OK, "; ".join([*largest, *(_line(finding) for finding in findings if finding.message)])


def _line(finding: Finding) -> str:
    error = "" if finding.error is None else f" {finding.error:.1e}"
    return f"{finding.what}{error}" + (f": {finding.message}" if finding.message else "")
