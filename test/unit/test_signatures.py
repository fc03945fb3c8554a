"""No function in Python or C++ takes more than eight positional arguments. Triton kernels may: they get each number as
an argument. So may operators of a graph and their launches, which get each tensor as one.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = sorted([*ROOT.glob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "src").rglob("*.py")])
CPP = sorted((ROOT / "src" / "granite4_neuron" / "devices" / "cpu" / "kernels").glob("*.[hc]*"))
MOST = 8
# These have the signatures of mamba_ssm's and vLLM's functions and kernels of these names.
NOT_OURS = {
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba_chunk_scan_combined",
    "mamba_chunk_scan_combined_varlen",
    "postprocess_mamba_fused_kernel",
    "precopy_mamba_align_fused_kernel",
    "rejection_sample",
    "sample_recovered_tokens",
    "selective_scan_fn",
    "selective_state_step",
    "selective_state_update",
}


def python_functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield names, and numbers of positional arguments other than self and cls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _may_take_more(node):
            arguments = [argument.arg for argument in node.args.posonlyargs + node.args.args]
            yield node.name, len([name for name in arguments if name not in ("self", "cls")])


def _may_take_more(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = tuple(ast.unparse(decorator) for decorator in node.decorator_list)
    return node.name.startswith("_launch_") or any(
        each.startswith(("triton.jit", "gluon.jit", "operator(")) for each in decorators
    )


def cpp_functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield names and numbers of parameters of all functions, constructors and methods that have a body."""
    source = re.sub(r"//.*", "", source)
    for name, parameters in re.findall(r"(\w+)\(([^(){};]*)\)\s*(?:const\s*)?[{:]", source):
        without_templates = re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", parameters))
        yield name, len([parameter for parameter in without_templates.split(",") if parameter.strip()])


@pytest.mark.parametrize(("files", "functions"), [(PYTHON, python_functions), (CPP, cpp_functions)], ids=["py", "cpp"])
def test_eight_at_most(files, functions):
    found = {
        (str(file.relative_to(ROOT)), name): count
        for file in files
        for name, count in functions(file.read_text(encoding="utf-8"))
        if count > MOST and name not in NOT_OURS
    }
    assert not found


def test_the_counts_of_arguments():
    assert dict(python_functions("class A:\n  def f(self, a, /, b, *, c): pass\nasync def g(*a): pass")) == {
        "f": 2,
        "g": 0,
    }
    source = """
    template <int N> inline void f(const std::pair<int, int>& a, View<const T> b,  // c, d
                                   int64_t e) {}
    int g() const { return h(1, 2, 3); }
    """
    assert dict(cpp_functions(source)) == {"f": 3, "g": 0}
    assert len(CPP) > 10 and len(PYTHON) > 80
