"""llama.cpp in the comparison of one text: llama-server with the same weights, started anew for each way."""

from __future__ import annotations

import argparse
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.llama_cpp import gguf_of
from benchmarks.one_text_engines import DRAFT_TOKENS, Failed, Groups, Row, Text, Way, check_way, chunk_of, half_of
from granite4_neuron.errors import UserError

SERVER = "llama-server"
_HOST = "127.0.0.1"
_LOOKUP = 2  # tokens that an n-gram has
_START_SECONDS = 120.0


class LlamaServer:
    """llama-server, with its own defaults. Its activations are in float32, its keys and values in float16."""

    def __init__(self, folder: Path, numbers: str, options: argparse.Namespace):
        self._programs, self._chunk, self._new = options.llama_cpp, chunk_of(options), options.output_length
        self._length = options.prompt_length + options.output_length
        self._files = tempfile.TemporaryDirectory()
        self._weights = gguf_of(folder, numbers, self._programs, Path(self._files.name))

    def serve(self, way: Way, groups: Groups) -> list[Text]:
        with self._server(way) as client:
            answers = [answer for group in groups for answer in self._group(client, way, group)]
        check_way(way, *(sum(answer["timings"].get(name, 0) for answer in answers) for name in ("cache_n", "draft_n")))
        return [[_row(entry) for entry in answer["completion_probabilities"]] for answer in answers]

    def _group(self, client: httpx.Client, way: Way, group: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        body = dict(temperature=0, ignore_eos=True, n_probs=1, cache_prompt=way.from_cache)
        if way.from_cache:  # a slot keeps what it ran last
            _post(client, body | dict(prompt=[half_of(prompt) for prompt in group], n_predict=1))
        return _post(client, body | dict(prompt=group, n_predict=self._new))

    @contextmanager
    def _server(self, way: Way) -> Iterator[httpx.Client]:
        """Run the server while the context lasts.

        Raises:
            UserError: it cannot be run.
            Failed: it ends before it answers.
        """
        port = _free_port()
        command = self._command(way, port)
        client = httpx.Client(base_url=f"http://{_HOST}:{port}", timeout=None)
        with tempfile.TemporaryFile("w+") as log, client:
            try:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            except OSError as error:
                raise UserError(f"{command[0]} cannot be run ({error.strerror}).") from None
            try:
                _wait(client, process)
                yield client
            except httpx.TransportError:
                log.seek(0)
                raise Failed((log.read().strip() or "its process ended.").splitlines()[-1]) from None
            finally:
                process.kill()
                process.wait()

    def _command(self, way: Way, port: int) -> list[str]:
        slots, threads = str(way.batch), str(way.threads)
        command = [str(self._programs / SERVER), "--host", _HOST, "--port", str(port), "-m", str(self._weights)]
        command += ["-np", slots, "-c", str(way.batch * self._length), "-t", threads, "-tb", threads]
        if way.in_chunks:
            command += ["-b", str(self._chunk), "-ub", str(self._chunk)]
        if way.drafts:
            command += ["--spec-type", "ngram-simple"]
            command += ["--spec-ngram-simple-size-n", str(_LOOKUP), "--spec-ngram-simple-size-m", str(DRAFT_TOKENS)]
        return command

    def close(self) -> None:
        self._files.cleanup()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_HOST, 0))
        return free.getsockname()[1]


def _wait(client: httpx.Client, process: subprocess.Popen) -> None:
    """Wait until the server answers.

    Raises:
        httpx.TransportError: it has ended, or takes too long.
    """
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            if process.poll() is not None or time.monotonic() > end:
                raise
        time.sleep(0.05)


def _post(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Have prompts run at the same time; return an answer for each."""
    response = client.post("/completion", json=body)
    answer = response.json()
    if response.status_code != httpx.codes.OK:
        raise Failed(answer["error"]["message"])
    return answer if isinstance(answer, list) else [answer]


def _row(entry: dict[str, Any]) -> Row:
    """Return a token with its log-probability; llama-server reports none for tokens that it verifies."""
    return Row(entry["id"], entry["logprob"] if entry["top_logprobs"] else None)
