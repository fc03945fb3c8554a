"""Binds a module's weights to other operators."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from granite4_neuron.ops.operators import Operators, Weights

Module = TypeVar("Module", bound=nn.Module)


def bind(module: Module, operators: Operators) -> Module:
    """A copy of `module` whose submodules all compute with `operators`.

    It is a second tree of modules over the same parameters, buffers and hooks: replacing one of them replaces it in
    both. `module` itself is not changed.
    """
    bound = copy.copy(module)
    bound.operators = operators
    bound._modules = {
        name: None if child is None else bind(child, operators) for name, child in module._modules.items()
    }
    return bound


def weights(module: nn.Module) -> Weights:
    """A live view of a module's own parameters by name. Reading one here takes a tenth of the time of the module's
    attribute, which matters for a short kernel.
    """
    return module._parameters
