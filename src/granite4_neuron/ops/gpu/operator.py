"""Operators of graphs on a GPU: a definition, which runs on a CPU, and launches of Triton kernels.

Read an operator's file from top to bottom: the definition, the shapes of its results (`register_fake`), its launch,
the kernels. Operators with kernels of their own for several sequences have a second launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef

# The launch of each operator on a GPU.
LAUNCHES: dict[CustomOpDef, Callable[..., Any]] = {}


def operator(mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a definition the operator granite4_neuron::NAME, one node of a graph, which computes it on a CPU.

    Args:
        mutates: the arguments that are updated in place.
    """

    def decorate(definition: Callable[..., Any]) -> CustomOpDef:
        name = f"granite4_neuron::{definition.__name__}"
        made = torch.library.custom_op(name, definition, mutates_args=mutates, device_types="cpu")
        return functools.update_wrapper(made, definition, updated=())

    return decorate


def register_launch(
    operator: CustomOpDef, launch: Callable[..., Any], launch_batch: Callable[..., Any] | None = None
) -> None:
    """Let an operator launch Triton kernels on a GPU; launches have its arguments and results.

    Args:
        launch: for any number of sequences, or for one if there is `launch_batch`.
        launch_batch: for several sequences. Each is a row of the operator's first argument.
    """

    def launch_by_rows(*arguments: Any, **options: Any) -> Any:
        if launch_batch is not None and len(arguments[0]) > 1:
            return launch_batch(*arguments, **options)
        return launch(*arguments, **options)

    LAUNCHES[operator] = launch_by_rows
    operator.register_kernel("cuda")(launch_by_rows)
