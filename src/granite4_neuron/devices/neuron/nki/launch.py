"""Runs a kernel on torch tensors: compiled on a Neuron device, in NKI's simulator on a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import nki
import torch

from granite4_neuron.devices.neuron.sdk import LOGICAL_CORE_SIZE

try:
    from torch_neuronx import nki_op
except ImportError:  # it came with PyTorch's own device, in SDK 2.33
    nki_op = None

Launcher = Callable[..., tuple[torch.Tensor, ...]]


def launcher(kernel: Any, definition: Launcher) -> Launcher:
    """Return `launch` of a kernel; in graphs of torch.compile it is one node, the operator granite4_neuron::NAME.

    On PyTorch's device for Neuron, `torch_neuronx.nki_op` makes the operator, and asks NKI for the results' shapes.
    Elsewhere the definition gives the shapes, and the node runs `launch`.

    Args:
        kernel: a function under `nki.jit`.
        definition: in torch, with the kernel's arguments and results.
    """

    def run(first: torch.Tensor, *others: torch.Tensor | None) -> list[torch.Tensor]:
        return list(launch(kernel, first, *others))

    def shapes(*arguments: torch.Tensor | None) -> list[torch.Tensor]:
        results = definition(*arguments)
        return [torch.empty_like(result, memory_format=torch.contiguous_format) for result in results]

    signature = inspect.signature(definition).replace(return_annotation=list[torch.Tensor])
    run.__signature__ = signature  # type: ignore[attr-defined]  # typeshed's functions lack it
    name = f"granite4_neuron::{definition.__name__.removesuffix('_torch')}"
    if nki_op is not None:
        operator = nki_op(name, mutates_args=())(run)
    else:
        operator = torch.library.custom_op(name, run, mutates_args=())
        operator.register_fake(shapes)

    def call(first: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        # torch_xla traces the kernel itself.
        return tuple((operator if torch.compiler.is_compiling() else run)(first, *others))

    return call


def launch(
    kernel: Any, first: torch.Tensor, *others: torch.Tensor | None, programs: int = LOGICAL_CORE_SIZE
) -> tuple[torch.Tensor, ...]:
    """Run the kernel and return its outputs, on the device of its arguments.

    Args:
        kernel: a function under `nki.jit`.
        first, others: the kernel's arguments, in its order.
        programs: how many physical cores share the work.
    """
    arguments = [None if argument is None else argument.contiguous() for argument in (first, *others)]
    if first.device.type != "cpu":
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
