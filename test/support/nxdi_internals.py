"""The names that the port uses of NxD Inference, NxD and NKI, read from the port's source and compared with upstream's.

A name comes with the parameters that the port relies on: ("perform_prefill", ("Q", "K")). Only functions that say so
need NxD Inference.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name

import torch

from granite4_neuron.config import GraniteMoeHybridConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "nxdi-internals.md"
SOURCE = ROOT / "src" / "granite4_neuron"
PORT = SOURCE / "devices" / "neuron" / "nxdi"
UPSTREAM = ("neuronx_distributed.", "neuronx_distributed_inference.", "torch_xla")
_PORT_PACKAGE = "granite4_neuron.devices.neuron.nxdi"
# NKI's modules by the names under which kernels import them.
NKI = {"nl": "nki.language", "nisa": "nki.isa", "nki": "nki"}

Names = dict[str, tuple[str, ...]]
Table = dict[str, Names]


def page(section: str) -> Table:
    """Return a section's table as {module or class: names in its row}."""
    _, _, text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")
    rows = re.findall(r"^\| `(.+?)` \| (`.+?) \|", text.partition("\n## ")[0], re.MULTILINE)
    return {owner: dict(map(_name, re.findall(r"`(.+?)`", names))) for owner, names in rows}


def _name(entry: str) -> tuple[str, tuple[str, ...]]:
    name, _, parameters = entry.partition("(")
    return name, tuple(parameters.rstrip(")").split(", ")) if parameters else ()


def differences(used: Table, listed: Table) -> list[str]:
    """Return names that are used but not listed, with a plus, and names that are listed but not used, with a minus."""
    plus, minus = _entries(used) - _entries(listed), _entries(listed) - _entries(used)
    return sorted([f"+ {entry}" for entry in plus] + [f"- {entry}" for entry in minus])


def _entries(table: Table) -> set[str]:
    return {f"{owner}: {name}({', '.join(p)})" for owner, names in table.items() for name, p in names.items()}


def _trees(folder: Path) -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]


def _nodes(trees: list[ast.Module], kind: type) -> Iterator:
    return (node for tree in trees for node in ast.walk(tree) if isinstance(node, kind))


def imported() -> Table:
    """Return {module: names that the port imports or uses of it, each with the keywords it is called with}."""
    table: Table = defaultdict(dict)
    for tree in _trees(PORT):
        keywords: dict[str, set[str]] = defaultdict(set)
        for node in _nodes([tree], ast.Call):
            keywords[ast.unparse(node.func)].update(keyword.arg for keyword in node.keywords if keyword.arg)
        modules = {"torch_xla._XLAC": "torch_xla._XLAC"}
        for node in _nodes([tree], ast.Import):
            modules.update(
                (alias.asname or alias.name, alias.name) for alias in node.names if alias.name.startswith(UPSTREAM)
            )
        for node in _nodes([tree], ast.ImportFrom):
            for alias in node.names if f"{node.module}.".startswith(UPSTREAM) else ():
                _add(table, node.module, alias.name, keywords[alias.name])
                modules[alias.name] = f"{node.module}.{alias.name}"  # for members, if it is a module or class
        for node in _nodes([tree], ast.Attribute):
            alias = ast.unparse(node.value)
            if alias in modules:
                _add(table, modules[alias], node.attr, keywords[ast.unparse(node)])
    return table


def _add(table: Table, owner: str, name: str, parameters: set[str]) -> None:
    table[owner][name] = tuple(sorted(parameters.union(table[owner].get(name, ()))))


def options() -> set[str]:
    """Return the options of a neuron_config that the port reads, sets, passes or refuses."""
    trees = _trees(PORT)
    found = {node.attr for node in _nodes(trees, ast.Attribute) if ast.unparse(node.value).endswith("neuron_config")}
    for node in _nodes(trees, ast.Assign):
        if ast.unparse(node.targets[0]) == "_SUPPORTED":
            found.update(ast.literal_eval(node.value))
        if ast.unparse(node.targets[0]) in ("options", "neuron_config") and isinstance(node.value, ast.Call):
            found.update(keyword.arg for keyword in node.value.keywords if keyword.arg)
    return found


