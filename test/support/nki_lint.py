"""Rules for code that the NKI compiler refuses and Python runs. An emulator cannot see it, but the source shows it.

Source of the rules: the NKI 0.3 to 0.6 release notes and the language guide of the Neuron SDK.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

DEPRECATED_RANGES = ("affine_range", "sequential_range", "static_range", "dynamic_range")
INDEX_GRIDS = ("arange", "mgrid")


@dataclass(frozen=True)
class Problem:
    """One violation and its line."""

    line: int
    message: str


def lint(source: str) -> list[Problem]:
    """Return the problems of one module, in the order of their lines.

    Kernel code is every function except the definitions in torch, whose names end in _torch. Functions that a kernel
    calls are compiled with it.
    """
    tree = ast.parse(source)
    problems = list(_imports(tree))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.endswith("_torch")]
    kernels = {function.name for function in functions if _is_kernel(function)}
    for function in functions:
        problems += _signature(function)
        for node in ast.walk(function):
            problems += _node(node, function, kernels)
    return sorted(problems, key=lambda problem: problem.line)


def _imports(tree: ast.Module) -> Iterator[Problem]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "neuronxcc" for name in names):
            yield Problem(node.lineno, "neuronxcc is gone; import nki")
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            yield Problem(node.lineno, "annotations become text, which nki-library's kernels do without")


def _signature(function: ast.FunctionDef) -> Iterator[Problem]:
    arguments = function.args
    if arguments.kwonlyargs:
        yield Problem(function.lineno, f"{function.name} has keyword-only arguments")
    annotations = [argument.annotation for argument in arguments.args if argument.annotation]
    is_list = any(ast.unparse(annotation).split("[")[0] in ("list", "List") for annotation in annotations)
    if any(isinstance(part, ast.BitOr) for annotation in annotations for part in ast.walk(annotation)):
        yield Problem(function.lineno, f"{function.name} has an annotation with |; write Optional[...]")
    if is_list or any(isinstance(default, ast.List) for default in arguments.defaults):
        yield Problem(function.lineno, f"{function.name} takes a list; pass a tuple")


def _node(node: ast.AST, function: ast.FunctionDef, kernels: set[str]) -> Iterator[Problem]:
    line = getattr(node, "lineno", function.lineno)
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        yield Problem(line, "`is` does not compile; compare with == or !=")
    elif isinstance(node, ast.Assert):
        yield Problem(line, "an assert is not for kernels; check before the launch")
    elif isinstance(node, ast.FunctionDef | ast.Lambda) and node is not function:
        is_kernel = isinstance(node, ast.FunctionDef) and _is_kernel(node)
        what = "a kernel within a kernel" if is_kernel else "a nested function, which closes over tensors"
        yield Problem(line, f"{what}; make it a function of the module, without nki.jit")
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "nisa.engine":
        yield Problem(line, f"write nisa.{node.attr}_engine, as nki-library does")
    elif isinstance(node, ast.Attribute) and node.attr in DEPRECATED_RANGES:
        yield Problem(line, f"{node.attr} is deprecated; use range")
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "nl" and node.attr in INDEX_GRIDS:
        yield Problem(line, f"nl.{node.attr} is gone; index with slices")
    elif isinstance(node, ast.Call):
        yield from _call(node, kernels)


def _call(call: ast.Call, kernels: set[str]) -> Iterator[Problem]:
    name = ast.unparse(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in kernels:
        yield Problem(call.lineno, f"{name} is a kernel within a kernel; call a function without nki.jit")
    if "mask" in keywords:
        yield Problem(call.lineno, "mask= is gone; index with slices")
    if isinstance(keywords.get("buffer"), ast.Constant):
        yield Problem(call.lineno, "buffer is a string; use an object such as nl.sbuf")
    is_instruction = name.startswith("nisa.") and name.count(".") == 1
    if is_instruction and not call.args and next(iter(keywords), None) != "dst":
        yield Problem(call.lineno, f"{name} needs dst as its first argument")


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).split("(")[0] == "nki.jit" for decorator in function.decorator_list)
