"""benchmark_latency.py as users run it; no test depends on what it measures."""

import argparse
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import transformers

import benchmark_latency
from benchmarks.bound import Rates, decode_bytes, prefill_flops
from benchmarks.implementations import Point
from benchmarks.latency import least_seconds, result_of
from benchmarks.latency_report import machine_rates
from granite4_neuron.checkpoint_folder import bundled_checkpoint
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.random_weights import random_model
from granite4_neuron.state import HybridState
from test.support.checkpoints import small_config

SMALL = ("--prompt-length", "9", "20", "--output-length", "4", "--repeats", "2", "--warmup", "0", "--threads", "1")


def run(*arguments):
    command = [sys.executable, benchmark_latency.__file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="--compare needs transformers 5")
def test_table_json_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    files = ("--json", tmp_path / "numbers.json", "--plot", tmp_path / "plot.png")
    done = run(*SMALL, "--batch-size", "1", "2", "--compare", "transformers", *files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ratio") == 4 and "prefill tok/s" in done.stdout
    assert done.stdout.count("grows as prompt length ^") == 4
    record = json.loads((tmp_path / "numbers.json").read_text())
    points = [(r["implementation"], r["batch_size"], r["prompt_length"]) for r in record["results"]]
    assert points == [
        (name, batch, length) for batch in (1, 2) for length in (9, 20) for name in ("granite4-neuron", "transformers")
    ]
    assert done.stdout.count("GFLOP/s") == 4
    assert all(value > 0 for result in record["results"] for value in list(result.values())[1:])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_quantized_weights(tmp_path):
    done = run(*SMALL, "--quantize", "int8", "--json", tmp_path / "numbers.json")
    assert done.returncode == 0 and "int8 weights" in done.stdout, done.stderr
    assert json.loads((tmp_path / "numbers.json").read_text())["quantize"] == "int8"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("--speculate", "ngram:3"), "of 4 tokens"),
        (("--draft-model", bundled_checkpoint(), "--draft-tokens", "2"), "100%"),
        (("--kept-prompt",), "from the file"),
    ],
    ids=["n-gram", "draft model", "kept prompt"],
)
def test_reuse(arguments, expected):
    done = run(*SMALL, *arguments)
    assert done.returncode == 0 and expected in done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--speculate", "eagle"), "must be ngram or ngram:K"),
        (("--speculate", "ngram", "--kept-prompt"), "give one of --speculate and --kept-prompt at a time"),
        (("--kept-prompt", "--json", "numbers.json"), "leave out --json"),
        (("--prompt-length", "131072"), "this model takes at most 131072"),
        (("--batch-size", "0"), "--batch-size must be at least 1"),
        (("--model", "/no/such/folder"), "is not a folder"),
        (("--model", "x", "--random-weights", "h-350m"), "not both"),
        (("--random-weights", "h-9b"), "no family member"),
        (("--json", "/no/such/folder/x.json"), "cannot be written"),
        (("--backend", "nxdi", "--compiled", "x", "--quantize", "int8"), "--quantize belongs to the cpu backend"),
        (("--tuned-configs", "/no/such/folder"), "not a folder"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert benchmark_latency.main([str(argument) for argument in arguments]) == 2
    output, error = capsys.readouterr()
    assert output == "" and message in error


def test_a_broken_checkpoint_is_reported_by_the_process_that_reads_it(tmp_path, texting_folder):
    (tmp_path / "config.json").write_text((texting_folder / "config.json").read_text())
    done = run("--model", tmp_path, *SMALL)
    assert done.returncode == 2 and "has no model.safetensors" in done.stderr and "Traceback" not in done.stderr


class TestResult:
    """Times that are known beforehand: prompts are done after 0.5 and 0.7 s, further tokens come after 10 to 40 ms."""

    RUNS = ([0.5, 0.51, 0.53, 0.54], [0.7, 0.72, 0.74, 0.78])
    POINT = Point(batch_size=3, prompt_length=100, output_length=4)

    @pytest.fixture
    def result(self):
        rates = Rates(flops=200e9, bytes=40e9)
        return result_of("ours", self.POINT, list(self.RUNS), 3 * 2**20, (0.3, 0.005), rates)

    def test_times(self, result):
        assert result.first_token_ms == pytest.approx(600)
        assert result.token_ms_p50 == pytest.approx(20)
        assert result.token_ms_p99 == pytest.approx(40)

    def test_rates(self, result):
        """All rows of the batch count, and each once."""
        assert result.prefill_tokens_per_second == pytest.approx(3 * 100 / 0.6)
        assert result.decode_tokens_per_second == pytest.approx(3 / 0.02)

    def test_shares_of_the_bound(self, result):
        assert result.prefill_of_bound == pytest.approx(0.3 / 0.6)
        assert result.decode_of_bound == pytest.approx(0.005 / 0.02)
        assert (result.machine_gflops, result.machine_gbytes_per_second) == (200, 40)
        assert result.peak_memory_mib == 3

    def test_the_machine_is_printed(self, result):
        (line,) = machine_rates([result])
        assert line == "machine, at batch 3 and prompt 100: 200 GFLOP/s, 40.0 GB/s"

    def test_the_bound(self, texting_folder):
        """The weights' arithmetic at the machine's FLOP/s, weights and state at its bytes per second."""
        config = GraniteMoeHybridConfig.from_file(texting_folder / "config.json")
        options = argparse.Namespace(dtype=None, quantize=None, state_dtype=None)
        rates = Rates(flops=2e9, bytes=3e9)
        prefill, decode = least_seconds(texting_folder, self.POINT, options, rates)
        assert prefill == pytest.approx(3 * prefill_flops(config, 100) / 2e9)
        assert decode == pytest.approx(decode_bytes(config, torch.float32, 3, 102) / 3e9)


class TestBound:
    """Counted by hand for small models."""

    def test_flops_and_bytes(self):
        config = small_config(num_local_experts=0, tie_word_embeddings=True)
        model = random_model(config)
        matrices = sum(
            parameter.numel()
            for name, parameter in model.model.layers.named_parameters()
            if name.endswith(("proj.weight", "linear.weight"))
        )
        head = model.lm_head.weight.numel()
        assert prefill_flops(config, 10) == 2 * (10 * matrices + head)
        state = HybridState.allocate(config, 1, 7, torch.bfloat16)
        of_one_slot = sum(tensor.nbytes // 2 for tensor in state.tensors())
        assert decode_bytes(config, torch.bfloat16, 3, 7) == 2 * (matrices + head) + 3 * of_one_slot
        assert decode_bytes(config, torch.bfloat16, 3, 7, is_quantized=True) == matrices + head + 3 * of_one_slot

    def test_experts_that_are_chosen(self):
        config = small_config(num_local_experts=4, num_experts_per_tok=1)
        without = dataclasses.replace(config, num_local_experts=0)
        router = len(config.layer_types) * 4 * config.hidden_size
        experts = sum(
            parameter.numel()
            for name, parameter in random_model(config).named_parameters()
            if "block_sparse_moe" in name and "router" not in name
        )
        assert prefill_flops(config, 1) - prefill_flops(without, 1) == 2 * (router + experts / 4)
        for batch_size, share in ((1, 1 / 4), (2, 7 / 16), (100, 1)):
            more = decode_bytes(config, torch.float32, batch_size, 5) - decode_bytes(
                without, torch.float32, batch_size, 5
            )
            assert more == pytest.approx(4 * (router + experts * share))
