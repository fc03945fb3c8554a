"""The backend nxdi: NxD Inference on a Neuron device, with graphs that the compile command made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from granite4_neuron.checkpoint.checkpoint import require_folder
from granite4_neuron.devices.neuron import sdk
from granite4_neuron.runtime.declaration import Backend, Option

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.devices.neuron.nxdi.runtime import NeuronRuntime

OPTIONS = (
    Option(
        "compiled",
        "for --backend nxdi: what the compile command wrote",
        "compiled graphs are for the backend nxdi; the backend here is {backend}.",
        metavar="DIR",
    ),
)
_CHOSEN_BEFORE = ("dtype", "state_dtype", "prefill_scan", "decode_kernel", "experts_decode")


def load(
    checkpoint: Checkpoint, generation_config: GenerationConfig, *, compiled: str | Path, **_: Any
) -> NeuronRuntime:
    """Load a `NeuronRuntime`; see `devices.neuron.nxdi.loading.load_compiled`.

    Raises:
        UserError: as there, or the checkpoint is a GGUF file.
    """
    folder = require_folder(checkpoint)
    # Imported here, because only this backend needs NxD Inference.
    from granite4_neuron.devices.neuron.nxdi import loading

    return loading.load_compiled(folder, Path(compiled), generation_config)


BACKEND = Backend(
    "nxdi",
    OPTIONS,
    load,
    needs={"compiled": "the backend nxdi needs a folder of compiled graphs, which the compile command writes."},
    refuses={
        **dict.fromkeys(
            _CHOSEN_BEFORE, "dtypes, scan and kernel of compiled graphs were chosen when they were compiled."
        ),
        "prefill_buckets": "lengths of prompts were chosen when they were compiled, by --context-buckets.",
    },
    require=lambda given: sdk.require(),
)
