"""python -m benchmarks.latency.processor_table. No test depends on the times that it measures."""

import pytest

from benchmarks.latency import processor_table
from benchmarks.latency.implementations import LLAMA_CPP, OPENVINO, OURS, Point, Run
from benchmarks.latency.measurement import result_of
from granite4_neuron.checkpoint.folder import bundled_checkpoint

QUANTIZE = """#!/bin/sh
# As llama-quantize FROM TO TYPE.
cp "$1" "$2" && echo "$3" >> "$(dirname "$0")/types"
"""
# The times of a first token and of each further one, in seconds.
TIMES = {OURS: (1.0, 0.5), LLAMA_CPP: (2.0, 1.5), OPENVINO: (4.0, 0.25)}


def tables(capsys, *arguments):
    """Return the cells of the rows of both tables, without titles."""
    assert processor_table.main([str(bundled_checkpoint()), *arguments]) == 0
    rows = [line.strip("| ").split(" |") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    second = next(number for number, row in enumerate(cells) if row[0] == "ms per step")
    return cells[2:second], cells[second + 2 :]


@pytest.mark.exhaustive
def test_measures(capsys):
    small = ("--prompt-length", "9", "--output-length", "3", "--batch-size", "1", "--repeats", "1", "--threads", "1")
    (speed,), ((batch, step),) = tables(capsys, *small, "--formats", "lossless12")
    assert speed[0] == "lossless12, prompt 9" and len(speed) == 5 and batch == "1"
    assert all(float(cell.replace(",", "")) > 0 for cell in (speed[1], speed[3], step))


def measured(folder, options):
    """Stand in for `measure_all`, with the times above."""
    return [
        [
            result_of(
                name, Point(batch, length, 3), [Run([first, first + step, first + 2 * step], 2**21, 2**20)], (1, 1)
            )
            for name in (OURS, *options.compare)
            for first, step in [TIMES[name]]
        ]
        for batch in options.batch_size
        for length in options.prompt_length
    ]


def test_beside_others(capsys, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    asked = []
    monkeypatch.setattr(processor_table, "check", asked.append)
    monkeypatch.setattr(processor_table, "measure_all", measured)
    (tmp_path / "llama-quantize").write_text(QUANTIZE)
    (tmp_path / "llama-quantize").chmod(0o700)
    peers = ("--llama-cpp", str(tmp_path), "--openvino", str(tmp_path))
    arguments = ("--prompt-length", "10", "--formats", "bfloat16", "int8", "lossless12", "--batch-size", "1", "8")
    speeds, steps = tables(capsys, *arguments, *peers)
    ratios = ["2.00 times", "4.00 times"], ["3.00 times", "0.50 times"]
    for row, name in zip(speeds, ("bfloat16", "int8"), strict=False):
        assert row == [f"{name}, prompt 10", "10", *ratios[0], "1.00", "500.0", *ratios[1], "1"]
    assert speeds[2] == ["lossless12, prompt 10", "10", "", "", "1.00", "500.0", "", "", "1"]
    assert steps == [[batch, "500.0", "500.0", "500.0"] for batch in ("1", "8")]
    assert (tmp_path / "types").read_text().split() == ["Q8_0"]
    assert [(each.quantize, each.compare, each.openvino) for each in asked[:3]] == [
        (None, [LLAMA_CPP, OPENVINO], tmp_path / "bfloat16"),
        ("int8", [LLAMA_CPP, OPENVINO], tmp_path / "int8"),
        ("lossless12", [], None),
    ]


def test_bad_input_is_refused(capsys, tmp_path):
    assert processor_table.main([str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
