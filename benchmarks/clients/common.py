"""The common part of the clients."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL = "tiny"  # the bundled model, by the name that the server gives it
FOLDER = Path(__file__).parents[2] / "src/granite4_neuron/checkpoint/tiny"
QUESTION = [{"role": "user", "content": "What is the assert statement?"}]
TOO_LONG = [{"role": "user", "content": "long " * 3000}]
CITIES = ("Rome", "Oslo")


@contextmanager
def serving(python: str, folder: Path, max_model_len: int) -> Iterator[str]:
    """Run a server of a copy of the bundled model, with a template that shows tools; yield the address of its API."""
    model = shutil.copytree(FOLDER, folder / MODEL)
    shutil.copy(Path(__file__).parent / "tools.jinja", model / "chat_template.jinja")
    command = [python, "-m", "granite4_neuron", "serve", "--model", str(model), "--port", "0", "--dtype", "float32"]
    command += ["--max-model-len", str(max_model_len)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        yield re.search(r"http\S+", line)[0]
    finally:
        process.terminate()
        process.wait()
