"""Writes checkpoints: safetensors under Hugging Face's names, in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.folder_contents import CONFIG
from granite4_neuron.checkpoint.names import StoredNames
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.output_folder import complete_or_absent
from granite4_neuron.checkpoint.stored_tensors import INDEX
from granite4_neuron.checkpoint.weight_plan import model_format
from granite4_neuron.config.quantization import quantization_config
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.ops import Format, QuantizedWeight, as_tensor


def save_model(
    model: HybridForCausalLM,
    folder: str | Path,
    files_from: str | Path | Checkpoint | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write a checkpoint, all of it or nothing. Transformers 4.57 and 5.x read it too, unless it is quantized.

    Args:
        model: its weights are written in their dtype, quantized ones in `Format.layout`, not packed.
        folder: must not exist, or be empty.
        files_from: a checkpoint whose tokenizer and generation config are written too; see `open_checkpoint`.
        max_shard_size: larger checkpoints are split into files of at most this size.

    Raises:
        UserError: the folder is in use, or writing failed (no space, no permission).
    """
    weights: dict[str, torch.Tensor] = {}
    stored_names = StoredNames(model.config)
    formats: dict[str, Format] = {}
    for name, weight in model.named_weights():
        if isinstance(weight, QuantizedWeight):
            formats[name] = weight.format
            for ending, tensor in weight.tensors().items():
                weights |= stored_names.stored(f"{name}{ending}", tensor)
        else:
            weights |= stored_names.stored(name, as_tensor(weight, model.dtype))
    about = {**model.config.to_dict(), "torch_dtype": str(model.dtype).removeprefix("torch.")}
    if formats:
        about["quantization_config"] = quantization_config(model_format(formats).name)
    plan = split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_size)
    with complete_or_absent(Path(folder)) as partial:
        for file, names in plan.filename_to_tensors.items():
            save_file({name: weights[name].detach() for name in names}, partial / file, metadata={"format": "pt"})
        if plan.is_sharded:
            _write_json(partial / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
        _write_json(partial / CONFIG, about)
        if files_from is not None:
            open_checkpoint(files_from).copy_texts_to(partial)


def _write_json(file: Path, values: dict) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
