"""llama.cpp as a reference: its converter and server. LLAMA_CPP names its source folder, which is built in build/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ.get("LLAMA_CPP", "no llama.cpp"))
PROGRAMS = FOLDER / "build" / "bin"
_CONVERTER = "convert_hf_to_gguf.py"
IS_THERE = (PROGRAMS / "llama-server").is_file() and (FOLDER / _CONVERTER).is_file()
IF_THERE = f"LLAMA_CPP names no folder with {_CONVERTER} and build/bin/llama-server"

# The converter knows the tokenizers of published models only, and a random model has none: each token is its number.
_PROGRAM = """
import convert_hf_to_gguf
from conversion import base, granite, nemotron

base.AutoConfig = None  # config.json is read as it is: transformers would add fields of experts to a model without any

def set_vocab(self):
    size = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("llama")
    self.gguf_writer.add_token_list([f"<{number}>" for number in range(size)])
    self.gguf_writer.add_token_scores([0.0] * size)
    self.gguf_writer.add_token_types([1] * size)

for known in (granite.GraniteModel, granite.GraniteHybridModel, nemotron.NemotronHModel):
    known.set_vocab = set_vocab
convert_hf_to_gguf.main()
"""


def converted(folder: Path, to: Path) -> Path:
    """Convert a checkpoint folder to a GGUF file in float32, which is returned."""
    command = [sys.executable, "-c", _PROGRAM, str(folder), "--outfile", str(to), "--outtype", "f32"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(FOLDER)))
    assert to.is_file(), run.stderr[-2000:]
    return to
