"""A module imports only from its own layer or from layers below. docs/architecture.md has the table of layers."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "granite4_neuron"
TABLE = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
ROWS = [re.findall(r"`(.+?)`", row) for row in TABLE]
LAYERS = {part.rstrip("/").removesuffix(".py"): -i for i, row in enumerate(ROWS) for part in row}
DEVICES = {"devices/cpu", "devices/cuda", "devices/neuron", "devices/xla"}
# Modules outside of config and model with another project's format, class or name for each family.
KNOW_FAMILIES = {
    "checkpoint/gguf/config.py",
    "devices/neuron/compiled_graphs.py",
    "devices/neuron/nxdi/config.py",
    "devices/neuron/nxdi/registration.py",
    "vllm/cpu/configs.py",
    "vllm/cpu/registration.py",
}
OF_A_FAMILY = re.compile(
    r"granite4_neuron\.config\.(ARCHITECTURE|MODEL_TYPE|GraniteMoeHybridConfig|NemotronHConfig|"
    r"(dense|granite_moe_hybrid|nemotron_h)\..+)"
)
MODULES = sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def part_of(path: str) -> str:
    """Return the part of the table to which a file or a module belongs: "ops" for "ops/norm.py" or "ops/norm", and
    "devices/neuron/nki" for "devices/neuron/nki/mamba.py".
    """
    parts = [part for part in LAYERS if f"{path.removesuffix('.py')}/".startswith(f"{part}/")]
    return max(parts, key=len, default=path)


def imported_names(source: str) -> list[str]:
    """Return the modules and names that a module imports, also within functions."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return names + [f"{node.module}.{alias.name}" for node in froms for alias in node.names]


def imported_parts(source: str) -> set[str]:
    """Return the parts of this package that a module imports."""
    paths = (name.replace(".", "/") for name in imported_names(source))
    return {part_of(path.removeprefix("granite4_neuron/")) for path in paths if path.startswith("granite4_neuron/")}


def knows_a_family(source: str) -> bool:
    """Return whether a module imports the config of one family, or a part of it."""
    return any(map(OF_A_FAMILY.fullmatch, imported_names(source)))


def test_imports_go_downwards():
    above = set()
    for module in MODULES:
        own = part_of(str(module))
        for part in imported_parts((PACKAGE / module).read_text(encoding="utf-8")):
            if LAYERS[part] > LAYERS[own] or ({part, own} <= DEVICES and part != own):
                above.add((str(module), part))
    assert not above


def test_every_part_has_a_layer():
    """Also `devices` itself, whose `__init__.py` imports nothing."""
    assert {part_of(str(module)) for module in MODULES} == set(LAYERS)
    assert len({module.parts[0] for module in MODULES} - {"__main__.py"}) <= 16


def test_few_modules_know_a_family():
    sources = {module.as_posix(): (PACKAGE / module).read_text(encoding="utf-8") for module in MODULES}
    knowing = {name for name, source in sources.items() if knows_a_family(source)}
    assert {name for name in knowing if not name.startswith(("config/", "model/"))} == KNOW_FAMILIES
    assert "model/modeling_nemotron_h.py" in knowing
    assert not knows_a_family("from granite4_neuron.config import MAMBA, ModelConfig, config_from_file")


def test_an_import_upwards_is_found():
    assert imported_parts("def f():\n    from granite4_neuron.engine import Engine") == {"engine"}
    assert imported_parts("from granite4_neuron import checkpoint, planning") == {"checkpoint", "planning"}
    assert imported_parts("import granite4_neuron.devices.neuron.nki.mamba as x, torch") == {"devices/neuron/nki"}
    assert LAYERS["commands"] > LAYERS["engine"] > LAYERS["devices/cpu"] > LAYERS["runtime"] > LAYERS["model"]
    assert LAYERS["model"] > LAYERS["ops"] > LAYERS["config"]
