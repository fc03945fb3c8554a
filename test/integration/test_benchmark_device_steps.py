"""benchmarks.device_steps prints a row for each number of sequences and each length of prompt."""

import pytest

from benchmarks import device_steps
from granite4_neuron.config import GraniteMoeHybridConfig
from test.support.checkpoints import small_config
from test.support.graph_contract import FEW_LAYERS


def test_rows(monkeypatch, capsys):
    monkeypatch.setattr(GraniteMoeHybridConfig, "from_family", lambda name: small_config(**FEW_LAYERS))
    options = ["--random-weights", "h-350m", "--batch-size", "1", "3", "--prompt-length", "20", "--steps", "2"]
    assert device_steps.main(options) == 0
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [name.strip() for name, _ in rows] == ["a token, batch 1", "a token, batch 3", "a prompt of 20"]
    assert all(float(ms) > 0 for _, ms in rows)


def test_a_name_that_is_none(capsys):
    assert device_steps.main(["--random-weights", "h-7"]) == 2
    assert "h-7" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--device", "tpu"], [], ["--random-weights", "h-350m", "--steps", "0"]])
def test_bad_options(option):
    with pytest.raises(SystemExit):
        device_steps.main(option)
