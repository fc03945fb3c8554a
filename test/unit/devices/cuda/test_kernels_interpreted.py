"""Tests of the Triton kernels without a GPU, in separate processes with Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU here runs them"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize(
    ("module", "chosen"),
    [
        ("unit/devices/cuda/test_kernels.py", ""),
        ("unit/devices/cuda/test_prompt_kernels.py", ""),
        ("unit/devices/cuda/test_rounding.py", ""),
        ("unit/devices/cuda/test_quantized_kernels.py", ""),
        ("unit/devices/cuda/test_token_kernels.py", "experts"),
        ("unit/devices/cuda/test_token_kernels.py", "not experts"),
        ("integration/test_torch_device_interpreted.py", ""),
    ],
)
def test_kernels(module, chosen):
    run_tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [*run_tests, Path(__file__).parents[3] / module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
