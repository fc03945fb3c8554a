"""The names of a checkpoint folder's files, and what a folder has that lacks weights or a config."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
MODELOPT = "hf_quant_config.json"  # of NVIDIA's quantizer, which need not write to config.json
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
_OTHER_FORMATS = {
    "pytorch_model*.bin": "weights as pickled by torch (pytorch_model.bin)",
    "consolidated*.pth": "weights as pickled by torch (consolidated.pth)",
}


def what_else_is_in(folder: Path) -> str:
    """Return a sentence on why `folder` has no weights or no config, if its other files show it; otherwise nothing."""
    if any(folder.glob("snapshots/*/config.json")):
        newest = max(folder.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
        return f" It is a folder of the Hugging Face cache; give {newest.parent}."
    if any((folder.parent.parent / "blobs").glob("*.incomplete")):
        return " It is a download that was not completed; give the Hugging Face id again to complete it."
    if file := next(iter(sorted(folder.glob("*.gguf"))), None):
        return f" It holds GGUF files; give one of them: {file}."
    for pattern, what in _OTHER_FORMATS.items():
        if any(folder.glob(pattern)):
            return f" It holds {what}; this package reads safetensors."
    if folder.parent.name == "snapshots":
        return " It is an incomplete copy in the Hugging Face cache; give the Hugging Face id to download the rest."
    return ""
