"""The backend torch: compiled graphs on a PyTorch device, or on several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from granite4_neuron.devices.torch.options import OPTIONS, check_format, find_kind, graphs_of
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.declaration import Backend

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.devices.torch.runtime import TorchRuntime
    from granite4_neuron.ops import Format, QuantizedWeight


def load(
    checkpoint: Checkpoint,
    generation_config: GenerationConfig,
    *,
    dtype: torch.dtype | None,
    quantize: str | None,
    tp_degree: int,
    progress: Callable[[int, int], None] | None,
    remark: Callable[[str], None],
    **options: Any,
) -> TorchRuntime:
    """Load a checkpoint into a `TorchRuntime`, or a `SplitRuntime`, which take the other options as they are."""
    graphs_of(options["graphs"], options["device"])
    stored = None if checkpoint.quantization is None else checkpoint.quantization.name
    if (format := quantize or stored) is not None:
        check_format(format, options["device"])
        if tp_degree > 1:
            raise UserError(f"{format} weights cannot be split over {tp_degree} ranks; they run on one GPU.")
    from granite4_neuron.checkpoint.loading import load_model
    from granite4_neuron.devices.torch.devices import find_device
    from granite4_neuron.devices.torch.runtime import TorchRuntime
    from granite4_neuron.devices.torch.split import SplitRuntime
    from granite4_neuron.ops import TORCH

    if tp_degree != 1:
        options |= dict(tp_degree=tp_degree, progress=progress, remark=remark)
        return SplitRuntime(checkpoint.path, dtype, generation_config, **options)
    device = find_device(options["device"])  # before the weights are read
    model = load_model(
        checkpoint,
        dtype,
        quantize=quantize,
        operators=replace(TORCH, quantize=partial(_quantize, device)),
        keep_quantized=find_kind(options["device"]).formats,
        progress=progress,
        remark=remark,
    )
    return TorchRuntime(model, generation_config, **options)


def _quantize(device: torch.device, weight: torch.Tensor, format: Format) -> QuantizedWeight:
    """Compute `ops.operators.Quantize` on a device, which does so in a small part of the time."""
    return format.quantize(weight.to(device))


def require(given: Mapping[str, Any]) -> None:
    """Check that the PyTorch device is here; raise UserError if not."""
    if (reason := find_kind(given["device"]).why_missing()) is not None:
        raise UserError(reason)


BACKEND = Backend("torch", OPTIONS, load, require=require)
