"""The part of `nki` 0.6 that launches kernels, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from nki.emulation import Launch, launching, stochastic_rounding
from nki.tensors import NkiTensor
from nki.values import Memory, require

LOGICAL_CORE_SIZES = (1, 2)  # physical cores, each of which runs a program


class Kernel:
    """A kernel and the number of physical cores (LNC) that it is launched on: `kernel[2]` is the kernel on two."""

    def __init__(self, function: Callable, programs: int = 1):
        self.function = function
        self.programs = programs
        self.__doc__ = function.__doc__

    def __getitem__(self, programs: int) -> Kernel:
        require(programs in LOGICAL_CORE_SIZES, f"{programs} programs; a logical core has {LOGICAL_CORE_SIZES}")
        return Kernel(self.function, programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, as one kernel does within another."""
        return self.function(*args, **kwargs)


def jit(function: Callable | None = None, **options: Any) -> Any:
    """Mark a function as a kernel. The options say how to compile it and have no effect here."""
    return Kernel if function is None else Kernel(function)


def simulate(kernel: Kernel) -> Callable:
    """Return a function that runs `kernel` on NumPy arrays and returns its outputs as NumPy arrays.

    The programs of a launch run one after the other and share their inputs and their `shared_hbm` outputs. Anything
    that the compiler or the hardware would refuse raises `nki.emulation.NkiError`.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_to_hbm, args))
        kwargs = {name: _to_hbm(value) for name, value in kwargs.items()}
        launch = Launch(kernel.programs, stochastic_rounding())
        with launching(launch):
            for program in range(kernel.programs):
                launch.start_program(program)
                outputs = kernel.function(*args, **kwargs)
                launch.finish_program()
        return tuple(map(_from_hbm, outputs)) if isinstance(outputs, tuple) else _from_hbm(outputs)

    return run


def _to_hbm(value: Any) -> Any:
    return NkiTensor.from_array(value) if isinstance(value, np.ndarray) else value


def _from_hbm(value: Any) -> Any:
    if not isinstance(value, NkiTensor):
        return value
    require(value.buffer is Memory.SHARED_HBM, f"an output is in {value.buffer.value}; outputs are in nl.shared_hbm")
    return value.array
