"""benchmarks/serving against a server of ours, and its results for known times."""

import json
import math
import os
import random
import re

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from benchmarks.serving import command as benchmark
from benchmarks.serving import processor_time
from benchmarks.serving.load import Answer, Lengths, Run, moments, questions
from granite4_neuron import UserError, load
from granite4_neuron.engine import Engine
from granite4_neuron.planning.simulation.traffic import read_traffic
from test.support.serving import serving


@pytest.fixture(scope="module")
def server():
    with serving(*load(), num_sequences=2, max_queue=2) as server:
        yield server


def measure(server, tmp_path, *options):
    """Run the benchmark and return its exit status and its numbers."""
    file = tmp_path / "numbers.json"
    arguments = [f"a={server.address}/v1", f"b={server.address}/v1/", "--json", str(file), *options]
    return benchmark.main(arguments), json.loads(file.read_text())


def test_two_servers_in_turns(server, tmp_path, capsys):
    options = "--prompt-length uniform:8:40 --output-length normal:12:3 --num-requests 5 --repeats 2 --concurrency 2"
    limits = ["--goodput", "first-token:100000", "per-token:100000"]
    status, (a, b) = measure(server, tmp_path, *options.split(), *limits)
    assert status == 0 and (a["server"], b["server"]) == ("a", "b")
    assert a["requests"] == 10 and a["errors"] == 0
    assert (a["prompt_tokens"], a["output_tokens"]) == (b["prompt_tokens"], b["output_tokens"])
    assert b["cached_tokens"] > a["cached_tokens"], "it got the same questions, after the other"
    for name in ("first_token_ms", "per_token_ms", "between_tokens_ms"):
        assert 0 < a[name][1] <= a[name][2] <= a[name][3]
    assert a["requests_per_second"] == a["goodput_requests_per_second"] > 0
    assert "time to first token, p90, ms" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processor cores are needed")
def test_processor_time_beyond_the_engine(capsys):
    cores = os.sched_getaffinity(0)
    assert processor_time.main(["--clients", "1", "3", "--tokens", "50", "--turns", "1"]) == 0
    assert os.sched_getaffinity(0) == cores
    rows = re.findall(r"^│ (\d+) +│ (.*) │$", capsys.readouterr().out, re.MULTILINE)
    assert [clients for clients, _ in rows] == ["1", "3"]
    for _, row in rows:
        alone, engine, front_end, beyond, rate = map(float, row.split("│"))
        assert beyond == pytest.approx(engine + front_end - alone, abs=0.2)
        # Two processes on two cores, and an engine that steps for all clients at a time.
        assert min(alone, engine, front_end, rate) > 0 and engine + front_end < 2 * 1e6 / rate


@pytest.mark.slow
def test_plot(server, tmp_path):
    pytest.importorskip("matplotlib", reason="granite4-neuron[plot] is not installed")
    plot = tmp_path / "plot.png"
    options = "--prompt-length 8 --output-length 2 --num-requests 2 --warmup 0"
    assert measure(server, tmp_path, *options.split(), "--plot", str(plot))[0] == 0
    assert plot.stat().st_size > 1000


def test_a_shared_prefix_and_moments(server, tmp_path):
    options = "--prompt-length 50 --shared-prefix 40 --output-length 2 --num-requests 4 --request-rate 50 --warmup 2"
    traffic = tmp_path / "traffic.jsonl"
    status, (a, _) = measure(server, tmp_path, *options.split(), "--goodput", "total:0", "--traffic", str(traffic))
    assert status == 0 and a["cached_tokens"] >= 4 * 40 and a["goodput_requests_per_second"] == 0
    arrivals = read_traffic(traffic)
    assert [(each.prompt, each.answer, each.parts[0].length) for each in arrivals] == [(50, 2, 40)] * 4
    assert [each.time for each in arrivals] == list(moments(4, 50, 2))


