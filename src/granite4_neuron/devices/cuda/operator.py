"""Operators of graphs on a GPU: a definition, which runs on a CPU, and launches of Triton kernels.

Read an operator's file from top to bottom: the definition, the shapes of its results (`register_fake`), its launch,
the kernels. An operator may have a second one for one row, with the same definition and kernels of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_ResultOf = TypeVar("_ResultOf", covariant=True)


class Operator(Protocol[Arguments, _ResultOf]):
    """A `torch.library.CustomOpDef` that is called as its definition is."""

    __name__: str
    __qualname__: str

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> _ResultOf: ...

    def register_fake(self, shapes: Callable[..., Any], /) -> Callable[..., Any]:
        """Set the function that makes results of the right shapes and dtypes, from the same arguments."""

    def register_kernel(self, device_types: str, /) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Set the function that computes it on a kind of device."""


# The launch of each operator on a GPU.
LAUNCHES: dict[Operator[..., Any], Callable[..., Any]] = {}
_DEFINITIONS: dict[Operator[..., Any], tuple[Callable[..., Any], tuple[str, ...]]] = {}  # and what they mutate


def operator(mutates: tuple[str, ...] = ()) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Register a definition as the operator granite4_neuron::NAME, one node of a graph. On a CPU it runs the
    definition.

    Args:
        mutates: the arguments that are updated in place.
    """

    def decorate(definition: Callable[Arguments, Result]) -> Operator[Arguments, Result]:
        return _operator(definition.__name__, definition, mutates)

    return decorate


def register_launch(operator: Operator[Arguments, Result], launch: Callable[Arguments, Result]) -> None:
    """Let an operator launch Triton kernels on a GPU; the launch has its arguments and results."""
    LAUNCHES[operator] = launch
    operator.register_kernel("cuda")(launch)


def register_launches(
    operator: Operator[Arguments, Result], launch: Callable[Concatenate[bool, Arguments], Result]
) -> Operator[Arguments, Result]:
    """Let an operator launch Triton kernels on a GPU; return a second one, whose kernels are for one row.

    Args:
        launch: its first argument is whether the operator's first argument has one row, with kernels for that; the
            other arguments and the results are the operator's.
    """

    def launch_rows(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        return launch(False, *arguments, **options)

    def launch_row(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        return launch(True, *arguments, **options)

    register_launch(operator, launch_rows)
    return register_form(operator, "of_one", launch_row)


def register_form(
    operator: Operator[Arguments, Result], name: str, launch: Callable[Arguments, Result]
) -> Operator[Arguments, Result]:
    """Return another operator with the same definition and other Triton kernels, whose name ends with `name`."""
    definition, mutates = _DEFINITIONS[operator]
    form: Operator[Arguments, Result] = _operator(f"{definition.__name__}_{name}", definition, mutates)
    form.register_fake(lambda *arguments, **options: operator(*arguments, **options))
    register_launch(form, launch)
    return form


def _operator(
    name: str, definition: Callable[Arguments, Result], mutates: tuple[str, ...]
) -> Operator[Arguments, Result]:
    registered = torch.library.custom_op(
        f"granite4_neuron::{name}", definition, mutates_args=mutates, device_types="cpu"
    )
    functools.update_wrapper(registered, definition, updated=())
    made = cast("Operator[Arguments, Result]", registered)
    made.__name__ = made.__qualname__ = name
    _DEFINITIONS[made] = definition, mutates
    return made
