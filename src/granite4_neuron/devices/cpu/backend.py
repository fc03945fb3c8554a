"""The backend cpu: this machine's processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.devices.cpu.options import OPTIONS
from granite4_neuron.runtime.declaration import Backend

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.devices.cpu.runtime import CPURuntime


def load(
    checkpoint: Checkpoint,
    generation_config: GenerationConfig,
    *,
    dtype: torch.dtype | None,
    cpu_kernels: str,
    quantize: str | None,
    cache_weights: str | Path | None,
    mtp: bool,
    adapters: Mapping[str, str | Path],
    progress: Callable[[int, int], None] | None,
    remark: Callable[[str], None],
    **options: Any,
) -> CPURuntime:
    """Load a checkpoint into a `CPURuntime`, which takes the other options as they are."""
    from granite4_neuron.checkpoint.adapters import read_adapter
    from granite4_neuron.checkpoint.loading import load_model
    from granite4_neuron.checkpoint.weight_cache import WeightCache
    from granite4_neuron.devices.cpu import operators as cpu
    from granite4_neuron.devices.cpu.build import library_key
    from granite4_neuron.devices.cpu.runtime import CPURuntime
    from granite4_neuron.system.version import installed_version

    options["adapters"] = {name: read_adapter(folder, checkpoint.config) for name, folder in adapters.items()}
    operators = cpu.choose_operators(cpu_kernels)
    layout = f"{None if operators.pack is None else library_key()} {installed_version()}"
    model = load_model(
        checkpoint.with_mtp() if mtp else checkpoint,
        dtype,
        quantize=quantize,
        operators=operators,
        keep_quantized=QUANTIZATIONS,
        cache=None if cache_weights is None else WeightCache(Path(cache_weights), layout),
        progress=progress,
        remark=remark,
    )
    return CPURuntime(model, generation_config, cpu_kernels=cpu_kernels, **options)


BACKEND = Backend("cpu", OPTIONS, load)
