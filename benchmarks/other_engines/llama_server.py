"""Runs llama.cpp's llama-server for benchmarks, and sends it requests."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.errors import Failed
from benchmarks.other_engines.llama_cpp import QUANTIZE
from granite4_neuron.errors import UserError

LLAMA_CPP, SERVER = "llama.cpp", "llama-server"
_HOST = "127.0.0.1"
_START_SECONDS = 120.0


def check_options(compare: Sequence[str], programs: Path | None) -> None:
    """Check that a benchmark's --compare and --llama-cpp go together.

    Raises:
        UserError: they do not.
    """
    if (LLAMA_CPP in compare) != (programs is not None):
        raise UserError(
            f"--compare {LLAMA_CPP} needs --llama-cpp, the folder of {SERVER} and {QUANTIZE}, and no other does."
        )


@contextmanager
def running(programs: Path, weights: Path, arguments: Sequence[str]) -> Iterator[httpx.Client]:
    """Run the server while the context lasts.

    Args:
        programs: the folder of llama-server.
        weights: a GGUF file.
        arguments: its other arguments.

    Raises:
        UserError: it cannot be run.
        Failed: it ends before it answers.
    """
    port = _free_port()
    command = [str(programs / SERVER), "--host", _HOST, "--port", str(port), "-m", str(weights), *arguments]
    limits = httpx.Limits(max_keepalive_connections=0)  # the server may close an idle connection
    client = httpx.Client(base_url=f"http://{_HOST}:{port}", timeout=None, limits=limits)
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


def complete(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Run prompts at the same time; return an answer for each.

    Raises:
        Failed: the server refuses.
    """
    response = client.post("/completion", json=body)
    answer = response.json()
    if response.status_code != httpx.codes.OK:
        raise Failed(answer["error"]["message"])
    return answer if isinstance(answer, list) else [answer]


def stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a prompt; yield the events of its answer as they come.

    Raises:
        Failed: the server refuses.
    """
    with client.stream("POST", "/completion", json=body | dict(stream=True)) as response:
        if response.status_code != httpx.codes.OK:
            raise Failed(json.loads(response.read())["error"]["message"])
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


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
