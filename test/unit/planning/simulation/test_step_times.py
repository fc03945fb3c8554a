"""Step times: interpolated between measured ones, predicted, in files, and in commands."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from granite4_neuron.commands import cli
from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.compiled_graphs import GraphOptions
from granite4_neuron.engine import Engine
from granite4_neuron.errors import UserError
from granite4_neuron.generation import bundled_checkpoint, load
from granite4_neuron.planning.analysis.device_graphs import DeviceGraphOptions
from granite4_neuron.planning.latency import latency, predictions, step_work
from granite4_neuron.planning.simulation.measured_steps import Measured, MeasuredSteps
from granite4_neuron.planning.simulation.measuring import measure
from granite4_neuron.planning.simulation.predicted_steps import PredictedSteps
from granite4_neuron.runtime.interface import Row

MEASURED = Measured(
    model="m",
    dtype="bfloat16",
    state_dtype="float32",
    backend="cpu",
    machine="here",
    sampling=dict(temperature=0.7, top_p=0.95),
    config=published_config("h-350m").to_dict(),
    tokens_per_step=512,
    rows_per_step=8,
    prompt_cuts=["anywhere", True],
    packs_rows=False,
    max_length=4096,
    decode=[(1, 100, 1.0), (1, 300, 3.0), (1, 500, 3.0), (4, 100, 7.0), (4, 500, 11.0)],
    prompts=[(1, 1, 1.0), (1, 101, 11.0), (2, 50, 12.0)],
    contexts=[(0, 10.0), (512, 10.0 + 512), (1024, 10.0 + 3 * 512)],
    snapshots=[(0, 1.0), (100, 2.0)],
    restores=[(50, 0.5)],
)


def row(start, tokens):
    return Row(1, start, range(tokens))


def test_measured_steps():
    steps = MeasuredSteps(MEASURED)
    assert steps.step([row(100, 1)]) == 1 and steps.step([row(200, 1)]) == 2
    assert steps.step([row(50, 1)]) == 0.5 and steps.step([row(700, 1)]) == 3  # extrapolated from the last piece
    assert steps.step([row(100, 1)] * 4) == 7
    # Two rows are a third of the way from one row to four, which take 3 and 9 at the mean length of 300.
    assert steps.step([row(200, 1), row(400, 1)]) == pytest.approx(3 + 6 / 3)
    assert steps.step([row(0, 51)]) == 6  # a prompt
    assert steps.step([row(0, 50), row(0, 20)]) == 12  # padded to the longest
    packed = MeasuredSteps(replace(MEASURED, packs_rows=True))
    assert packed.step([row(0, 60), row(0, 40)]) == 12  # like two of 50
    # 51 tokens after 256: half a second of attention each.
    assert steps.step([row(256, 51)]) == 6 + 51 / 2
    # Rows beside a prompt add the time of four decoded rows, less that of one row of length 0, which is 0 here.
    assert steps.step([row(0, 51), *[row(100, 1)] * 3]) == 6 + 7
    assert (steps.snapshot(50), steps.restore(4000)) == (1.5, 0.5)


def test_several_decode_steps_at_once_equal_single_ones():
    steps = MeasuredSteps(MEASURED)
    for starts in ([90], [298, 40], [499, 499, 499, 498], [4000]):
        one_by_one = [steps.step([row(start + step, 1) for start in starts]) for step in range(20)]
        assert steps.decode(starts, 20) == pytest.approx(one_by_one, rel=1e-12)


def test_predicted_steps():
    config, dtype = published_config("h-350m"), torch.bfloat16
    prompt_pieces = partial(DeviceGraphOptions((128, 512)).prompt_pieces, seq_len=2048)
    steps = PredictedSteps(config, 1, dtype, slots=4, prompt_pieces=prompt_pieces, cache_buckets=[256, 2048])

    def predicted(context, prompt=128):
        return {line.step: line.latency.predicted for line in predictions(config, 1, dtype, prompt, context, [4])}

    # Whatever runs, all four slots are decoded, and see the bucket that holds the longest.
    assert steps.step([row(255, 1)]) == steps.step([row(10, 1)] * 3) == predicted(256)["token"]
    assert steps.decode([254], 4) == [predicted(256)["token"]] * 2 + [predicted(2048)["token"]] * 2
    # A prompt of 600 is pieces of 512 and 128, as `plan --latency` has it with another context.
    first, whole = steps.step([row(0, 512)]), steps.step([row(0, 600)])
    assert first == predicted(256, 512)["first token, prompt of 512"]
    assert first < whole < 2 * first
    assert steps.step([row(0, 512), row(10, 1)]) == first + predicted(256)["token"]


@pytest.mark.parametrize(
    ("start", "stop", "seq_len", "pieces"),
    [
        (0, 600, 4096, [1024]),
        (0, 2048, 4096, [1024, 512, 512]),
        (0, 1025, 4096, [1024, 512]),
        (300, 1400, 4096, [512, 512, 512]),
        (300, 303, 512, [1, 1, 1]),  # without graphs that continue a prompt
    ],
)
def test_predicted_pieces_of_nxd_inference(start, stop, seq_len, pieces):
    """A prompt goes on in graphs of 512 tokens, whatever context graphs there are."""
    prompt_pieces = partial(GraphOptions(context_buckets=(128, 512, 1024)).prompt_pieces, seq_len=seq_len)
    assert prompt_pieces(start, stop) == pieces
    model = published_config("h-350m"), 1, torch.bfloat16
    caches = [256, 512, 4096]
    steps = PredictedSteps(*model, slots=4, prompt_pieces=prompt_pieces, cache_buckets=caches)
    seconds, at = 0.0, start
    for tokens in pieces:
        # The graph visits the bucket of the cache that holds its last token; the first one has no cache to visit.
        visited = next(length for length in caches if length >= min(at + tokens, stop))
        context = max(at, visited - tokens) if at else 0
        sequences = 4 if tokens == 1 else 1
        form, context = ("all", visited) if tokens == 1 else ("kernel", context)
        seconds += latency(step_work(*model, sequences, tokens, context, experts_decode=form)).predicted
        at += tokens
    assert steps.step([row(start, stop - start)]) == pytest.approx(seconds)


def test_measuring(tmp_path, monkeypatch):
    runtime, tokenizer = load(bundled_checkpoint())
    done, requests, add = [], [], Engine.add
    monkeypatch.setattr(Engine, "add", lambda engine, request: (requests.append(request), add(engine, request))[1])
    names = dict(model="tiny", backend="cpu", machine="here", sampling=MEASURED.sampling)
    progress = lambda *amounts: done.append(amounts)  # noqa: E731
    measured = measure(runtime, tokenizer, **names, most_rows=3, longest=600, progress=progress)
    assert done[-1][0] == done[-1][1] == len(done)
    assert {line[0] for line in measured.decode} == {1, 2, 3} and {line[1] for line in measured.decode} >= {64, 584}
    assert {line[0] for line in measured.prompts} == {1, 2, 4, 8}
    assert (1, 512) in {line[:2] for line in measured.prompts} and [line[0] for line in measured.contexts] == [0]
    assert all(line[-1] > 0 for table in (measured.decode, measured.prompts, measured.snapshots) for line in table)
    short = measure(runtime, tokenizer, **names, most_rows=1, longest=40)  # no prompt is as long as a step
    assert short.contexts == [] and {line[:2] for line in short.decode} == {(1, 24)}
    file = tmp_path / "steps.json"
    measured.save(file)
    again = Measured.load(file)
    assert again.sampling == MEASURED.sampling == dict(temperature=0.7, top_p=0.95)
    assert {(each.temperature, each.top_p) for each in requests} == {(0.7, 0.95)}
    rows = [row(100, 1), row(130, 1)]
    assert MeasuredSteps(again).step(rows) == MeasuredSteps(measured).step(rows)


def test_long_steps_are_measured_in_parts(monkeypatch):
    """A simulation has no long steps."""
    runtime, tokenizer = load(bundled_checkpoint(), cpu_kernels="torch")
    monkeypatch.setattr(type(runtime), "tokens_per_step", 16)
    monkeypatch.setattr(type(runtime), "tokens_per_long_step", 32)
    names = dict(model="tiny", backend="cpu", machine="here", sampling=MEASURED.sampling)
    measured = measure(runtime, tokenizer, **names, most_rows=1, longest=70)
    assert [before for before, _ in measured.contexts] == [0, 16, 32, 48] and measured.tokens_per_step == 16


@pytest.mark.slow
def test_prompts_are_measured_in_slots_that_have_been_used(monkeypatch):
    """The memory of a new slot comes from the system when it is first written, which takes longer than a short step."""
    runtime, tokenizer = load(bundled_checkpoint())
    step, readings, seen, timed = runtime.step, [], set(), []

    def clock():
        readings.append(len(readings))
        return float(len(readings))

    def spy(state, rows, all_logits=False):
        slots = {(id(state), row.slot) for row in rows}
        if len(readings) % 2 == 1 and rows[0].start == 0:  # between the two readings around a step
            timed.append(slots <= seen)
        seen.update(slots)
        kept.append(state)  # so that no other state gets its id
        return step(state, rows, all_logits)

    kept = []
    monkeypatch.setattr(runtime, "step", spy)
    names = dict(model="tiny", backend="cpu", machine="here", sampling=MEASURED.sampling)
    measured = measure(runtime, tokenizer, **names, most_rows=2, longest=600, clock=clock)
    first_uses = len(measured.prompts) + 1  # of each shape's slots, and of those for a long prompt
    assert timed.count(False) == first_uses and len(timed) == 4 * first_uses


@pytest.fixture
def steps_file(tmp_path):
    file = tmp_path / "steps.json"
    MEASURED.save(file)
    return file


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(format="x"), "is not a file of step times; granite4-neuron measure writes one"),
        (dict(version=9), "has version 9 of the format and this package reads 3"),
        (dict(decode=[]), "is damaged or incomplete (decode is [])"),
        (dict(prompts=[[1, 2]]), "is damaged or incomplete (prompts is [[1, 2]])"),
        (dict(restores=[[1, -1.0]]), "is damaged or incomplete (restores is [[1, -1.0]])"),
        (dict(dtype="float8"), "is damaged or incomplete (dtype is 'float8')"),
        (dict(sampling={}), "is damaged or incomplete (sampling is {})"),
        (dict(config={}), "steps.json"),
    ],
)
def test_a_damaged_file(steps_file, change, message):
    steps_file.write_text(json.dumps(json.loads(steps_file.read_text()) | change))
    with pytest.raises(UserError) as refusal:
        Measured.load(steps_file)
    assert message in str(refusal.value)


@pytest.mark.slow
def test_plan(steps_file, tmp_path, capsys):
    """A prompt of 101 takes 11 s, and each further token 1 s. With a request every 5 s one replica is not enough."""
    traffic = tmp_path / "traffic.jsonl"
    requests = [dict(arrival=5 * at, prompt_tokens=101, answer_tokens=2, conversation=at % 5) for at in range(20)]
    traffic.write_text("".join(json.dumps(each) + "\n" for each in requests))
    plot = tmp_path / "plot.svg"
    options = ["--steps", str(steps_file), "--prefix-cache", "0", "--replicas", "1", "4", "--price", "2"]
    status = cli.main(["plan", "--traffic", str(traffic), *options, "--first-token", "14", "--plot", str(plot)])
    answer, *table = capsys.readouterr().out.splitlines()
    assert status == 0 and answer.startswith("4 replicas are enough for 95 % of first tokens within 14 s: 11 s, at")
    assert "; a million new tokens cost" in answer and "predicted" not in answer
    assert "measured on here, texts with" in table[0]
    assert [line.split("│")[1:3] for line in table if line.startswith("│")][1:] == [
        [" 4        ", " spread        "],
        [" 4        ", " kept          "],
    ]
    assert "<svg" in plot.read_text()
    status = cli.main(["plan", "--traffic", str(traffic), *options, "--first-token", "5"])
    assert status == 1
    assert capsys.readouterr().out.startswith("4 replicas are not enough for 95 % of first tokens within 5 s: the best")


def test_plan_of_predicted_steps(capsys):
    rate = ["--rate", "2", "--prompt-length", "200", "--output-length", "uniform:5:20", "--num-requests", "30"]
    for backend in ("nxdi", "torch"):
        assert cli.main(["plan", *rate, "--model", "h-350m", "--backend", backend, "--batch-size", "12"]) == 0
        output = capsys.readouterr().out
        answer, *table = output.splitlines()
        assert answer.startswith("1 replica is enough") and "predicted, on no device; published times of" in answer
        rows = [line for line in table if line.startswith("│")]
        assert rows and all("predicted" in line for line in rows)
