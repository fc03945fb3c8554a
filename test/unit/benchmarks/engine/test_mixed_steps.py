"""Steps of `benchmarks.engine.mixed_steps`: what is in them, and that all of them are measured."""

import argparse

from benchmarks.engine.mixed_steps import _measure, _print, _print_parts, _Steps
from granite4_neuron.devices.cpu.runtime import CPURuntime
from test.support.engines import engine_model


def test_each_kind_of_step_is_measured(capsys, monkeypatch):
    runtime, steps = CPURuntime(engine_model(max_position_embeddings=2048), None), []
    run = runtime.step
    monkeypatch.setattr(runtime, "step", lambda state, rows: steps.append(rows) or run(state, rows))
    options = argparse.Namespace(name="small", rows=3, pieces=[5], threads=1, repeats=2)
    decode = _Steps(3, 0)
    times, parts = _measure(runtime, [_Steps(1, 0), decode, _Steps(0, 5), _Steps(3, 5)], options)
    lengths = [[len(row.tokens) for row in rows] for rows in steps]
    assert lengths == 3 * [[1], [1, 1, 1], [5], [1, 1, 1, 5]]
    assert all(len({row.slot for row in rows}) == len(rows) for rows in steps)
    _print(times, decode, options)
    _print_parts(parts, options)
    printed = capsys.readouterr().out
    assert "5" in printed and "scan" in printed
