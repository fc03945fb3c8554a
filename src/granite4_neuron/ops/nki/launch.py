"""Runs a kernel on torch tensors: compiled on a Neuron device, in NKI's simulator on a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import nki
import torch

from granite4_neuron.neuron_sdk import LOGICAL_CORE_SIZE

try:
    from torch_neuronx import nki_op
except ImportError:  # it came with PyTorch's own device, in SDK 2.33
    nki_op = None

Launcher = Callable[..., tuple[torch.Tensor, ...]]


def launcher(kernel: Any, definition: Launcher) -> Launcher:
    """Return `launch` of a kernel; in graphs of torch.compile it is one node, the operator granite4_neuron::NAME.

    On PyTorch's device for Neuron, `torch_neuronx.nki_op` makes the operator, and asks NKI for the results' shapes.
    Elsewhere the definition gives them, and the node runs what `launch` runs there.

    Args:
        kernel: a function under `nki.jit`.
        definition: in torch, with the kernel's arguments and results.
    """

    def run(*arguments: torch.Tensor | None) -> list[torch.Tensor]:
        return list(launch(kernel, *arguments))

    def shapes(*arguments: torch.Tensor | None) -> list[torch.Tensor]:
        results = definition(*arguments)
        return [torch.empty_like(result, memory_format=torch.contiguous_format) for result in results]

    run.__signature__ = inspect.signature(definition).replace(return_annotation=list[torch.Tensor])
    name = f"granite4_neuron::{definition.__name__.removesuffix('_torch')}"
    if nki_op is not None:
        operator = nki_op(name, mutates_args=())(run)
    else:
        operator = torch.library.custom_op(name, run, mutates_args=())
        operator.register_fake(shapes)

    def call(*arguments: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        # torch_xla traces the kernel itself.
        return tuple((operator if torch.compiler.is_compiling() else run)(*arguments))

    return call


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
