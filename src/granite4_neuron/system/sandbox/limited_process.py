"""A process that answers questions within limits of time and memory. It is for work on untrusted input, which decides
the cost of the work.

It starts in a tenth of a second if the module that answers imports little, and not torch.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from granite4_neuron.system.sandbox import limited_process; limited_process.main()"
)


# Of Python, and of C++'s threads.
_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))


class NoProcess(Exception):
    """The system starts no further process or thread."""

    def __init__(self, way_out: str = "; raise the limit (ulimit -u, or a container's)"):
        super().__init__(f"no further process or thread can be started{way_out}.")


@contextmanager
def starting() -> Iterator[None]:
    """Start processes and threads within the block; raise NoProcess if one cannot be started."""
    try:
        yield
    except BlockingIOError as error:
        if hasattr(error, "characters_written"):  # by a write to a pipe that is full
            raise
        raise NoProcess from None
    except RuntimeError as error:
        if str(error) not in _NO_THREAD:
            raise
        raise NoProcess from None


class ProcessEnded(Exception):
    """A limit ended the process while it answered; the message names the limits."""


class Stopped(Exception):
    """A `Stop` ended the question."""


class Killable(Protocol):
    """A process."""

    def kill(self) -> None:
        """End it."""


class Stop:
    """Ends one question from another thread, whether it waits for its turn or is being answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Killable | None = None
        self.is_set = False

    def set(self) -> None:
        """End the question, and with it the process that answers it."""
        with self._lock:
            self.is_set = True
            if self._process is not None:
                self._process.kill()

    @contextmanager
    def over(self, process: Killable) -> Iterator[None]:
        """Within the block, let `set` end a process; raise Stopped if it has been set already."""
        with self._lock:
            if self.is_set:
                raise Stopped
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class LimitedProcess:
    """Answers questions, one at a time, in a process that starts with the first one and stays until it is closed.

    Several threads may share one.

    Args:
        module: in `granite4_neuron.system.sandbox`; its function `answer` takes a question, a JSON object, and returns
            another object.
        seconds: the most processor time for one question.
        memory_bytes: the most memory of the process.
    """

    def __init__(self, module: str, seconds: int, memory_bytes: int):
        self._module = module
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: dict[str, Any], stop: Stop | None = None) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            ProcessEnded: it exceeds the limits.
            NoProcess: it cannot be started.
            Stopped: `stop` was set.
        """
        with self._lock:
            return self._ask(json.dumps(question), stop or Stop())

    def close(self) -> None:
        """End the process, even while it answers; a later question starts another."""
        # A question that was asked before may still start a process until it is answered.
        while not self._lock.acquire(timeout=0.05):
            process = self._process
            if process is not None:
                process.kill()
        try:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None
        finally:
            self._lock.release()

    def _ask(self, question: str, stop: Stop) -> dict[str, Any]:
        if stop.is_set:
            raise Stopped
        with starting():
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            process = self._process
            assert process.stdin is not None and process.stdout is not None  # both are pipes
            # The limit in the process is on processor time. This one ends a process that only waits.
            timer = threading.Timer(6 * self._seconds, process.kill)
            timer.start()
        answer = None
        try:
            with stop.over(process):
                process.stdin.write(question + "\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
        except (ValueError, BrokenPipeError):  # it was killed by a limit, or stopped
            if not stop.is_set:
                raise ProcessEnded(self._reason(process.wait())) from None
        finally:
            timer.cancel()
            if answer is None or stop.is_set:  # after Ctrl-C, its late answer would be taken for the next question's
                process.kill()
                process.wait()
        if stop.is_set:
            raise Stopped
        return answer

    def _reason(self, status: int) -> str:
        if status == -signal.SIGSEGV:
            return "it is nested too deep"
        return f"it takes more than {self._seconds} seconds or {self._memory_bytes / 2**30:g} GiB"

    def _start(self) -> subprocess.Popen[str]:
        limits = map(str, (self._seconds, self._memory_bytes))
        command = [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path), self._module, *limits]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
        )


def main() -> None:
    """Serve a `LimitedProcess`: read a question from each line of standard input, and write an answer to a line of
    standard output.
    """
    name, (seconds, memory_bytes) = sys.argv[2], map(int, sys.argv[3:5])
    module = importlib.import_module(f"granite4_neuron.system.sandbox.{name}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, most))
        print(json.dumps(module.answer(json.loads(line))), flush=True)
