"""The AI SDK, in JavaScript: @ai-sdk/openai, which calls the Responses API, and @ai-sdk/anthropic."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.clients.common import MODEL


def run(url: str, folder: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    script = (
        Path(__file__).with_suffix(".mjs").read_text()
    )  # read from standard input, so that packages are found from the current folder
    command = ["node", "--input-type=module", "-", url, MODEL]
    ran = subprocess.run(command, input=script, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    yield from ran.stdout.splitlines()
