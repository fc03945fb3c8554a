"""The checkpoint folder that transformers reads as the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.saving import save_model


@contextmanager
def readable_by_transformers(checkpoint: Checkpoint) -> Iterator[Path]:
    """Provide a checkpoint as a folder; for a GGUF file a temporary one with its values in float32."""
    if checkpoint.folder is not None:
        yield checkpoint.folder
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "reference"
        save_model(load_model(checkpoint, torch.float32), folder)
        yield folder
