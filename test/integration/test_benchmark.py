"""benchmark_latency.py as it is run; what it measures is not looked at."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.bound import decode_bytes, prefill_flops
from granite4_neuron import load
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.ops import LaunchParameters, cpu
from granite4_neuron.ops.launch_parameters import LaunchTable, device_name, read_table, table_name, write_table
from granite4_neuron.random_weights import random_model
from granite4_neuron.state import HybridState
from test.support.checkpoints import small_config

SCRIPT = Path(__file__).parents[2] / "benchmark_latency.py"
SMALL = ("--prompt-length", "9", "20", "--output-length", "4", "--repeats", "2", "--warmup", "0", "--threads", "1")


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
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
        (("--tune", "/no/such/folder/x"), "cannot be written"),
        (("--tune", str(SCRIPT)), "is no folder"),
        (("--tune", "x", "--random-weights", "granite-4.0-350m"), "no Mamba layers"),
        (("--tune", "x", "--cpu-kernels", "torch"), "leave out --cpu-kernels torch"),
        (("--tune", "x", "--json", "y"), "leave out --json"),
        (("--tune", "x", "--tuned-configs", "y"), "leave out --tuned-configs"),
        (("--tuned-configs", "/no/such/folder"), "no folder"),
    ],
)
def test_bad_input(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_broken_checkpoint_is_reported_by_the_process_that_reads_it(tmp_path, texting_folder):
    (tmp_path / "config.json").write_text((texting_folder / "config.json").read_text())
    done = run("--model", tmp_path, *SMALL)
    assert done.returncode == 2 and "has no model.safetensors" in done.stderr and "Traceback" not in done.stderr


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


@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
class TestTune:
    """With the bundled model, which has 8 heads."""

    FILE = table_name(32, 32, torch.float32, device_name())

    def test_a_later_run_uses_what_an_earlier_one_wrote(self, tmp_path):
        folder = tmp_path / "new"
        done = run("--tune", folder, "--batch-size", "1", "3", "--threads", "1")
        assert done.returncode == 0, done.stderr
        for part in ("heads_per_task", "chunk_size", "torch_chunk_size", "default", "chosen", "ratio"):
            assert part in done.stdout
        assert f"wrote {folder / self.FILE}" in done.stderr
        assert [file.name for file in folder.iterdir()] == [self.FILE]
        table = read_table(folder / self.FILE)
        assert sorted(table.entries) == [8, 24]
        runtime, _ = load(tuned_configs=folder)
        assert runtime._launch_table == table
        done = run(*SMALL, "--tuned-configs", folder)
        assert done.returncode == 0, done.stderr

    def test_entries_of_other_batches_stay(self, tmp_path):
        other = LaunchParameters(32, 1, 256)
        write_table(tmp_path / self.FILE, LaunchTable({8: other, 800: other}))
        done = run("--tune", tmp_path, "--batch-size", "2", "--threads", "1")
        assert done.returncode == 0, done.stderr
        entries = read_table(tmp_path / self.FILE).entries
        assert sorted(entries) == [8, 16, 800] and entries[8] == entries[800] == other

    def test_a_broken_file_is_refused_and_stays(self, tmp_path):
        (tmp_path / self.FILE).write_text("{")
        done = run("--tune", tmp_path)
        assert done.returncode == 2 and done.stdout == "" and f"{self.FILE} is not a table" in done.stderr
        assert (tmp_path / self.FILE).read_text() == "{"
