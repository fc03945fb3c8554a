"""A module and a header add a quantization format. No other file of the package changes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import granite4_neuron
from granite4_neuron.devices.cpu import operators as cpu

ROOT = Path(__file__).parents[2]
FP8 = ROOT / "test" / "support" / "fp8"
REFUSAL = "test_a_value_that_does_not_exist"
# fp8's own checks, the checks of every format, and the test of refusals, `REFUSAL`.
TESTS = (
    FP8 / "fp8_checks.py",
    "test/unit/ops/test_quantization.py",
    "test/unit/devices/cpu/kernels/test_kernels.py",
    "test/unit/devices/cpu/test_layers.py",
    "test/integration/test_quantized_checkpoints.py",
    "test/unit/devices/test_backends.py",
)


@pytest.mark.exhaustive  # it compiles all kernels
@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
def test_a_module_and_a_header_make_a_format(tmp_path):
    original, copy = Path(granite4_neuron.__file__).parent, tmp_path / "granite4_neuron"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FP8 / "fp8.py", copy / "ops" / "formats")
    shutil.copy(FP8 / "fp8.h", copy / "devices" / "cpu" / "kernels" / "formats")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-k",
        f"fp8 or {REFUSAL}",
        *map(str, TESTS),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
    assert f"{REFUSAL} PASSED" in done.stdout
