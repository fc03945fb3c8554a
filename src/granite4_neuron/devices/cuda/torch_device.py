"""PyTorch's device cuda, for the backend torch."""

from __future__ import annotations

from granite4_neuron.devices.torch_device import TorchDevice


def _why_missing() -> str | None:
    import torch  # not at the top: options are declared without a framework

    if torch.cuda.is_available():
        return None
    return "torch finds no GPU here; the device cuda needs one, and a torch that is built for it."


# Without an SBUF to fit into, a long prompt takes fewer pieces.
CUDA = TorchDevice("cuda", communication="nccl", long_prompts=(2048,), why_missing=_why_missing)
