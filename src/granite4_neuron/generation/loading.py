"""From a checkpoint to something that generates."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron import checkpoint
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.cpu import CPURuntime


def bundled_checkpoint() -> Path:
    """The small trained checkpoint that comes with the package; its README.md says what it is."""
    return Path(str(resources.files("granite4_neuron") / "data" / "tiny"))


def load(
    model: str | Path | None = None, dtype: torch.dtype | None = None, prefill_scan: str = "chunked"
) -> tuple[CPURuntime, PreTrainedTokenizerFast]:
    """A model ready to run on this machine's processor, and its tokenizer.

    Args:
        model: a checkpoint folder or a Hugging Face id; None for the small checkpoint that comes with the package.
        dtype: of weights and activations; None for that of the stored weights.
        prefill_scan: "chunked" or "quadratic".

    Raises:
        UserError: no such checkpoint, or it is not a complete Granite 4 hybrid one.
    """
    folder = checkpoint.find(model if model is not None else bundled_checkpoint())
    config = GraniteMoeHybridConfig.from_file(folder / "config.json")
    tokenizer = load_tokenizer(folder, config)
    weights = checkpoint.load_model(folder, dtype, prefill_scan)
    return CPURuntime(weights, _generation_config(folder, config)), tokenizer


def load_tokenizer(folder: Path, config: GraniteMoeHybridConfig) -> PreTrainedTokenizerFast:
    """The checkpoint's tokenizer.

    Raises:
        UserError: there is none, or it has more entries than the model's vocabulary.
    """
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be read ({_first_line(error)}).") from None
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} entries and the model only {config.vocab_size}; "
            "they are not of the same checkpoint."
        )
    return tokenizer


def _generation_config(folder: Path, config: GraniteMoeHybridConfig) -> GenerationConfig:
    eos = list(config.eos_token_id) if isinstance(config.eos_token_id, tuple) else config.eos_token_id
    values = {"bos_token_id": config.bos_token_id, "eos_token_id": eos}
    file = folder / checkpoint.GENERATION_CONFIG
    if file.is_file():
        try:
            values |= json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, TypeError) as error:
            raise UserError(f"{file} cannot be read ({_first_line(error)}).") from None
    generation_config = GenerationConfig.from_dict(values)
    # transformers 4.57 would sample among 50 tokens where a checkpoint says nothing, 5.x among all.
    generation_config.top_k = values.get("top_k")
    return generation_config


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
