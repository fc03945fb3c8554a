"""The backend xla: compiled graphs on the device of torch_xla."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from granite4_neuron.devices.neuron.sdk import NEEDS_TORCH_XLA
from granite4_neuron.devices.options import COMPILED
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.declaration import Backend

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.devices.xla.runtime import XLARuntime


def load(
    checkpoint: Checkpoint,
    generation_config: GenerationConfig,
    *,
    dtype: torch.dtype | None,
    progress: Callable[[int, int], None] | None,
    remark: Callable[[str], None],
    **options: Any,
) -> XLARuntime:
    """Load a checkpoint into an `XLARuntime`, which takes the other options as they are."""
    from granite4_neuron.checkpoint.loading import load_model

    model = load_model(checkpoint, dtype, progress=progress, remark=remark)
    # After the weights: importing torch_xla takes seconds and starts its client.
    from granite4_neuron.devices.xla.runtime import XLARuntime

    return XLARuntime(model, generation_config, **options)


def require(given: Mapping[str, Any]) -> None:
    """Check that torch_xla is installed; raise UserError if not."""
    if importlib.util.find_spec("torch_xla") is None:
        raise UserError(NEEDS_TORCH_XLA)


BACKEND = Backend("xla", COMPILED, load, require=require)
