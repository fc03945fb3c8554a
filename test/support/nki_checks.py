"""Checks of NKI kernels: their results, and the counts of the emulator."""

import pytest

from test.support.nki_cases import error


def check(outputs, exact, tolerance=1e-5):
    """Check that each output has the shape of the exact result and is within the tolerance of it."""
    for output, expected in zip(outputs, exact, strict=True):
        assert output.shape == expected.shape
        assert error(output, expected) <= tolerance


def last_launch():
    """Return the emulator's record of the latest launch. Skip the test where NKI is not the emulator."""
    emulation = pytest.importorskip("nki.emulation", reason="only the emulator counts")
    return emulation.last_launch()
