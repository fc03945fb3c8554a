"""Drives the server with clients of other projects, each in its usual ways, and prints what was run.

    pip install openai litellm langchain-openai 'lm_eval[api]' guidellm llm
    pip install instructor anthropic
    pip install smolagents dspy haystack-ai llama-index-llms-openai-like 'autogen-ext[openai]' langgraph
    pip install openai-agents anthropic langchain-anthropic 'pydantic-ai-slim[openai,anthropic]'
    npm install ai zod @ai-sdk/openai @ai-sdk/anthropic
    python -m benchmarks.clients
    python -m benchmarks.clients litellm guidellm --python .venv/bin/python
    python -m benchmarks.clients ai_sdk --npm FOLDER
    .venv-vllm/bin/python -m benchmarks.clients vllm --python .venv/bin/python

It starts a server with the bundled model and a chat template that shows tools. `--python` is an interpreter with this
package. The clients may be in another environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.clients import (
    ai_sdk,
    anthropic,
    guidellm,
    langchain,
    langchain_anthropic,
    litellm,
    llm,
    lm_eval,
    openai,
    openai_agents,
    pydantic_ai,
    structured,
    vllm,
)
from benchmarks.clients.common import serving

MODULES = (
    openai,
    openai_agents,
    anthropic,
    litellm,
    langchain,
    langchain_anthropic,
    pydantic_ai,
    ai_sdk,
    lm_eval,
    guidellm,
    llm,
    structured,
    vllm,
)
CLIENTS = {module.__name__.rpartition(".")[2]: module for module in MODULES}
# Packages of clients that have other names. One of several is enough.
PACKAGES = {"langchain": ("langchain_openai",), "openai_agents": ("agents",), "structured": structured.PACKAGES}


def _is_installed(client: str, npm: Path) -> bool:
    if CLIENTS[client] is ai_sdk:
        return (npm / "node_modules/ai").is_dir()
    return any(importlib.util.find_spec(package) is not None for package in PACKAGES.get(client, (client,)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help=f"some of {', '.join(CLIENTS)} (default: all that are installed)"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the server")
    parser.add_argument("--npm", type=Path, default=Path(), help="the folder with node_modules, for ai_sdk")
    options = parser.parse_args()
    unknown = set(options.clients) - set(CLIENTS)
    if unknown:
        parser.error(f"there is no client {' or '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}.")
    clients = options.clients or [client for client in CLIENTS if _is_installed(client, options.npm)]
    missing = [client for client in clients if not _is_installed(client, options.npm)]
    if missing or not clients:
        parser.error(f"install {' and '.join(missing or CLIENTS)} first.")
    # No client should find a key or a configuration of the person who runs this, or use the network.
    os.environ |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with tempfile.TemporaryDirectory() as folder, serving(options.python, Path(folder), 4096) as url:
        (Path(folder) / "node_modules").symlink_to((options.npm / "node_modules").absolute())
        for name in clients:
            for what in CLIENTS[name].run(url, Path(folder)):
                print(f"{name}: {what}", flush=True)


if __name__ == "__main__":
    main()
