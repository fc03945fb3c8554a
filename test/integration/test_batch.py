"""Files of requests and prompts, answered by `granite4-neuron batch`."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from granite4_neuron import generate
from granite4_neuron.commands import batch as command
from granite4_neuron.commands.cli import main
from granite4_neuron.engine import Engine, PrefixCache
from granite4_neuron.serving.batch import lines as lines_module
from granite4_neuron.serving.batch.batch import _PREPARED, LOOK_AHEAD, Batch
from granite4_neuron.serving.batch.forms import Prompts
from granite4_neuron.serving.batch.lines import JSONLines, Line
from granite4_neuron.serving.batch.results import Results
from test.support.descriptors import descriptors
from test.support.serving import MODEL, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
FUNCTION = {**TOOL["function"], "type": "function"}
CHANCE = {
    "id",
    "call_id",
    "created",
    "timings",
    "created_at",
    "completed_at",
    "cached_tokens",
    "input_tokens",
    "cache_read_input_tokens",
}
SAID = [{"role": "user", "content": "What?"}]
LONG = "The same beginning, which is long enough for a snapshot. " * 3
BODIES = [
    (COMPLETIONS, dict(prompt="One", max_tokens=5)),
    (COMPLETIONS, dict(prompt=["One", "Another"], n=2, max_tokens=4, temperature=1.0, seed=3, logprobs=2, echo=True)),
    (CHAT, dict(messages=SAID, max_tokens=6, temperature=1.0, seed=9, n=2, model=MODEL)),
    (CHAT, dict(messages=SAID, max_tokens=60, tools=[TOOL], tool_choice="required")),
    (CHAT, dict(messages=SAID, max_tokens=30, response_format={"type": "json_object"})),
    ("/v1/responses", dict(input="What?", max_output_tokens=60, tools=[FUNCTION], tool_choice="required")),
    ("/v1/messages", dict(messages=SAID, max_tokens=5)),
    (COMPLETIONS, dict(prompt=[LONG + "One", "x"], max_tokens=4)),
    (COMPLETIONS, dict(prompt=LONG + "Another", n=2, max_tokens=4)),
    (CHAT, dict(messages=[], max_tokens=3)),
    (CHAT, dict(messages=SAID, model="another")),
    (COMPLETIONS, dict(prompt="x" * 700)),
    (COMPLETIONS, dict(prompt="x", top_k="many")),
]


@pytest.fixture(scope="module")
def model(texting):
    """Return a function that makes a batch of the small model, with its prefix cache."""
    runtime, tokenizer = texting

    def make(_=None, prompts=Prompts(dict(max_tokens=4, temperature=1.0, ignore_eos=True))):  # noqa: B008
        cache = PrefixCache(runtime, 2**26, runtime.tokens_per_step, at_branches=True)
        engine = Engine(runtime, 4, max_length=512, tokenizer=tokenizer, prefix_cache=cache)
        batch = Batch(engine, tokenizer, has_prefix_cache=True, model=MODEL, prompts=prompts, seed=5)
        batch.cache = cache
        return batch

    return make


@pytest.fixture
def run(model, monkeypatch):
    """Return a function that runs the command with that model."""
    monkeypatch.setattr(command, "new_batch", model)
    return lambda *arguments: main(["batch", *map(str, arguments)])


def request(number, url, body):
    return {"custom_id": f"line {number}", "method": "POST", "url": url, "body": body}


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def results_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def without_chance(answer):
    """Return an answer without the fields that differ between runs."""
    if isinstance(answer, dict):
        return {name: without_chance(value) for name, value in answer.items() if name not in CHANCE}
    return list(map(without_chance, answer)) if isinstance(answer, list) else answer


def test_answers_are_those_of_the_server(texting, run, tmp_path):
    import httpx

    given = write_lines(tmp_path / "in.jsonl", [request(number, *each) for number, each in enumerate(BODIES)])
    assert run(given, tmp_path / "out.jsonl") == 0
    results = results_of(tmp_path / "out.jsonl")
    with serving(*texting) as server, httpx.Client(base_url=server.address) as client:
        for number, ((url, body), result) in enumerate(zip(BODIES, results, strict=True)):
            expected = client.post(url, json=body, timeout=60)
            assert result["custom_id"] == f"line {number}" and result["error"] is None
            assert result["response"]["status_code"] == expected.status_code, expected.text
            assert without_chance(result["response"]["body"]) == without_chance(expected.json())
    assert [result["response"]["status_code"] for result in results] == [200] * 9 + [400, 404, 400, 400]


def test_an_error_is_the_result_of_its_line(run, tmp_path):
    right = request(0, *BODIES[0])
    lines = [
        (json.dumps(right), None),
        ("nonsense", "the line is not JSON"),
        ("[1]", "the line is not an object"),
        ('{"a": "\\ud800"}', "the line is not JSON"),
        ("{}", "must have a custom_id"),
        (json.dumps({**right, "custom_id": 3}), "must have a custom_id"),
        (json.dumps({**right, "url": "/v1/embeddings"}), "url: it must be one of /v1/completions"),
        (json.dumps({**right, "method": "GET"}), "method: it must be POST"),
        (json.dumps({**right, "body": "x"}), "must have a body, which is an object"),
        (json.dumps(request(0, COMPLETIONS, dict(prompt="a", stream=True))), "stream: a batch has no streams"),
        (json.dumps(right), None),
    ]
    given = tmp_path / "in.jsonl"
    given.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(line for line, _ in lines).encode())  # and no end of the last one
    assert run(given, tmp_path / "out.jsonl") == 0
    for (_, message), result in zip(lines, results_of(tmp_path / "out.jsonl"), strict=True):
        response = result["response"]
        assert response["status_code"] == (200 if message is None else 400)
        assert message is None or message in response["body"]["error"]["message"]


def test_each_prompt_has_the_seed_of_its_place(texting, run, tmp_path):
    """Each prompt's seed depends on its place in the file. Other columns are kept."""
    rows = [{"prompt": "One", "number": 1}, {"prompt": "Another"}, {"prompt": ""}, {"prompt": 7}, {"prompt": "One"}]
    given = write_lines(tmp_path / "in.jsonl", rows)
    given.write_bytes(given.read_bytes() + b'{"prompt": "", "x": [1e400, 1e40]}\n')
    assert run(given, tmp_path / "out.jsonl") == 0
    *results, strange = results_of(tmp_path / "out.jsonl")
    assert strange["x"] == [None, 1e40]  # not Infinity, which is not JSON
    places = [line.place for line in JSONLines(given).read(0)]
    for row, place, result in zip(rows, places[:-1], results, strict=True):
        assert {**result, **row} == result
        if result["error"] is None:
            options = dict(max_tokens=4, ignore_eos=True, temperature=1.0, seed=5 + place)
            assert result["generated_text"] == generate(*texting, row["prompt"], **options)
    assert [result["finish_reason"] for result in results] == ["length", "length", "error", "error", "length"]
    assert "prompt: it must be a string" in results[3]["error"] and results[0] != results[4]