def nki() -> Table:
    """Return {module: names} of NKI that this package's kernels use."""
    table: Table = defaultdict(dict)
    for node in _nodes(_trees(SOURCE / "devices" / "neuron" / "nki"), ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id in NKI:
            table[NKI[node.value.id]][node.attr] = ()
    for module in set(NKI.values()) & {f"nki.{name}" for name in table["nki"]}:
        del table["nki"][module.removeprefix("nki.")]
    return table


def _port_classes(is_derived: bool = True) -> list[type]:
    """Return the port's classes that have a base class upstream, or those that have none."""
    modules = [importlib.import_module(f"{_PORT_PACKAGE}.{path.stem}") for path in sorted(PORT.glob("[a-z]*.py"))]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    ours = (cls for cls in classes if cls.__module__.startswith(_PORT_PACKAGE))
    return [cls for cls in ours if any(map(_is_theirs, cls.__mro__)) == is_derived]


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("granite4_neuron")


def _is_theirs(cls: type) -> bool:
    return cls.__module__.startswith(UPSTREAM)


def overrides() -> Table:
    """Return {class: upstream's methods and class attributes that the port overrides}. It needs NxD Inference.

    Their parameters are those that our method, or its call of upstream's, names.
    """
    named: dict[tuple[type, str], set[str]] = defaultdict(set)
    for cls in _port_classes():
        for index, ours in enumerate(cls.__mro__):
            for name in vars(ours) if _is_ours(ours) else ():
                theirs = [base for base in cls.__mro__[index:] if _is_theirs(base) and name in vars(base)]
                if theirs and (name == "__init__" or not name.startswith("__")):
                    named[theirs[0], name] |= _named_parameters(vars(ours)[name])
    table: Table = defaultdict(dict)
    for (cls, name), parameters in named.items():
        has = _parameters(getattr(cls, name)) if callable(getattr(cls, name)) else {}
        shared = (parameter for parameter, kind in has.items() if parameter in parameters and kind not in _REST)
        table[f"{cls.__module__}.{cls.__name__}"][name] = tuple(shared)
    return table


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Callable) -> dict[str, inspect._ParameterKind]:
    return {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}


def _named_parameters(method: object) -> set[str]:
    method = getattr(method, "__func__", method)
    if not inspect.isfunction(method):
        return set()
    source = ast.parse(textwrap.dedent(inspect.getsource(method)))
    calls = [node for node in _nodes([source], ast.Call) if ast.unparse(node.func) == f"super().{method.__name__}"]
    return {*inspect.signature(method).parameters} - {"self"} | {
        k.arg for call in calls for k in call.keywords if k.arg
    }


def attributes() -> set[str]:
    """Return further names of upstream's objects that the port uses or sets. It needs NxD Inference.

    They are the attributes in the port's source that a class upstream defines, without this package's functions and
    config fields, attributes set by classes that have no base upstream, options, imports, and names of torch and
    Python.
    """
    bases = {base for cls in _port_classes() for base in cls.__mro__ if _is_theirs(base)}
    theirs = {name for cls in bases | {resolve_name(owner) for owner in page("Attributes")} for name in members(cls)}
    ours = {node.name for node in _nodes(_trees(SOURCE), ast.FunctionDef)} | {
        each.name for each in dataclasses.fields(GraniteMoeHybridConfig)
    }
    ours |= {name for cls in _port_classes(is_derived=False) for name in _on_self(cls, (ast.Store,))}
    others = {name for value in _NOT_UPSTREAM for name in dir(value)}
    others |= options() | flat(imported())
    return {node.attr for node in _nodes(_trees(PORT), ast.Attribute)} & theirs - ours - others


_NOT_UPSTREAM = (torch, torch.Tensor, torch.nn.Linear(1, 1), torch.nn.functional, torch.distributed, dict, list, str)


def members(cls: type) -> set[str]:
    """Return the names of a class, and the attributes of `self` that its methods or its upstream bases' read or set."""
    return {*dir(cls)}.union(*(_on_self(base, (ast.Load, ast.Store)) for base in cls.__mro__ if _is_theirs(base)))


def _on_self(cls: type, how: tuple[type, ...]) -> set[str]:
    nodes = _nodes([ast.parse(textwrap.dedent(inspect.getsource(cls)))], ast.Attribute)
    return {node.attr for node in nodes if ast.unparse(node.value) == "self" and isinstance(node.ctx, how)}


def lacks(value: object, parameters: tuple[str, ...]) -> set[str]:
    """Return the parameters that a function or class does not take by name."""
    has = _parameters(value) if parameters else {}
    return set() if inspect.Parameter.VAR_KEYWORD in has.values() else {*parameters} - {*has}


def flat(table: Mapping[str, Names]) -> set[str]:
    return {name for names in table.values() for name in names}
