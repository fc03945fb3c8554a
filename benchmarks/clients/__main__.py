"""Drives the server with clients of other projects, each with what it is used for, and says what was run.

    pip install openai litellm langchain-openai 'lm_eval[api]' guidellm llm
    pip install instructor smolagents dspy haystack-ai llama-index-llms-openai-like 'autogen-ext[openai]' langgraph
    python -m benchmarks.clients
    python -m benchmarks.clients litellm guidellm --python .venv/bin/python
    .venv-vllm/bin/python -m benchmarks.clients vllm --python .venv/bin/python

It starts a server with the bundled model. `--python` has this package; the clients may be in another environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.clients import guidellm, langchain, litellm, llm, lm_eval, openai, structured, vllm

MODULES = (openai, litellm, langchain, lm_eval, guidellm, llm, structured, vllm)
CLIENTS = {module.__name__.rpartition(".")[2]: module for module in MODULES}
PACKAGES = {"langchain": "langchain_openai", "structured": "instructor"}  # of clients whose package has another name


@contextmanager
def _server(python: str) -> Iterator[str]:
    """Run a server of the bundled model; yield the address of its API."""
    command = [python, "-m", "granite4_neuron", "serve", "--port", "0", "--dtype", "float32", "--max-model-len", "1024"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        yield re.search(r"http\S+", line)[0]
    finally:
        process.terminate()
        process.wait()


def _is_installed(client: str) -> bool:
    return importlib.util.find_spec(PACKAGES.get(client, client)) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help=f"some of {', '.join(CLIENTS)} (default: all that are installed)"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the server")
    options = parser.parse_args()
    unknown = set(options.clients) - set(CLIENTS)
    if unknown:
        parser.error(f"there is no client {' or '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}.")
    clients = options.clients or list(filter(_is_installed, CLIENTS))
    missing = [client for client in clients if not _is_installed(client)]
    if missing or not clients:
        parser.error(f"install {' and '.join(missing or CLIENTS)} first.")
    # No client is to find a key or a configuration of the person who runs this, nor the network.
    os.environ |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with _server(options.python) as url, tempfile.TemporaryDirectory() as folder:
        for name in clients:
            for what in CLIENTS[name].run(url, Path(folder)):
                print(f"{name}: {what}", flush=True)


if __name__ == "__main__":
    main()
