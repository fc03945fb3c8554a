"""guidellm: a benchmark of chats and one of completions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.clients.common import FOLDER, MODEL

REQUESTS = 4


def run(url: str, folder: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    yield f"guidellm {metadata.version('guidellm')}"
    for path in ("/v1/chat/completions", "/v1/completions"):
        report = folder / "guidellm.json"
        command = [Path(sys.executable).parent / "guidellm", "run", "--disable-console"]
        target = url.removesuffix("/v1")
        command += ["--backend", f"kind=openai_http,target={target},model={MODEL},request_format={path}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
        command += ["--tokenizer", f"kind=hf_auto,model={FOLDER}", "--profile", "kind=synchronous"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={report}"]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] == REQUESTS, totals
        yield f"{path}: {totals['successful']} of {REQUESTS} requests"
