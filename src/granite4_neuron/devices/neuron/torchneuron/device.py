"""PyTorch's device neuron, for the backend torch. It takes operators of `devices.graphs.operators.INPUT_FIRST`."""

from __future__ import annotations

from granite4_neuron.devices.torch_device import TorchDevice


def _why_missing() -> str | None:
    import torch  # not at the top: options are declared without a framework

    if hasattr(torch, "neuron"):
        return None
    return (
        "the device neuron needs the torch-neuronx of Neuron SDK 2.33 or later, which is not installed; see "
        "docs/trainium.md."
    )


# A launch costs more than elsewhere, and an index of a cache becomes one of each element. Longer prompts than those of
# all devices would not fit into SBUF, see `planning.analysis.live_set`.
NEURON = TorchDevice(
    "neuron",
    compiler="neuron",
    graphs="model",
    kv_write="select",
    communication="neuron",
    why_missing=_why_missing,
)
