"""Runs a kernel on torch tensors: compiled on a Neuron device, in NKI's simulator on a CPU."""

from __future__ import annotations

from typing import Any

import nki
import torch

from granite4_neuron.neuron_sdk import LOGICAL_CORE_SIZE


def launch(kernel: Any, *arguments: torch.Tensor | None, programs: int = LOGICAL_CORE_SIZE) -> tuple[torch.Tensor, ...]:
    """Run the kernel and return its outputs, on the device of its arguments.

    Args:
        kernel: a function under `nki.jit`.
        arguments: what the kernel takes, in its order; the first is a tensor.
        programs: how many physical cores share the work.
    """
    arguments = tuple(None if argument is None else argument.contiguous() for argument in arguments)
    if arguments[0].device.type != "cpu":
        return kernel[programs](*arguments)
    return tuple(map(_from_numpy, nki.simulate(kernel[programs])(*map(_to_numpy, arguments))))


def _to_numpy(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().numpy()
    import ml_dtypes  # NumPy's bfloat16; both simulators have it

    return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _from_numpy(array: Any) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
