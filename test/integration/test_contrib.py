"""The folder for NxD Inference's collection of models: its tests pass, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test.integration.test_model import free_port
from test.support import nxdi

pytestmark = pytest.mark.versions

FOLDER = Path(__file__).parents[2] / "contrib" / "models" / "granite-4.0-h"
# Sections that NxD Inference's contrib/CONTRIBUTING.md asks of a README.
SECTIONS = ("Usage Example", "Compatibility Matrix", "Example Checkpoints", "Testing Instructions")


def test_readme_has_what_nxd_inference_asks_for():
    headings = re.findall(r"^## (.+)$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(SECTIONS) <= set(headings)


def test_its_tests():
    nxdi.skip_unless_importable()
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(FOLDER / "test")]
    environment = dict(os.environ, MASTER_PORT=str(free_port()))
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout
