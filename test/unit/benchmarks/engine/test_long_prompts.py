"""`benchmarks.engine.long_prompts` on a clock of which a token of a prompt takes a millisecond."""

from transformers import GenerationConfig

from benchmarks.engine import long_prompts as module
from granite4_neuron.devices.cpu.runtime import CPURuntime
from test.support.engines import engine_model


def test_times_alone_and_beside_a_stream(monkeypatch):
    runtime = CPURuntime(engine_model(max_position_embeddings=2048), GenerationConfig())
    run, seconds, longest = runtime.step, [0.0], [0.0]

    def timed(state, rows, all_logits=False):
        took = sum(len(row.tokens) for row in rows) / 1e3
        seconds[0] += took
        if len(rows) > 1:
            longest[0] = max(longest[0], took)
        return run(state, rows, all_logits)

    monkeypatch.setattr(runtime, "step", timed)
    table = module.times(runtime, [300, 700], answer_length=5, turns=2, clock=lambda: seconds[0])
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [row[:3] for row in rows] == [("300", "0.300", "1.00"), ("700", "0.700", "1.00")]
    for row, alone in zip(rows, (0.3, 0.7), strict=True):
        beside, p50, p99, most = map(float, row[3:])
        assert alone < beside < alone + 0.1
        assert 1 <= p50 <= p99 <= most <= 1e3 * longest[0]
    assert float(rows[1][6]) > 50  # most of a step
