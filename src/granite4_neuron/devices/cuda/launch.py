"""Launches the kernels of decode: on GPUs that can do so, a kernel begins while earlier ones still run.

This is programmatic dependent launch, of GPUs of compute capability 9.0 and later. A kernel begins as soon as all
programs of the one before it have called `gdc_launch_dependents`. Before its own `gdc_wait` a program reads only
weights, and state that no other kernel of the step writes; it writes nothing. After `gdc_wait` it sees what all earlier
kernels wrote.

There is one exception: a kernel of `add_feed_forward` reads the router's logits before its `gdc_wait`. They were
written two kernels before; so the kernel in between calls `gdc_launch_dependents` only after its own `gdc_wait`.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.triton_utils import tl, triton

# Warps of programs for one row of the router or a part of a head's state.
NUM_WARPS_SMALL = 4
MULTIPROCESSORS = 132  # of an H200


def supports_gdc(x: torch.Tensor) -> bool:
    """Return whether x's device has programmatic dependent launch."""
    return x.is_cuda and has_compute_capability(x, 9)


def has_compute_capability(x: torch.Tensor, major: int) -> bool:
    """Return whether x's GPU has at least a compute capability."""
    return torch.cuda.get_device_capability(x.device) >= (major, 0)


def launch_options(x: torch.Tensor, num_warps: int) -> dict[str, bool | int]:
    """Return the options of a kernel that calls `gdc_launch_dependents` and `gdc_wait`, on x's device."""
    use_gdc = supports_gdc(x)
    return {"USE_GDC": use_gdc, "launch_pdl": use_gdc, "num_warps": num_warps}


@triton.jit
def gdc_launch_dependents(USE_GDC: tl.constexpr):
    """Let the next kernel begin as soon as all programs of this one have reached this call."""
    if USE_GDC:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(USE_GDC: tl.constexpr):
    """Wait for the kernels before this one to end."""
    if USE_GDC:
        tl.extra.cuda.gdc_wait()
