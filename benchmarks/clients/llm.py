"""The command llm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.clients.common import MODEL, QUESTION


def run(url: str, folder: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    yield f"llm {metadata.version('llm')}"
    (folder / "extra-openai-models.yaml").write_text(f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {url}\n")
    command = [Path(sys.executable).parent / "llm", "-m", "ours", "-s", "be brief", "-o", "max_tokens", "20"]
    texts = []
    for option in ([], ["--no-stream"]):
        environment = os.environ | {"LLM_USER_PATH": str(folder)}
        asked = [*command, *option, QUESTION[0]["content"]]
        ran = subprocess.run(asked, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        texts.append(ran.stdout)
    assert texts[0] == texts[1]
    yield f"a prompt with a system message, streamed and whole: {texts[0].strip()!r}"
