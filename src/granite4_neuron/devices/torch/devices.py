"""Finds PyTorch devices and the compilers of torch.compile by name."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from granite4_neuron.devices.torch.options import find_kind
from granite4_neuron.errors import UserError

Compiler = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


def find_device(name: str) -> torch.device:
    """Return the device with a name, without using it, because a process keeps a Neuron core that it has used.

    Raises:
        UserError: there is none.
    """
    if (reason := find_kind(name).why_missing()) is not None:
        raise UserError(reason)
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, error) from None


def use_device(name: str) -> torch.device:
    """Return the device of tensors that are made on the device with this name; raise UserError if there is none."""
    find_device(name)
    try:
        return torch.empty(0, device=name).device
    except RuntimeError as error:
        raise _no_device(name, error) from None


def _no_device(name: str, error: RuntimeError) -> UserError:
    return UserError(f"there is no device {name} here ({str(error).splitlines()[0]}).")


def find_compiler(compiler: str | Compiler) -> Compiler:
    """Return the backend of torch.compile with a name; raise UserError if there is none."""
    try:
        return torch._dynamo.lookup_backend(compiler)
    except torch._dynamo.exc.InvalidBackend:
        names = ", ".join(sorted({*torch.compiler.list_backends(), "eager", "aot_eager"}))
        raise UserError(f"compiler is {compiler!r}; the backends of torch.compile here are {names}.") from None


def compile_apart(function: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    """Compile a function of a module, with its own code object, by which torch.compile keeps its graphs."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    return torch.compile(own, backend=compiler, fullgraph=True, dynamic=False)
