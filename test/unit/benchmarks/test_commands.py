"""docs/measurements/index.md names each command of benchmarks/, and pages name no module or file that is missing."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PARTS = {"vllm_process"}  # other commands start these


def commands() -> set[str]:
    found = set()
    for file in (ROOT / "benchmarks").rglob("*.py"):
        name = file.relative_to(ROOT).with_suffix("")
        if name.name == "__main__":
            found.add(".".join(name.parent.parts))
        elif name.name not in PARTS and '__name__ == "__main__"' in file.read_text(encoding="utf-8"):
            found.add(".".join(name.parts))
    return found


def test_the_index_names_each_command():
    index = (ROOT / "docs" / "measurements" / "index.md").read_text(encoding="utf-8")
    assert len(commands()) > 20
    assert commands() <= set(re.findall(r"benchmarks(?:\.\w+)+", index))


def test_modules_and_files_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in set(re.findall(r"\bbenchmarks(?:\.\w+)+", text)):
        assert importlib.util.find_spec(name), name
    for path in set(re.findall(r"\bbenchmarks/[\w/]+\.\w+", text)):
        assert (ROOT / path).is_file(), path
