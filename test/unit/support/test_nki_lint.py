"""The kernels' sources use only Python that the NKI compiler accepts, and the lint finds other sources."""

import ast
import re
from pathlib import Path

import pytest

import granite4_neuron
from test.support.nki_lint import lint

PACKAGE = Path(granite4_neuron.__file__).parent
NKI_FILES = sorted((PACKAGE / "devices" / "neuron" / "nki").glob("*.py"))
NXDI_FILES = sorted((PACKAGE / "devices" / "neuron" / "nxdi").glob("*.py"))
KERNEL_FILES = [file for file in NKI_FILES if file.name not in ("launch.py", "mamba.py")]  # those run on the host

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl

def scale(tile, factor):
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)

@nki.jit
def kernel(x, factors: tuple):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    for i in range(2):
        {}
    return tile
"""
STATEMENT_LINE = KERNEL[: KERNEL.index("{}")].count("\n") + 1

BAD_STATEMENTS = {
    "if x is None: pass": "`is` does not compile",
    "if x is not None: pass": "`is` does not compile",
    "assert x.shape[0] == 2": "an assert is not for kernels",
    "f = lambda t: nisa.tensor_copy(dst=t, src=tile)": "closes over tensors",
    "def f(t): nisa.tensor_copy(dst=t, src=tile)": "closes over tensors",
    "@nki.jit\n        def f(t): pass": "a kernel within a kernel",
    "kernel(x, (1, 2))": "a kernel within a kernel",
    "for j in nl.affine_range(3): pass": "affine_range is deprecated",
    "for j in nl.sequential_range(3): pass": "sequential_range is deprecated",
    "for j in nl.static_range(3): pass": "static_range is deprecated",
    "for j in nl.dynamic_range(3): pass": "dynamic_range is deprecated",
    "j = nl.arange(3)": "nl.arange is gone",
    "j = nl.mgrid[0:3]": "nl.mgrid is gone",
    "nisa.tensor_copy(dst=tile, src=x, mask=i < 2)": "mask= is gone",
    "t = nl.ndarray((1, 1), dtype=nl.float32, buffer='sbuf')": "buffer is a string",
    "nisa.tensor_copy(dst=tile, src=x, engine=nisa.engine.vector)": "write nisa.vector_engine",
    "nisa.tensor_copy(src=x, dst=tile)": "needs dst as its first argument",
}
BAD_MODULES = {
    "import neuronxcc.nki as nki": "neuronxcc is gone",
    "from neuronxcc.nki import isa": "neuronxcc is gone",
    "from __future__ import annotations": "annotations become text",
    "def f(tile: nl.ndarray | None): pass": "an annotation with |",
    "def f(tile, *, factor): pass": "f has keyword-only arguments",
    "def f(factors: list[float]): pass": "f takes a list",
    "def f(factors=[1.0]): pass": "f takes a list",
}


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: file.name)
def test_kernels_are_clean(file):
    assert lint(file.read_text()) == []


def test_kernels_of_the_benchmark_are_clean():
    assert lint((Path(__file__).parents[3] / "benchmarks" / "kernels" / "projections.py").read_text()) == []


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: file.name)
def test_kernels_are_described_as_in_nki_library(file):
    """Each has the sections of AWS's kernels, in their order, and a definition in torch of the same arguments."""
    functions = {each.name: each for each in ast.parse(file.read_text()).body if isinstance(each, ast.FunctionDef)}
    for name, function in functions.items():
        if any(ast.unparse(decorator) == "nki.jit" for decorator in function.decorator_list):
            sections = re.findall(r"^(\w+):$", ast.get_docstring(function), re.MULTILINE)
            assert sections == ["Dimensions", "Args", "Returns", "Notes", "Pseudocode"]
            kernel, definition = (functions[each].args.args for each in (name, f"{name}_torch"))
            assert [each.arg for each in kernel] == [each.arg for each in definition]


def test_clean_kernel():
    assert lint(KERNEL.format("scale(tile, factors[i])")) == []


@pytest.mark.parametrize(("statement", "message"), BAD_STATEMENTS.items())
def test_statement_is_refused(statement, message):
    (problem,) = lint(KERNEL.format(statement))
    assert message in problem.message
    assert problem.line - STATEMENT_LINE == statement.count("\n")


@pytest.mark.parametrize(("module", "message"), BAD_MODULES.items())
def test_module_is_refused(module, message):
    (problem,) = lint(module)
    assert message in problem.message


def test_no_other_module_imports_nki():
    """Other modules import nki and the kernels within functions, so that the package works without nki."""
    for file in set(PACKAGE.rglob("*.py")) - set(NKI_FILES) - set(NXDI_FILES):
        for statement in ast.parse(file.read_text()).body:
            for node in ast.walk(statement) if not isinstance(statement, ast.FunctionDef | ast.ClassDef) else ():
                imported = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
                assert "nki" not in re.split(r"\W+", imported), f"{file}: {imported}"
