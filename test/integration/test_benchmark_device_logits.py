"""benchmarks.devices.logits prints the errors of a device and of the CPU runtime, both in bfloat16, for each batch."""

import pytest

from benchmarks.devices import logits as device_logits
from test.support.checkpoints import small_config
from test.support.graph_contract import FEW_LAYERS


@pytest.mark.exhaustive  # it compiles with inductor
def test_rows(monkeypatch, capsys):
    monkeypatch.setattr(device_logits, "published_config", lambda name: small_config(**FEW_LAYERS))
    assert device_logits.main(["--random-weights", "h-350m", "--batch-size", "1", "3", "--tokens", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert [row[:2] for row in rows] == [
        [f"batch {number}", name] for number in (1, 3) for name in ("cpu", "CPU, bfloat16")
    ]
    # Errors of bfloat16, which has 8 bits of mantissa. Errors of float32 would be thousands of times smaller.
    assert all(1e-4 < float(mean) < float(largest) < 0.3 for *_, largest, mean, _ in rows)


def test_an_unknown_model_is_refused(capsys):
    assert device_logits.main(["--random-weights", "h-7"]) == 2
    assert "h-7" in capsys.readouterr().err
