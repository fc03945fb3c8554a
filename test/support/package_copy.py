"""A copy of the package that a test changes as docs/extending.md says, and programs that run with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import granite4_neuron

ROOT = Path(__file__).parents[2]


class PackageCopy:
    """A copy of the package in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.package = folder / "granite4_neuron"
        original = Path(granite4_neuron.__file__).parent
        shutil.copytree(original, self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def add(self, file: str, after: str, lines: str) -> None:
        """Add lines to a file, behind the first place that the regular expression `after` matches."""
        self._edit(file, after, lambda match: match[0] + lines)

    def remove(self, file: str, lines: str) -> None:
        """Remove the lines that a regular expression matches from a file."""
        self._edit(file, lines, lambda match: "")

    def write(self, file: str, text: str) -> None:
        """Write a new file."""
        path = self.package / file
        assert not path.exists(), f"{file} exists"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _edit(self, file: str, place: str, edited) -> None:
        path = self.package / file
        text, count = re.subn(place, edited, path.read_text(encoding="utf-8"), count=1)
        assert count == 1, f"{file} has nothing like {place}"
        path.write_text(text, encoding="utf-8")

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments, in the repository, with the copy as the package."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(self._folder), "COLUMNS": "200"}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
