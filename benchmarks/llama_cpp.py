"""llama.cpp in benchmarks: llama-bench on the same weights, a process of its own for each run, and llama-server."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gguf_checkpoint import write_gguf
from granite4_neuron import UserError

BENCH, QUANTIZE, SERVER = "llama-bench", "llama-quantize", "llama-server"
_START_SECONDS = 120
# The nearest type to each quantisation of this package.
GGUF_TYPES = {"int8": "Q8_0", "int4": "Q4_0"}


class LlamaCpp:
    """llama-bench on a GGUF file.

    Args:
        programs: the folder of llama-bench.
        file: the weights.
    """

    def __init__(self, programs: Path, file: Path, threads: int):
        self._command = [str(programs / BENCH), "-m", str(file), "-t", str(threads), "-r", "1", "-o", "json"]
        self.weight_bytes = file.stat().st_size

    def run(self, prompts: list[list[int]], output_length: int) -> list[float]:
        """Run one prompt of random tokens, as `Ours.run`. Each step of decode gets the mean time, because llama-bench
        reports only that.
        """
        (prompt,) = prompts
        first = self._seconds("-p", len(prompt), "-n", 0)
        steps = output_length - 1
        if not steps:
            return [first]
        step = self._seconds("-p", 0, "-n", steps, "-d", len(prompt)) / steps
        return [first + step * number for number in range(output_length)]

    def _seconds(self, *arguments: str | int) -> float:
        (test,) = json.loads(_run([*self._command, *map(str, arguments)]))
        return test["samples_ns"][0] / 1e9


@dataclass(frozen=True)
class Completion:
    """New tokens with their log-probabilities, and how many of the prompt's tokens were in the cache."""

    rows: list[tuple[int, float]]
    cached: int


class LlamaServer:
    """llama-server on a GGUF file, until `close`.

    Args:
        programs: its folder.
        slots: sequences at a time, of up to `length` tokens.
        chunk: the most tokens in a step.

    Raises:
        UserError: it does not start.
    """

    def __init__(self, programs: Path, file: Path, threads: int, slots: int, length: int, chunk: int):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [programs / SERVER, "-m", file, "--port", port, "-t", threads, "-tb", threads]
        command += ["-np", slots, "-c", slots * length, "-b", chunk, "-ub", chunk]
        try:
            quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._process = subprocess.Popen([str(each) for each in command], **quiet)
        except OSError as error:
            raise UserError(f"{command[0]} cannot be run ({error.strerror}).") from None
        end = time.monotonic() + _START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise UserError(f"{SERVER} did not start; try: {' '.join(map(str, command))}")
            time.sleep(0.1)

    def complete(self, prompts: Sequence[Sequence[int]], new: int, cached: bool) -> list[Completion]:
        """Complete prompts at the same time, each in a slot of its own, with greedy texts of `new` tokens.

        Args:
            cached: whether a slot keeps the beginning of its prompt that it already has.
        """
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda item: self._complete(*item, new, cached), enumerate(prompts)))

    def _complete(self, slot: int, prompt: Sequence[int], new: int, cached: bool) -> Completion:
        options = dict(n_predict=new, temperature=0, n_probs=1, ignore_eos=True, cache_prompt=cached, id_slot=slot)
        answer = self._ask("/completion", dict(prompt=list(prompt), **options))
        rows = [(each["id"], each["logprob"]) for each in answer["completion_probabilities"]]
        return Completion(rows, answer["timings"]["cache_n"])

    def _ask(self, path: str, body: dict[str, object] | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self._url + path, data)) as answer:
            return json.load(answer)

    def _is_up(self) -> bool:
        try:
            return self._ask("/health") == {"status": "ok"}
        except (urllib.error.URLError, ConnectionError):
            return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def gguf_of(folder: Path, quantize: str | None, programs: Path, into: Path) -> Path:
    """Write the GGUF file of a checkpoint, in its dtype or quantized, to the folder `into`; return its path.

    Raises:
        UserError: that failed; the message says why.
    """
    file = into / "model.gguf"
    write_gguf(folder, file)
    if quantize is None:
        return file
    quantized = into / f"model-{quantize}.gguf"
    _run([str(programs / QUANTIZE), str(file), str(quantized), GGUF_TYPES[quantize]])
    file.unlink()
    return quantized


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run ({error.strerror}).") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or "no reason given").splitlines()[-1]
        raise UserError(f"{' '.join(command)} failed: {reason}") from None