@pytest.mark.slow
def test_a_run_that_is_cut_anywhere_goes_on(run, tmp_path, capsys):
    """No line is lost or repeated: the bytes are those of an uninterrupted run. Options that change no result may be
    others, and what changes results may not.
    """
    requests = [request(number, *each) for number, each in enumerate(BODIES)]
    sampled = dict(temperature=1.0, stream=False)  # without a seed
    requests += [
        request("sampled", "/v1/responses", dict(input="What?", max_output_tokens=30, **sampled)),
        request("sampled too", "/v1/messages", dict(messages=SAID, max_tokens=30, **sampled)),
    ]
    given = write_lines(tmp_path / "in.jsonl", [{"prompt": "Number"}, *requests])
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run(given, whole) == 0
    expected = whole.read_bytes()
    shutil.copy(tmp_path / "whole.jsonl.record", tmp_path / "cut.jsonl.record")
    ends = [number + 1 for number, byte in enumerate(expected) if byte == 10]
    torn = [b"\0" * 3, b'{"prompt\0\0\0"}\n{"prompt": "y"}\n']  # as after a power failure
    for size in [0, 1, ends[0] - 1, *ends[:2], *random.Random(1).sample(range(len(expected)), 12), len(expected) - 1]:
        cut.write_bytes(expected[:size])
        assert run(given, cut) == 0
        assert cut.read_bytes() == expected, size
    for size, end in ((ends[4], torn[0]), (ends[4], torn[1]), (0, torn[0]), (ends[-2], b"\0" * 9999)):
        cut.write_bytes(expected[:size] + end)
        assert run(given, cut) == 0
        assert cut.read_bytes() == expected
    cut.write_bytes(expected[: ends[4]])
    capsys.readouterr()
    assert run(given, cut, "--max-tokens", 5) == 2
    assert "was written with --max-tokens 256, which is 5 now" in capsys.readouterr().err
    others = ["--cache-weights", tmp_path / "weights", "--threads", 1, "--max-num-seqs", 2, "--prefix-cache", 0]
    assert run(given, cut, *others) == 0
    assert cut.read_bytes() == expected
    capsys.readouterr()
    assert run(given, whole) == 0 and f"has all {len(requests) + 1} results already" in capsys.readouterr().err
    assert whole.read_bytes() == expected


