"""Starts a server with the words of a command, sends it a few requests, prints the answers and ends it.

python -m benchmarks.first_run.server PROGRAM serve --port {port} ...
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

_LIMIT = 3 * 3600  # seconds until it must be ready, most of them for compilation
_ANSWER = 1800
_LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 80  # more than 512 tokens


def main(command: Sequence[str]) -> int:
    """Return 0 if every request has an answer with text."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = str(place.getsockname()[1])
    process = subprocess.Popen([word.replace("{port}", port) for word in command], start_new_session=True)
    try:
        _wait(process, port)
        model = _ask(port, "/v1/models")["data"][0]["id"]
        chat = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}
        texts = [_ask(port, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]]
        for prompt in (_LONG_PROMPT, "A"):
            asked = {"model": model, "prompt": prompt, "max_tokens": 16}
            texts.append(_ask(port, "/v1/completions", asked)["choices"][0]["text"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for text in texts:
        print(f"answer: {text!r}")
    return 0 if all(texts) else 1


def _wait(process: subprocess.Popen, port: str) -> None:
    started = time.monotonic()
    while time.monotonic() - started < _LIMIT:
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode} before it was ready.")
        with contextlib.suppress(OSError, urllib.error.URLError):
            _ask(port, "/health")
            return
        time.sleep(0.2)
    sys.exit(f"the server is not ready after {_LIMIT} seconds.")


def _ask(port: str, path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_ANSWER) as response:
        text = response.read()
    return json.loads(text or "{}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
