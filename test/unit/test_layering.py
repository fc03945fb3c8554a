"""A module imports only from its own layer or from layers below. docs/architecture.md has the table of layers."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "granite4_neuron"
TABLE = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
LAYERS = {
    part.rstrip("/").removesuffix(".py"): -i for i, row in enumerate(TABLE) for part in re.findall(r"`(.+?)`", row)
}
# Modules outside of config and model with another project's format, class or name for each family.
KNOW_FAMILIES = {
    "checkpoint/gguf/config.py",
    "neuron/compiled_graphs.py",
    "neuron/nxdi/config.py",
    "neuron/nxdi/registration.py",
    "vllm/cpu/configs.py",
    "vllm/cpu/registration.py",
}
OF_A_FAMILY = re.compile(
    r"granite4_neuron\.config\.(ARCHITECTURE|MODEL_TYPE|GraniteMoeHybridConfig|NemotronHConfig|"
    r"(dense|granite_moe_hybrid|nemotron_h)\..+)"
)
MODULES = sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def part_of(module: str) -> str:
    """Return "ops" for "granite4_neuron.ops.norm", and "state" for "granite4_neuron.state.hybrid_state.NULL_SLOT"."""
    return module.split(".")[1]


def imported_names(source: str) -> list[str]:
    """Return the modules and names that a module imports, also within functions."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return names + [f"{node.module}.{alias.name}" for node in froms for alias in node.names]


def imported_parts(source: str) -> set[str]:
    """Return the parts of this package that a module imports."""
    return {part_of(name) for name in imported_names(source) if name.startswith("granite4_neuron.")}


def knows_a_family(source: str) -> bool:
    """Return whether a module imports the config of one family, or a part of it."""
    return any(map(OF_A_FAMILY.fullmatch, imported_names(source)))


def test_imports_go_downwards():
    above = {
        (str(module), part)
        for module in MODULES
        for part in imported_parts((PACKAGE / module).read_text(encoding="utf-8"))
        if LAYERS[part] > LAYERS[module.parts[0].removesuffix(".py")]
    }
    assert not above


def test_every_part_has_a_layer():
    assert set(LAYERS) == {module.parts[0].removesuffix(".py") for module in MODULES}


def test_few_modules_know_a_family():
    sources = {module.as_posix(): (PACKAGE / module).read_text(encoding="utf-8") for module in MODULES}
    knowing = {name for name, source in sources.items() if knows_a_family(source)}
    assert {name for name in knowing if not name.startswith(("config/", "model/"))} == KNOW_FAMILIES
    assert "model/modeling_nemotron_h.py" in knowing
    assert not knows_a_family("from granite4_neuron.config import MAMBA, ModelConfig, config_from_file")


def test_an_import_upwards_is_found():
    assert imported_parts("def f():\n    from granite4_neuron.engine import Engine") == {"engine"}
    assert imported_parts("from granite4_neuron import checkpoint, plan") == {"checkpoint", "plan"}
    assert imported_parts("import granite4_neuron.runtime.cpu as cpu, torch") == {"runtime"}
    assert LAYERS["cli"] > LAYERS["engine"] > LAYERS["runtime"] > LAYERS["model"] > LAYERS["ops"] > LAYERS["config"]
