"""benchmarks/one_text.py: what it counts, and that it counts nothing for this package."""

import re
import sys
import textwrap

import pytest
import torch
import transformers

from benchmarks import one_text, one_text_llama_cpp, products
from benchmarks.one_text_engines import Row
from granite4_neuron.ops import cpu

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
SMALL = ("--sequences", "2", "--prompt-length", "40", "--output-length", "6")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Take no time for products, and leave the number of threads as it was."""
    monkeypatch.setattr(products, "_SECONDS", 0)
    # Threads of two tests would wait for each other; test_one_text.py runs this package on several.
    monkeypatch.setattr(one_text, "WAYS", [way for way in one_text.WAYS if way.threads == 1])
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_differences():
    alone = [[Row(1, -1.0), Row(2, -2.0), Row(3, -3.0)], [Row(1, -1.0), Row(2, -2.0), Row(3, -3.0)]]
    served = [[Row(1, -1.0), Row(2, -2.5), Row(3, -3.0)], [Row(1, -1.0), Row(4, -2.25), Row(5, -9.0)]]
    assert one_text.differences(alone, alone) == one_text.Difference(0, 6, 0.0, 0)
    assert one_text.differences(alone, served) == one_text.Difference(2, 5, 0.5, 1)
    unknown = [[row._replace(logprob=None) for row in text[:2]] + list(text[2:]) for text in served]
    assert one_text.differences(alone, unknown) == one_text.Difference(0, 1, 0.0, 1)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 has no chunks of prompts")
def test_tables(capsys):
    assert one_text.main([*SMALL, "--numbers", "float32", "int8", "--compare", "transformers"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    ours = re.findall(r"this package │ (.+?) +│ (\d+) of (\d+) +│ (\S+) +│ (\d+) of 2 ", said)
    assert ours == [(way.name, "0", "12", "0", "0") for way in one_text.WAYS] * 2
    theirs = re.findall(r"transformers │ .+?│ (\d+) of \d+ ", said)
    assert len(theirs) == len(one_text.WAYS) - 1 and any(map(int, theirs)), "the sums of a batch are in another order"
    assert "transformers, with drafts: it refuses drafts" in said and "transformers: it has no int8 weights" in said
    assert said.count("MLP out") == 6


# Its numbers are those of its options: of the slots, the batch, the cache and drafts.
LLAMA_SERVER = """
    #!{python}
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if int(given["-np"]) == 2:
        sys.exit("error: no two slots")
    drafts = 3 * ("--spec-type" in given)
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({{}})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answers = [self.complete(prompt, asked) for prompt in asked["prompt"]]
            self.answer(answers if len(answers) > 1 else answers[0])

        def complete(self, prompt, asked):
            hit = max([len(one) for one in seen if asked["cache_prompt"] and one == prompt[: len(one)]], default=0)
            seen.append(prompt)
            logprob = -int(given["-np"]) - 0.25 * ("-ub" in given) - 0.5 * (hit > 0)
            rows = [dict(id=7, logprob=logprob, top_logprobs=[1]) for _ in range(asked["n_predict"])]
            rows[1:4] = [dict(row, top_logprobs=[]) if drafts else row for row in rows[1:4]]
            return dict(completion_probabilities=rows, timings=dict(cache_n=hit, draft_n=drafts))

        def answer(self, body):
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


def test_llama_cpp(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(one_text_llama_cpp, "gguf_of", lambda *_: tmp_path / "model.gguf")
    program = tmp_path / "llama-server"
    program.write_text(textwrap.dedent(LLAMA_SERVER).lstrip().format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setattr(one_text, "measure_products", lambda *_: ())
    assert one_text.main([*SMALL, "--compare", "llama.cpp", "--llama-cpp", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"llama.cpp    │ (.+?) +│ (\S+(?: of \d+)?) +│ (\S*) +│ (\S*)", said)
    assert rows == [
        ("2 at a time", "-", "", ""),
        ("8 at a time", "12 of 12", "7.0e+00", "0"),
        ("32 at a time", "12 of 12", "3.1e+01", "0"),
        ("prompt in chunks", "12 of 12", "2.5e-01", "0"),
        ("behind a prefix hit", "12 of 12", "5.0e-01", "0"),
        ("with drafts", "0 of 6", "0", "0"),
    ]
    assert "llama.cpp, 2 at a time: error: no two slots" in said


@pytest.mark.parametrize("options", [["--compare", "llama.cpp"], ["--llama-cpp", "."]], ids=" ".join)
def test_bad_input(options, capsys):
    assert one_text.main([*SMALL, *options]) == 2
    assert "--compare llama.cpp needs --llama-cpp, the folder of llama-server" in capsys.readouterr().err
