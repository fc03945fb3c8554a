"""Stand-ins for the Neuron SDK's closed packages, so that NxD Inference's public source runs on a CPU.

In its CPU mode NxD Inference computes nothing with them: it only imports, decorates with and subclasses their names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path

from granite4_neuron.errors import UserError

PACKAGES = ("torch_neuronx", "neuronxcc", "libneuronxla", "nki", "nkilib")
ABSENT = "torch_neuronx.nki_op"  # belongs to PyTorch's own Neuron device, which has no stand-in
PLATFORM = "trn2"
_GET_SOURCES = (
    "git clone https://github.com/aws-neuron/neuronx-distributed-inference && "
    "git clone https://github.com/aws-neuron/neuronx-distributed"
)
# Environment variables that name checkouts, and the package below src/ in each.
SOURCES = {"NXDI_SRC": "neuronx_distributed_inference", "NXD_SRC": "neuronx_distributed"}


def why_not_importable() -> str | None:
    """Make NxD Inference importable if possible. Return None on success, otherwise the reason.

    Raises:
        UserError: one of the variables in `SOURCES` is set and does not name a checkout.
    """
    if importlib.util.find_spec("torch_xla") is None:
        return (
            "torch_xla is not installed; in a checkout, install what is needed, in an environment of its own, with: "
            "pip install -r requirements/nxdi.txt"
        )
    if importlib.util.find_spec("torch_neuronx") is None:
        if not all(os.environ.get(name) for name in SOURCES):
            return (
                f"the Neuron SDK is not installed, and {' and '.join(SOURCES)} do not name NxD Inference's sources; "
                f"get them with: {_GET_SOURCES}"
            )
        install(*(checkout(name, f"src/{package}") for name, package in SOURCES.items()))
    return None


def checkout(variable: str, package: str) -> Path:
    """Return the checkout that an environment variable names. `package` is the path of the package in it.

    Raises:
        UserError: there is no such package in that folder.
    """
    folder = Path(os.environ[variable]).absolute()
    if not (folder / package).is_dir():
        above = next((f", like {each}" for each in folder.parents if (each / package).is_dir()), "")
        raise UserError(f"{variable} is {folder}, which has no {package}; it must name the root of a checkout{above}.")
    return folder


def install(nxdi_source: Path, nxd_source: Path) -> None:
    """Make neuronx_distributed_inference and neuronx_distributed importable from their checked-out sources."""
    # Import torch_xla first: at import it looks for libneuronxla, and would take a stand-in for a device.
    import torch
    import torch_xla  # noqa: F401

    sys.meta_path.append(_Finder())
    sys.path[:0] = [str(nxdi_source / "src"), str(nxd_source / "src")]
    for name in ("nki", "nki.language", "nki.isa"):
        _answer_every_name(importlib.import_module(name))  # the emulator, if installed, has only a few names
    vars(torch.classes)["neuron"] = _stand_in("neuron")
    import torch_neuronx.utils

    torch_neuronx.utils.get_platform_target = lambda: PLATFORM


class _StandIn(type):
    """The type of a name that stands in for a class, a function, a decorator, a namespace or a constant."""

    def __getattr__(cls, name: str) -> _StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __getitem__(cls, item: object) -> _StandIn:
        return cls

    def __call__(cls, *arguments, **options):
        if cls.__bases__ != (object,):  # a real class whose base is a stand-in
            return super().__call__(*arguments, **options)
        decorated = arguments[0] if arguments else None
        return decorated if callable(decorated) else cls


def _stand_in(name: str) -> _StandIn:
    return _StandIn(name, (object,), {})


def _answer_every_name(module: types.ModuleType) -> None:
    """Give a module a stand-in for every name that it does not have, except `ABSENT`."""

    def answer(name: str) -> _StandIn:
        if name.startswith("__") or f"{module.__name__}.{name}" == ABSENT:
            raise AttributeError(name)
        return _stand_in(name)

    vars(module)["__getattr__"] = answer


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module at every path below PACKAGES, except `ABSENT`."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in PACKAGES and fullname != ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        _answer_every_name(module)
        return module

    def exec_module(self, module):
        pass
