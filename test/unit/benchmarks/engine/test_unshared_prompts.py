"""`benchmarks.engine.unshared_prompts`: both engines serve the same requests, and turns are compared."""

import argparse
import itertools

import pytest
from transformers import GenerationConfig

from benchmarks.engine import unshared_prompts as module
from granite4_neuron.devices.cpu.runtime import CPURuntime
from test.support.engines import engine_model


def test_both_engines_take_turns(monkeypatch):
    runtime, served = CPURuntime(engine_model(max_position_embeddings=2048), GenerationConfig()), []
    serve, ticks = module._serve, itertools.count()

    def watched(engine, requests, clients):
        before = engine.stats.decode_rows
        serve(engine, requests, clients)
        cache = engine._prefixes.cache
        served.append((cache is not None, [each.tokens for each in requests], engine.stats.decode_rows - before))
        for _ in range(2 * (cache is not None)):
            next(ticks)

    monkeypatch.setattr(module, "_serve", watched)
    options = argparse.Namespace(
        clients=[2], prompt_length=[5], answer_length=4, requests=3, turns=2, prefix_cache="1MiB"
    )
    table = module.costs(runtime, options, lambda: float(next(ticks)))
    assert [with_cache for with_cache, *_ in served] == 3 * [False, True]
    assert all(one[1:] == other[1:] for one, other in zip(served[::2], served[1::2], strict=True))
    assert [(len(requests), rows) for _, requests, rows in served] == 6 * [(6, 6 * 3)]
    prompts = [tuple(each) for _, requests, _ in served[::2] for each in requests]
    assert len(set(prompts)) == len(prompts) == 18 and {len(each) for each in prompts} == {5}
    cells = [list(column.cells) for column in table.columns]
    assert cells[:2] == [["2"], ["5"]] and cells[4] == ["+200.0 %"]
    assert float(cells[3][0]) == pytest.approx(3 * float(cells[2][0]), rel=0.01)
