"""The reference: transformers' model, and the checkpoint folder that it reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config.aliases import time_step_limit_in


@contextmanager
def readable_by_transformers(checkpoint: Checkpoint) -> Iterator[Path]:
    """Provide a checkpoint as a folder that transformers reads; for any other a temporary one, with the values in
    float32.
    """
    if checkpoint.folder is not None:
        yield checkpoint.folder
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "reference"
        save_model(load_model(checkpoint, torch.float32), folder)
        yield folder


def load_reference(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load transformers' model on the CPU, with config.json's limits of time steps.

    transformers up to 5.24 takes (time_step_min, infinity) in their place for Nemotron. NVIDIA's own code, vLLM, mlx-lm
    and llama.cpp do not: https://github.com/huggingface/transformers/pull/48989.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    limit = getattr(model.config, "time_step_limit", None)
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if limit is not None and hasattr(module, "time_step_limit"):
            module.time_step_limit = time_step_limit_in(limit)
    return model
