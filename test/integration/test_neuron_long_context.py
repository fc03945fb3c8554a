"""benchmarks/accuracy/long_context.py in NxD Inference's CPU mode."""

import pytest

from benchmarks.accuracy import long_context
from test.integration.test_model import cpu_mode  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("cpu_mode")]


@pytest.mark.parametrize("kind", ["mamba", "attention"])
def test_errors_are_those_of_float32(kind, capsys):
    """NxD Inference's model keeps its own state, and gives logits of a prompt's last token only."""
    options = f"--backend nxdi --layers {kind} --dtype float32 --lengths 256 640 --window 64 --buckets 128"
    assert long_context.main(options.split()) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(kind)]
    assert [row[2] for row in rows] == ["256", "640"]
    errors = [float(cell) for row in rows for cell in row[3:] if cell != "/"]
    assert len(errors) == (16 if kind == "mamba" else 12) and max(errors) < 1e-4
