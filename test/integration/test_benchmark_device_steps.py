"""benchmarks.devices.steps prints a row for each number of sequences and each length of prompt."""

from dataclasses import replace

import pytest

from benchmarks.devices import steps as device_steps
from granite4_neuron.devices.torch.options import DEVICES
from test.support.checkpoints import DENSE, small_config
from test.support.graph_contract import FEW_LAYERS


@pytest.mark.slow
def test_rows(monkeypatch, capsys):
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], compiler="eager"))
    monkeypatch.setattr(device_steps, "published_config", lambda name: small_config(**FEW_LAYERS))
    options = ["--random-weights", "h-350m", "--batch-size", "1", "3", "--prompt-length", "20", "--steps", "2"]
    assert device_steps.main(options) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in row] for row in rows]
    ways = ("a token", "chosen there", "sampled here", "sampled there")
    tokens = [f"{way}, batch {size}" for size in (1, 3) for way in ways]
    assert [name for name, *_ in rows] == [*tokens, "a prompt of 20"]
    assert all(float(ms) > 0 for _, ms, *_ in rows)
    assert [share[-1:] for _, _, _, share, *_ in rows] == ["%"] * len(tokens) + [""]
    layers, vocab_size = len(FEW_LAYERS["layer_types"]), small_config().vocab_size
    for size, counted in ((1, rows[:4]), (3, rows[4:8])):
        given, logits = [str(layers + 2), "1", str(32 * size), "1"], f"{4 * size * vocab_size:,}"
        assert [counts for _, _, _, _, *counts in counted] == [
            [*given, logits],
            [*given, str(4 * size)],
            [*given, logits],
            [*given, str(4 * size)],  # the CPU draws without a graph of its own
        ]


@pytest.mark.slow
def test_one_launch_a_token(monkeypatch, capsys):
    monkeypatch.setattr(device_steps, "published_config", lambda name: small_config(**DENSE, **FEW_LAYERS))
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], compiler="eager"))
    assert device_steps.main(["--random-weights", "h-350m", "--graphs", "model", "--steps", "2"]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[4:]] for row in rows][1] == ["1", "1", "32", "1", "4"]


@pytest.mark.slow
def test_the_first_layers(monkeypatch, capsys):
    monkeypatch.setattr(device_steps, "published_config", lambda name: small_config(**DENSE, **FEW_LAYERS))
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], compiler="eager"))
    assert device_steps.main(["--random-weights", "h-350m", "--layers", "2", "--steps", "2"]) == 0
    assert "h-350m, 2 layers" in capsys.readouterr().out


def test_an_unknown_model_is_refused(capsys):
    assert device_steps.main(["--random-weights", "h-7"]) == 2
    assert "h-7" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--device", "tpu"], [], ["--random-weights", "h-350m", "--steps", "0"], ["--layers", "0"]]
)
def test_bad_options_are_refused(option):
    with pytest.raises(SystemExit):
        device_steps.main(option)
