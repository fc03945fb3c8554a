"""AWS's public nki-library on the emulator: provides names that it imports and this project's kernels do not use."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from granite4_neuron.devices.neuron.stand_ins import checkout

SOURCE = "NKI_LIBRARY_SRC"


def library_folder() -> Path:
    """Return the checkout of nki-library, or skip the calling fixture's tests if none is named."""
    pytest.importorskip("nki.emulation", reason="the Neuron SDK's own nki is installed")
    if not os.environ.get(SOURCE):
        pytest.skip(f"{SOURCE} is not set to a checkout of nki-library")
    return checkout(SOURCE, "src/nkilib_src/nkilib")


@contextmanager
def provided_library(folder: Path) -> Iterator[None]:
    """Make `nkilib` importable from a checkout. It was written for NKI 0.3 and imports names that 0.6 lacks.

    Stand-ins for the Neuron SDK would answer every name, also those of `nkilib`, so they are removed meanwhile.
    """
    import nki
    import nki.isa
    import nki.language as nl

    with ExitStack() as stack:
        stack.callback(sys.modules.update, _take_modules())
        stack.callback(_take_modules)
        for module in (nki, nki.isa, nl):
            stack.enter_context(mock.patch.dict(vars(module)))
            vars(module).pop("__getattr__", None)
        stack.enter_context(mock.patch.object(sys, "path", [str(folder / "src" / "nkilib_src"), *sys.path]))
        sys.modules["nki.isa.constants"] = nki.isa.constants
        for name, members in {
            "nki.typing": dict(tensor=nl.tensor, mutable_tensor=nl.tensor),
            "nki.collectives": dict(ReplicaGroup=type("ReplicaGroup", (), {})),
            "nki.dtype": {},
            "neuron_dtypes": {},
            "neuronxcc": {},
            "neuronxcc.nki": {},
            "neuronxcc.nki.typing": dict(tensor=nl.tensor, mutable_tensor=nl.tensor),
        }.items():
            module = sys.modules[name] = types.ModuleType(name)
            module.__dict__.update({"__path__": []} | members)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        # Names of dtypes that a NeuronCore-v3 does not have; they occur in tables of constants.
        for name in ("float4_e2m1fn_x4", "float8_e4m3fn_x4", "float8_e5m2_x4", "bool_", "tfloat32"):
            if not hasattr(nl, name):
                setattr(nl, name, name)
        nki.isa.dma_copy = _as_the_library_calls_it(nki.isa.dma_copy)
        yield


def _take_modules() -> dict[str, types.ModuleType]:
    """Remove the modules that the library has, or needs beside the emulator's, from sys.modules and return them."""
    taken = {name for name in sys.modules if name.partition(".")[0] in ("nkilib", "neuronxcc", "neuron_dtypes")}
    taken |= {"nki.typing", "nki.collectives", "nki.dtype", "nki.isa.constants"} & {*sys.modules}
    return {name: sys.modules.pop(name) for name in taken}


def member(path: str) -> Any:
    """Import `module:name` below `nkilib`."""
    module, _, name = path.partition(":")
    with _lenient_dataclasses():
        return getattr(import_module(f"nkilib.{module}"), name)


def _as_the_library_calls_it(dma_copy: Callable) -> Callable:
    """Take descriptor modes by NKI 0.3's numbers, which some of the library uses for `none`, and write to reshaped
    outputs, as some of its kernels do."""
    import nki.isa

    def copy(*arguments: Any, **options: Any) -> None:
        if isinstance(options.get("dge_mode"), int):
            options["dge_mode"] = nki.isa.dge_mode.none
        if "dst" in options:
            options["dst"].is_reshaped = False
        dma_copy(*arguments, **options)

    return copy


@contextmanager
def _lenient_dataclasses() -> Iterator[None]:
    """Let dataclasses have fields without annotations and give None to omitted fields, as NKI's dataclasses do."""
    import nki.language as nl

    dataclass = dataclasses.dataclass

    def lenient(cls: type | None = None, **options: Any) -> Any:
        if cls is None:
            return lambda decorated: lenient(decorated, **options)
        if issubclass(cls, nl.NKIObject) and "__init__" not in vars(cls) and not options:
            annotations = inspect.get_annotations(cls)
            for name, value in list(vars(cls).items()):
                if not (name.startswith("__") or inspect.isroutine(value) or isinstance(value, property)):
                    annotations.setdefault(name, object)
            for name in annotations:
                if name not in vars(cls):
                    setattr(cls, name, None)
            cls.__annotations__ = annotations
        return dataclass(cls, **options)

    with mock.patch.object(dataclasses, "dataclass", lenient):
        yield