def test_refused_requests_are_counted(server, tmp_path, capsys):
    options = ["--prompt-length", "20", "--output-length", "100", "--num-requests", "9", "--warmup", "0"]
    status, (a, _) = measure(server, tmp_path, *options)
    assert status == 1 and a["errors"] >= 4
    assert "status 429" in capsys.readouterr().err


def test_sampling_options_reach_the_server(server, tmp_path, monkeypatch):
    requests, add = [], Engine.add
    monkeypatch.setattr(Engine, "add", lambda engine, request: (requests.append(request), add(engine, request))[1])
    options = (
        "--num-requests 1 --warmup 0 --prompt-length 4 --output-length 3 --temperature 0.7 --top-p 0.95 --top-k 50"
    )
    assert measure(server, tmp_path, *options.split())[0] == 0
    assert {(each.temperature, each.top_p, each.top_k) for each in requests} == {(0.7, 0.95, 50)}


def test_statistics_of_known_times():
    answers = [
        Answer(started=float(start), chunk_times=[start + 0.5, start + 0.6, start + 0.9], tokens=4, prompt_tokens=10)
        for start in range(9)
    ]
    slow = Answer(started=0.0, chunk_times=[2.0], tokens=1, prompt_tokens=10)
    runs = [Run([*answers, slow], 10.0), Run([*answers, Answer(0.0, error="status 500")], 5.0), Run(answers, 2.0)]
    result = benchmark._result("x", runs, {"first_token_ms": 600.0, "per_token_ms": 200.0})
    assert (result.requests, result.errors, result.output_tokens) == (29, 1, 27 * 4 + 1)
    assert result.first_token_ms == pytest.approx([500 + 1500 / 28, 500, 500, 2000])
    assert result.per_token_ms == pytest.approx([400 / 3] * 4)
    assert result.between_tokens_ms == pytest.approx([200, 100, 300, 300])
    assert result.output_tokens_per_second == pytest.approx(36 / 5)
    assert result.requests_per_second == pytest.approx(9 / 5)
    assert result.goodput_requests_per_second == pytest.approx(9 / 5)
    assert math.isnan(benchmark._statistics([])[0])


def test_lengths():
    chance = random.Random(0)
    assert {Lengths.parse("7").draw(chance) for _ in range(9)} == {7}
    assert {Lengths.parse("uniform:3:5").draw(chance) for _ in range(99)} == {3, 4, 5}
    drawn = [Lengths.parse("normal:100:10").draw(chance) for _ in range(999)]
    assert abs(sum(drawn) / 999 - 100) < 2 and min(drawn) > 50
    for text in ("", "0", "-3", "uniform:5", "uniform:5:3", "zipf:1:2", "normal:a:b"):
        with pytest.raises(UserError, match="is no length"):
            Lengths.parse(text)
    [question] = questions(1, Lengths.parse("5"), Lengths.parse("2"), [1, 2], 9, chance)
    assert question.prompt[:2] == [1, 2] and len(question.prompt) == 5 and max(question.prompt) < 9


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["http://127.0.0.1:9/v1"], "no OpenAI-compatible server answers at http://127.0.0.1:9/v1"),
        (["nonsense"], "no OpenAI-compatible server answers at nonsense"),
        (["http://a/v1", "http://a/v1"], "two servers have the same name"),
        (["http://a/v1", "--prompt-length", "long"], "'long' is no length"),
        (["http://a/v1", "--goodput", "speed:3"], "'speed:3' is no limit"),
        (["http://a/v1", "--json", "/no/such/folder/x"], "there is no such folder"),
        (["http://a/v1", "--plot", "/no/such/folder/x.png"], "there is no such folder"),
        (["http://a/v1", "--plot", "x.docx"], "x.docx cannot be drawn; the name must end in one of"),
    ],
    ids=str,
)
def test_bad_input_is_refused(capsys, arguments, message):
    if "x.docx" in arguments:
        pytest.importorskip("matplotlib")
    assert benchmark.main(arguments) == 2
    assert message in capsys.readouterr().err
