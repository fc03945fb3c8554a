"""Operators of a module, and weights that are fixed once operators are chosen: the base of all modules of the model."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeVar

from torch import nn

from granite4_neuron.ops import TORCH, Operators

_FIXED = "a bound model's weights are fixed; change the model that it was bound from, and bind that again"

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Module(nn.Module):
    """A module that computes with `operators`.

    Its parameters and submodules may be replaced until it is bound, see `bind`; to do so afterwards is a TypeError.

    keeps_float32: names of its own parameters that stay in float32, whatever the model's dtype.
    """

    operators: Operators = TORCH
    keeps_float32: ClassVar[tuple[str, ...]] = ()
    _is_bound = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_bound and (name == "weight" or name in self._parameters or name in self._modules):
            raise TypeError(_FIXED)
        super().__setattr__(name, value)

    def _apply(self, *args, **kwargs) -> Module:
        if self._is_bound:
            raise TypeError(_FIXED)
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        if self._is_bound:
            raise TypeError(_FIXED)
        super()._load_from_state_dict(*args, **kwargs)


def set_operators(module: nn.Module, operators: Operators) -> None:
    """Have a module and its submodules compute with `operators`."""
    for each in module.modules():
        if isinstance(each, Module):
            each.operators = operators


def shallow_copy(module: AnyModule) -> AnyModule:
    """Return an unbound copy of the module tree that shares parameters, buffers and hooks."""
    copied = copy.copy(module)
    copied.__dict__["_is_bound"] = False
    copied._parameters = dict(module._parameters)
    copied._buffers = dict(module._buffers)
    copied._modules = {name: None if child is None else shallow_copy(child) for name, child in module._modules.items()}
    return copied


def as_form(module: nn.Module, form: type[AnyModule], **parts: nn.Module) -> AnyModule:
    """Return an object of `form`, a subclass of the module's class, over the module's own weights, which are fixed.

    parts: submodules to put in place of the module's own.
    """
    view = form.__new__(form)
    view.__dict__.update(module.__dict__, _modules={**module._modules, **parts}, _is_bound=True)
    return view


def fix_weights(module: nn.Module) -> None:
    """From now on refuse to replace parameters and submodules."""
    for each in module.modules():
        each.__dict__["_is_bound"] = True
