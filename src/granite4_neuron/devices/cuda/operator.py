"""Operators of graphs on a GPU: a definition, which runs on a CPU, and launches of Triton kernels.

Read an operator's file from top to bottom: the definition, the shapes of its results (`register_fake`), its launch,
the kernels. A second operator with the same definition may have separate kernels for one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef

# The launch of each operator on a GPU.
LAUNCHES: dict[CustomOpDef, Callable[..., Any]] = {}
_DEFINITIONS: dict[CustomOpDef, tuple[Callable[..., Any], tuple[str, ...]]] = {}  # and the arguments that they mutate


def operator(mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a definition as the operator granite4_neuron::NAME, one node of a graph. On a CPU it runs the
    definition.

    Args:
        mutates: the arguments that are updated in place.
    """

    def decorate(definition: Callable[..., Any]) -> CustomOpDef:
        return _operator(definition.__name__, definition, mutates)

    return decorate


def register_launch(operator: CustomOpDef, launch: Callable[..., Any]) -> None:
    """Let an operator launch Triton kernels on a GPU; the launch has its arguments and results."""
    LAUNCHES[operator] = launch
    operator.register_kernel("cuda")(launch)


def for_one_row(operator: CustomOpDef, launch: Callable[..., Any]) -> CustomOpDef:
    """Make a second operator with the same definition, whose launch is for a first argument of one row only."""
    definition, mutates = _DEFINITIONS[operator]
    of_one = _operator(f"{definition.__name__}_of_one", definition, mutates)
    of_one.register_fake(lambda *arguments, **options: operator(*arguments, **options))
    register_launch(of_one, launch)
    return of_one


def _operator(name: str, definition: Callable[..., Any], mutates: tuple[str, ...]) -> CustomOpDef:
    made = torch.library.custom_op(f"granite4_neuron::{name}", definition, mutates_args=mutates, device_types="cpu")
    functools.update_wrapper(made, definition, updated=())
    _DEFINITIONS[made] = definition, mutates
    return made