@pytest.mark.slow
def test_lines_are_read_a_limited_way_ahead(model):
    """Shared prefixes are computed once, although their prompts alternate."""
    read = 0
    systems = [f"System message number {number} " * 4 for number in range(7)]

    def lines():
        nonlocal read
        while True:
            yield Line(read, json.dumps({"prompt": systems[read % 7] + str(read)}).encode())
            read += 1

    batch = model(prompts=Prompts(dict(max_tokens=1)))
    results = batch.results(lines())
    for number in range(150):
        assert next(results).place == number
        assert read - number <= LOOK_AHEAD + _PREPARED
    results.close()
    assert batch.cache.stats.hit_tokens / batch.cache.stats.queries > 80
    batch.close()


def test_only_grammars_of_running_texts_have_processes(run, tmp_path):
    """A process takes a descriptor, and there are fewer than lines."""
    bodies = [
        dict(prompt="One", max_tokens=9, n=1 + number % 2, structured_outputs={"grammar": f'root ::= "<{number}>"'})
        for number in range(100)
    ]
    given = write_lines(tmp_path / "in.jsonl", [request(0, COMPLETIONS, body) for body in bodies])
    with descriptors(30):
        assert run(given, tmp_path / "out.jsonl") == 0
    for number, result in enumerate(results_of(tmp_path / "out.jsonl")):
        texts = [choice["text"] for choice in result["response"]["body"]["choices"]]
        assert texts == [f"<{number}>"] * (1 + number % 2)


def test_parts_have_each_line_once(tmp_path, monkeypatch):
    """Also where some lines are too long to be read."""
    monkeypatch.setattr(lines_module, "MOST_BYTES", 20)
    given = write_lines(tmp_path / "in.jsonl", [{"prompt": "x" * (number % 30)} for number in range(200)])
    lines = JSONLines(given)
    expected = list(lines.read(0))
    assert [line.content for line in expected] == [
        line if len(line) <= 20 else None for line in given.read_bytes().splitlines(keepends=True)
    ]
    for size in (1, 7, 20, 1000):
        starts = range(0, lines.size, size)
        assert [line for start in starts for line in lines.read(start, start + size)] == expected
    assert len({line.digest() for line in expected}) == 200


