"""PyTorch's device cuda, for the backend torch."""

from __future__ import annotations

import os
import sys

from granite4_neuron.devices.torch_device import TorchDevice

# What the drivers of NVIDIA, AMD and a WSL give to a machine with a GPU.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def _why_missing() -> str | None:
    if sys.platform != "linux" or any(map(os.path.exists, _DEVICE_FILES)):
        import torch  # not at the top: it takes seconds, and options are declared without a framework

        if torch.cuda.is_available():
            return None
    return "torch finds no GPU here; the device cuda needs one, and a torch that is built for it."


# Without an SBUF to fit into, a long prompt takes fewer pieces.
CUDA = TorchDevice(
    "cuda",
    communication="nccl",
    long_prompts=(2048, 8192),
    formats=("fp8", "int4", "int8"),
    keeps_snapshots=True,
    has_row_counts=True,
    prompts_per_graph=4,
    why_missing=_why_missing,
)
