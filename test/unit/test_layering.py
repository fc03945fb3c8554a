"""A module imports only from its own layer or from layers below. docs/architecture.md has the table of layers."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "granite4_neuron"
TABLE = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
LAYERS = {
    part.rstrip("/").removesuffix(".py"): -i for i, row in enumerate(TABLE) for part in re.findall(r"`(.+?)`", row)
}
MODULES = sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def part_of(module: str) -> str:
    """Return "ops" for "granite4_neuron.ops.norm", and "state" for "granite4_neuron.state.hybrid_state.NULL_SLOT"."""
    return module.split(".")[1]


def imported_parts(source: str) -> set[str]:
    """Return the parts of this package that a module imports, also within functions."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [f"{node.module}.{alias.name}" for node in froms for alias in node.names]
    return {part_of(name) for name in names if name.startswith("granite4_neuron.")}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_downwards(module):
    layer = LAYERS[module.parts[0].removesuffix(".py")]
    above = {part for part in imported_parts((PACKAGE / module).read_text(encoding="utf-8")) if LAYERS[part] > layer}
    assert not above, f"{module} imports from above: {above}"


def test_every_part_has_a_layer():
    assert set(LAYERS) == {module.parts[0].removesuffix(".py") for module in MODULES}


def test_an_import_upwards_is_found():
    assert imported_parts("def f():\n    from granite4_neuron.engine import Engine") == {"engine"}
    assert imported_parts("from granite4_neuron import checkpoint, plan") == {"checkpoint", "plan"}
    assert imported_parts("import granite4_neuron.runtime.cpu as cpu, torch") == {"runtime"}
    assert LAYERS["cli"] > LAYERS["engine"] > LAYERS["runtime"] > LAYERS["model"] > LAYERS["ops"] > LAYERS["config"]