@pytest.mark.slow
def test_parquet_files_are_answered(run, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    from granite4_neuron.serving.batch.lines import ParquetRows

    rows = {
        "prompt": [f"Number {number}" for number in range(150)],
        "bytes": [b"\xff"] * 150,
        "ratio": [float("nan")] * 150,
    }
    parquet.write_table(pyarrow.table(rows), tmp_path / "in.parquet", row_group_size=70)
    lines = ParquetRows(tmp_path / "in.parquet")
    expected = [line.content["prompt"] for line in lines.read(0)]
    assert expected == rows["prompt"] and lines.size == 150
    assert [line.content["prompt"] for start in range(0, 150, 40) for line in lines.read(start, start + 40)] == expected
    assert run(tmp_path / "in.parquet", tmp_path / "out.jsonl") == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    results = results_of(tmp_path / "out.jsonl")
    assert [result["prompt"] for result in results] == expected and results[0]["ratio"] is None
    (tmp_path / "out.jsonl").write_bytes(whole[: len(whole) // 2])
    assert run(tmp_path / "in.parquet", tmp_path / "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    stored, chance = (tmp_path / "in.parquet").read_bytes(), random.Random(0)
    for number in range(40):
        damaged = tmp_path / "damaged.parquet"
        place = chance.randrange(len(stored))
        damaged.write_bytes(stored[:place] + bytes(range(20)) + stored[place + 20 :])
        output, status = tmp_path / f"{number}.jsonl", run(damaged, tmp_path / f"{number}.jsonl")
        said = capsys.readouterr().err
        if status:
            assert f"{damaged} is not a Parquet file, or is damaged (" in said
        else:
            assert len(results_of(output)) == 150


def test_the_command_reports_lines_and_errors(run, tmp_path, capsys, monkeypatch):
    closed = []
    monkeypatch.setattr(Batch, "close", lambda batch: closed.append(batch))
    given, empty = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), write_lines(tmp_path / "empty.jsonl", [])
    assert run(given, tmp_path / "out.jsonl") == 0 and len(closed) == 1
    assert "Lines: 1. Errors: 0. New tokens: 4, " in capsys.readouterr().out
    assert run(empty, tmp_path / "none.jsonl") == 0 and not list(tmp_path.glob("none.jsonl*"))
    assert "empty.jsonl is empty" in capsys.readouterr().err


def test_an_inputs_own_columns_are_kept(run, tmp_path):
    """Also where they have the names of a result's, as in the output of another batch."""
    before = {"error": None, "generated_text": "first", "input_error": 3, "input_input_error": 4}
    rows = [{"prompt": "One", **before}, {"prompt": "Two", "n": 1}]
    given = write_lines(tmp_path / "in.jsonl", rows)
    assert run(given, tmp_path / "out.jsonl") == 0
    first, second = results_of(tmp_path / "out.jsonl")
    assert first.keys() - rows[0].keys() == {"finish_reason", "input_generated_text", "input_input_input_error"}
    assert first["input_generated_text"] == "first" and first["error"] is first["input_input_input_error"] is None
    assert first["generated_text"] != "first" and (first["input_error"], first["input_input_error"]) == (3, 4)
    assert second.keys() == {"prompt", "n", "generated_text", "finish_reason", "error"}


def test_files_that_cannot_be_an_output_are_refused(run, tmp_path, capsys):
    given = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for special in (tmp_path / "pipe", "/dev/full", "/dev/null", "/dev/zero", tmp_path / "folder"):
        assert run(given, special) == 2
        assert f"{special} is not a regular file" in capsys.readouterr().err
        assert run(special, tmp_path / "out.jsonl") == 2
        assert f"{special} is not a file" in capsys.readouterr().err
    for content in (b"\0\0\0\x18ftypmp42 mine", b'{"a": 1', b'{"a": 1}\n', given.read_bytes()):
        for name in ("out", "out.record"):
            mine = tmp_path / name
            mine.write_bytes(content)
            assert run(given, tmp_path / "out") == 2 and "is there already" in capsys.readouterr().err
            assert mine.read_bytes() == content
            mine.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.jsonl", "pipe"]


@pytest.mark.parametrize("which", ["out.jsonl", "out.jsonl.record"])
def test_a_full_disk_is_named_and_the_run_goes_on(run, tmp_path, capsys, monkeypatch, which):
    given = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    assert run(given, tmp_path / "whole.jsonl") == 0
    write = os.write

    def write_to_a_full_disk(file, content):
        if len(content) > 30 and os.path.basename(os.readlink(f"/proc/self/fd/{file}")) == which:
            if len(content) < 100:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(file, content[:20])
        return write(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_to_a_full_disk)
        assert run(given, tmp_path / "out.jsonl") == 2
    assert f"{tmp_path / which}: No space left on device." in capsys.readouterr().err
    assert run(given, tmp_path / "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_only_one_process_writes_a_file(run, tmp_path, capsys):
    given = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with Results(tmp_path / "out.jsonl", JSONLines(given), {}):
        assert run(given, tmp_path / "out.jsonl") == 2
    assert "another process is writing" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_twenty_kills_lose_no_line(tmp_path, texting_folder):
    given = write_lines(tmp_path / "in.jsonl", [request(number, *BODIES[number % 7]) for number in range(4000)])
    output, moments = tmp_path / "out.jsonl", random.Random(3)
    arguments = ["--model", texting_folder, "--served-model-name", MODEL, "--threads", "1"]
    start = [sys.executable, "-m", "granite4_neuron", "batch", given, output, *arguments]
    kills = 0
    for _ in range(200):
        process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = output.stat().st_size if output.exists() else 0
        while process.poll() is None and kills < 20:
            if output.exists() and output.stat().st_size > before:  # it has begun to write
                time.sleep(moments.random() * 0.2)
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
        if process.wait() == 0:
            break
    assert kills == 20
    results = results_of(output)
    assert [result["custom_id"] for result in results] == [f"line {number}" for number in range(4000)]
    whole = tmp_path / "whole.jsonl"
    assert subprocess.run([*start[:4], given, whole, *arguments], env=os.environ).returncode == 0
    assert whole.read_bytes() == output.read_bytes()
