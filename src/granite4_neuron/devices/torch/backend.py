"""The backend torch: compiled graphs on a PyTorch device, or on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from granite4_neuron.devices.torch.options import OPTIONS, graphs_of
from granite4_neuron.runtime.declaration import Backend

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.devices.torch.runtime import TorchRuntime


def load(
    checkpoint: Checkpoint,
    generation_config: GenerationConfig,
    *,
    dtype: torch.dtype | None,
    tp_degree: int,
    progress: Callable[[int, int], None] | None,
    remark: Callable[[str], None],
    **options: Any,
) -> TorchRuntime:
    """Load a checkpoint into a `TorchRuntime`, or a `SplitRuntime`, which take the other options as they are."""
    graphs_of(options["graphs"], options["device"])
    from granite4_neuron.checkpoint.loading import load_model
    from granite4_neuron.devices.torch.devices import find_device
    from granite4_neuron.devices.torch.runtime import TorchRuntime
    from granite4_neuron.devices.torch.split import SplitRuntime

    if tp_degree != 1:
        options |= dict(tp_degree=tp_degree, progress=progress, remark=remark)
        return SplitRuntime(checkpoint.path, dtype, generation_config, **options)
    find_device(options["device"])  # before the weights are read
    model = load_model(checkpoint, dtype, progress=progress, remark=remark)
    return TorchRuntime(model, generation_config, **options)


BACKEND = Backend("torch", OPTIONS, load)
