"""benchmarks/one_text counts differences right, and finds none for this package."""

import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from benchmarks.one_text import command as one_text
from benchmarks.one_text import llama_cpp as one_text_llama_cpp
from benchmarks.one_text import products
from benchmarks.one_text.engines import Row
from granite4_neuron.devices.cpu import operators as cpu
from test.support.llama_server import write_llama_server

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
SMALL = ("--sequences", "2", "--prompt-length", "40", "--output-length", "6")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure products for no time, and restore the number of threads."""
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
    for name in ("this package", "… sampled"):
        ours = re.findall(rf"{name} +│ (.+?) +│ (\d+) of (\d+) +│ (\S+) +│ (\d+) of 2 ", said)
        assert ours == [(way.name, "0", "12", "0", "0") for way in one_text.WAYS] * 2
    theirs = re.findall(r"transformers │ .+?│ (\d+) of \d+ ", said)
    assert len(theirs) == len(one_text.WAYS) - 1 and any(map(int, theirs)), "the sums of a batch are in another order"
    assert "transformers, with drafts: it refuses drafts" in said and "transformers: it has no int8 weights" in said
    assert said.count("MLP out") == 6


@pytest.mark.slow
def test_llama_cpp(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(one_text_llama_cpp, "gguf_of", lambda *_: tmp_path / "model.gguf")
    write_llama_server(tmp_path)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare", "llama.cpp"], "--compare llama.cpp needs --llama-cpp, the folder of llama-server"),
        (["--llama-cpp", "."], "--compare llama.cpp needs --llama-cpp, the folder of llama-server"),
        (["--compare", "openvino"], "--compare openvino needs --openvino, the folder of the exported model"),
        (["--openvino", "."], "--compare openvino needs --openvino, the folder of the exported model"),
    ],
    ids=str,
)
def test_bad_input_is_refused(options, message, capsys):
    assert one_text.main([*SMALL, *options]) == 2
    assert message in capsys.readouterr().err


class FakePipeline:
    """A stand-in for OpenVINO's engine. Log-probabilities depend on its options, and its cache has all prompts."""

    def __init__(self, folder, scheduler, device, properties):
        self.scheduler, self.threads, self.seen = scheduler, properties["INFERENCE_NUM_THREADS"], []
        self.left = {}

    def add_request(self, number, prompt, config):
        [tokens] = prompt
        hit = max([len(one) for one in self.seen if one == tokens[: len(one)]], default=0)
        self.seen.append(tokens)
        chunk = self.scheduler.max_num_batched_tokens if self.scheduler.dynamic_split_fuse else len(tokens)
        self.left[number] = -(-(len(tokens) - hit) // chunk) + config.max_new_tokens - 1
        logprob = -self.scheduler.max_num_seqs - 0.25 * (hit > 0) - 0.5 * (self.scheduler.max_num_batched_tokens == 14)
        output = SimpleNamespace(
            generated_ids=[7] * config.max_new_tokens,
            generated_log_probs=[logprob] * (config.max_new_tokens * config.logprobs),
        )
        return SimpleNamespace(read_all=lambda: [output])

    def has_non_finished_requests(self):
        return any(self.left.values())

    def step(self):
        if self.scheduler.max_num_seqs == 8:
            raise RuntimeError("Exception from src/x.cpp\nno eight sequences\n")
        self.left = {number: max(0, steps - 1) for number, steps in self.left.items()}


@pytest.fixture
def fake_openvino(monkeypatch, tmp_path):
    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace, GenerationConfig=SimpleNamespace, ContinuousBatchingPipeline=FakePipeline
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array.tolist()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "openvino_model.xml").touch()
    return tmp_path


def test_openvino(fake_openvino, capsys, monkeypatch):
    monkeypatch.setattr(one_text, "measure_products", lambda *_: ())
    assert one_text.main([*SMALL, "--compare", "openvino", "--openvino", str(fake_openvino)]) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"openvino     │ (.+?) +│ (\S+(?: of \d+)?) +│ (\S*) +│ (\S*)", said)
    assert rows == [
        ("2 at a time", "12 of 12", "1.0e+00", "0"),
        ("8 at a time", "-", "", ""),
        ("32 at a time", "12 of 12", "3.1e+01", "0"),
        ("prompt in chunks", "12 of 12", "5.0e-01", "0"),
        ("behind a prefix hit", "12 of 12", "2.5e-01", "0"),
        ("with drafts", "-", "", ""),
    ]
    assert "openvino, 8 at a time: no eight sequences" in said and "openvino, with drafts: it has no drafts" in said


def test_openvino_without_a_hit(fake_openvino, capsys, monkeypatch):
    """A miss shows as one more step, because the prompt's last token does not fit into the first."""
    monkeypatch.setattr(one_text, "measure_products", lambda *_: ())
    monkeypatch.setattr(FakePipeline, "seen", property(lambda self: [], lambda self, value: None), raising=False)
    assert one_text.main([*SMALL, "--compare", "openvino", "--openvino", str(fake_openvino)]) == 0
    assert "openvino, behind a prefix hit: there was no hit" in capsys.readouterr().out
