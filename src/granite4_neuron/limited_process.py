"""A process that answers questions, with bounds on its time and memory, for work whose cost a stranger decides.

It is there in a tenth of a second if the module that answers imports little, and no torch.
"""

from __future__ import annotations

import importlib
import json
import math
import resource
import subprocess
import sys
import threading
import time
from typing import Any

_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import granite4_neuron.limited_process as p; p.main()"


class ProcessEnded(Exception):
    """A limit ended the process while it answered; the message says which limits there are."""


class LimitedProcess:
    """Answers questions, one at a time, in a process that starts with the first one and stays until it is closed.

    Several threads may share one.

    Args:
        module: of this package; its function `answer` gets a question, an object in JSON, and returns another.
        seconds: of the processor's time for one question.
        memory_bytes: of the process.
    """

    def __init__(self, module: str, seconds: int, memory_bytes: int):
        self._module = module
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            ProcessEnded: it takes more than the limits.
        """
        with self._lock:
            return self._ask(json.dumps(question))

    def close(self) -> None:
        """End the process, even while it answers; a later question starts another."""
        # A question that was asked before may start a process at any time until its answer is there.
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

    def _ask(self, question: str) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = _start(self._module, self._seconds, self._memory_bytes)
        process = self._process
        # The limit in the process is of the processor's time; this one is for an answer that waits.
        timer = threading.Timer(6 * self._seconds, process.kill)
        timer.start()
        answer = None
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (ValueError, BrokenPipeError):  # it was killed by a limit
            memory = f"{self._memory_bytes / 2**30:g} GiB"
            raise ProcessEnded(f"it takes more than {self._seconds} seconds or {memory}") from None
        finally:
            timer.cancel()
            if answer is None:  # after Ctrl-C, its late answer would be taken for the next one
                process.kill()
                process.wait()
        return answer


def _start(module: str, seconds: int, memory_bytes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path), module, str(seconds), str(memory_bytes)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    # A session of its own: Ctrl-C in the terminal is not meant for it.
    return subprocess.Popen(command, **pipes, text=True, encoding="utf-8", start_new_session=True)


def main() -> None:
    """Serve a `LimitedProcess`: read a question from each line of standard input, and write an answer to a line of
    standard output.
    """
    name, seconds, memory_bytes = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    module = importlib.import_module(f"granite4_neuron.{name}")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, most))
        print(json.dumps(module.answer(json.loads(line))), flush=True)
