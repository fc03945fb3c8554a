"""The backend cpu: this machine's processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from granite4_neuron.config.choices import CPU_KERNELS, FOLDER_VARIABLE, MERGE_INSTEAD, QUANTIZATIONS
from granite4_neuron.devices.options import ARITHMETIC
from granite4_neuron.runtime.declaration import Backend, Option

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.devices.cpu.runtime import CPURuntime

STATE_DTYPES = ("float32", "float16", "bfloat16")
_BELONGS = "tuned launch parameters and CPU kernels belong to the backend cpu; the others have none."

OPTIONS = (
    *ARITHMETIC,
    Option(
        "cpu_kernels",
        "kernels of the cpu backend: fused ones, compiled for this processor at first use, or plain torch (default: "
        "%(default)s)",
        _BELONGS,
        default=CPU_KERNELS[0],
        choices=CPU_KERNELS,
    ),
    Option(
        "tuned_configs",
        "for the cpu backend: a folder of launch parameters that the tune command wrote (default: the folder that the "
        f"environment variable {FOLDER_VARIABLE} names, if any)",
        _BELONGS,
        metavar="DIR",
    ),
    Option(
        "quantize",
        "for the cpu backend: hold the large weights in this format; lossless12 has the numbers of bfloat16 (default: "
        "as stored)",
        "{value} weights are for the backend cpu; {backend} runs the original in its dtype.",
        choices=QUANTIZATIONS,
    ),
    Option(
        "state_dtype",
        "for the cpu backend: dtype of SSM states; 16 bits are rounded stochastically (default: float32)",
        "SSM states in 16 bits are for the backends cpu and nxdi; {backend} has them in float32.",
        choices=STATE_DTYPES,
        is_dtype=True,
        everywhere="float32",
    ),
    # --speculate of the commands implies it.
    Option(
        "mtp",
        refusal="drafting with the model's layers for multi-token prediction is for the backend cpu, and the backend "
        "here is {backend}.",
        default=False,
    ),
    # --adapter of the commands is of one adapter, and not all of them have it.
    Option(
        "adapters",
        refusal=f"adapters run on the backend cpu only, and the backend here is {{backend}}; {MERGE_INSTEAD}.",
        default={},
    ),
)


def load(
    checkpoint: Checkpoint,
    generation_config: GenerationConfig,
    *,
    dtype: torch.dtype | None,
    cpu_kernels: str,
    quantize: str | None,
    mtp: bool,
    adapters: Mapping[str, str | Path],
    progress: Callable[[int, int], None] | None,
    remark: Callable[[str], None],
    **options: Any,
) -> CPURuntime:
    """Load a checkpoint into a `CPURuntime`, which takes the other options as they are."""
    from granite4_neuron.checkpoint.adapters import read_adapter
    from granite4_neuron.checkpoint.loading import load_model
    from granite4_neuron.devices.cpu import operators as cpu
    from granite4_neuron.devices.cpu.runtime import CPURuntime

    options["adapters"] = {name: read_adapter(folder, checkpoint.config) for name, folder in adapters.items()}
    model = load_model(
        checkpoint.with_mtp() if mtp else checkpoint,
        dtype,
        quantize=quantize,
        operators=cpu.operators(cpu_kernels),
        keep_quantized=True,
        progress=progress,
        remark=remark,
    )
    return CPURuntime(model, generation_config, kernels=cpu_kernels, **options)


BACKEND = Backend("cpu", OPTIONS, load)
