"""A module and a header add a quantization format. No other file of the package changes."""

import pytest

from granite4_neuron.devices.cpu import operators as cpu
from test.support.package_copy import ROOT, PackageCopy

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
    copy = PackageCopy(tmp_path)
    copy.write("ops/formats/fp8.py", (FP8 / "fp8.py").read_text(encoding="utf-8"))
    copy.write("devices/cpu/kernels/formats/fp8.h", (FP8 / "fp8.h").read_text(encoding="utf-8"))
    done = copy.run("-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", f"fp8 or {REFUSAL}", *TESTS)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
    assert f"{REFUSAL} PASSED" in done.stdout
