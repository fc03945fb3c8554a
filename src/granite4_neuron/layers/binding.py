"""The same weights, computed with other operators."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from granite4_neuron.ops.operators import Operators, Weights

Module = TypeVar("Module", bound=nn.Module)


def bind(module: Module, operators: Operators) -> Module:
    """`module` as it computes with `operators`, which its own submodules get too.

    What comes back is a second tree of modules over the same parameters, buffers and hooks: whatever replaces one of
    them replaces it in both. `module` itself stays as it is.
    """
    bound = copy.copy(module)
    bound.operators = operators
    bound._modules = {
        name: None if child is None else bind(child, operators) for name, child in module._modules.items()
    }
    return bound


def weights(module: nn.Module) -> Weights:
    """A module's own parameters by name, as they are at each look: reading one here takes a tenth of what reading the
    module's attribute does, and for a short kernel that is much.
    """
    return module._parameters
