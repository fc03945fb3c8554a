"""benchmark_latency.py as users run it. No test depends on the times that it measures."""

import argparse
import dataclasses
import json
import subprocess
import sys
import time

import gguf
import pytest
import torch
import transformers

import benchmark_latency
from benchmarks import random_checkpoint
from benchmarks.gguf_checkpoint import write_gguf
from benchmarks.latency import implementations
from benchmarks.latency.bound import Rates, decode_bytes, prefill_flops
from benchmarks.latency.implementations import Point, Run, draws_weights
from benchmarks.latency.measurement import Sample, least_seconds, result_of
from benchmarks.latency.options import parser
from benchmarks.latency.profiles import ALL, profile
from benchmarks.latency.report import machine_rates
from benchmarks.latency.round_trip import load_round_trip
from benchmarks.latency.states import compare_in_states
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.stored_tensors import StoredTensors
from granite4_neuron.commands import cli
from granite4_neuron.config import config_from_file, published_config
from granite4_neuron.devices.backends import BACKENDS
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.model.parameters import EMBEDDING, parameters
from granite4_neuron.state.hybrid_state import HybridState
from test.support.checkpoints import CASES, small_config

SMALL = ("--prompt-length", "9", "20", "--output-length", "4", "--repeats", "1", "--warmup", "0", "--threads", "1")


def run(*arguments):
    command = [sys.executable, benchmark_latency.__file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="--compare needs transformers 5")
@pytest.mark.parametrize(
    ("lengths", "compared"), [([9, 20], ()), pytest.param([9], ("--compare", "transformers"), marks=pytest.mark.slow)]
)
def test_table_json_and_plot(tmp_path, lengths, compared):
    pytest.importorskip("matplotlib")
    files = ("--json", tmp_path / "numbers.json", "--plot", tmp_path / "plot.png")
    done = run(*SMALL, "--prompt-length", *lengths, "--batch-size", "2", *compared, *files)
    assert done.returncode == 0, done.stderr
    names = ("granite4-neuron", *compared[1:])
    glances = done.stdout.splitlines()[: len(lengths)]
    for length, line in zip(lengths, glances, strict=True):
        assert f"2 prompts of {length}: " in line and " ms to the first token, " in line and " ms a token" in line
        assert ("x the speed of transformers." in line) == bool(compared)
    assert done.stdout.count("  ratio") == (3 * len(lengths) if compared else 0) and "prefill tok/s" in done.stdout
    assert done.stdout.count("grows as prompt length ^") == (len(names) if len(lengths) > 1 else 0)
    record = json.loads((tmp_path / "numbers.json").read_text())
    points = [(r["implementation"], r["batch_size"], r["prompt_length"]) for r in record["results"]]
    assert points == [(name, 2, length) for length in lengths for name in names]
    assert "GFLOP/s" in done.stdout
    for result in record["results"]:
        assert result.pop("busy_processes") == 0 and len(result.pop("samples")) == 1
        assert all(value > 0 for value in list(result.values())[1:])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_quantized_weights_beside_busy_processes(tmp_path):
    options = ("--quantize", "int8", "--busy", "1", "--json", tmp_path / "numbers.json")
    done = run(*SMALL, "--prompt-length", "9", *options)
    assert done.returncode == 0 and "int8 weights" in done.stdout, done.stderr
    assert done.stdout.count("│ granite4-neuron, 1 busy ") == 3
    record = json.loads((tmp_path / "numbers.json").read_text())
    assert record["quantize"] == "int8"
    assert [(r["prompt_length"], r["busy_processes"]) for r in record["results"]] == [(9, 0), (9, 1)]


@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="it takes the time of the fused kernels")
class TestProfile:
    def test_parts(self):
        model = load_model(bundled_checkpoint(), operators=cpu.choose_operators())
        runtime = CPURuntime(model, transformers.GenerationConfig())
        started = time.perf_counter()
        phases = profile(runtime, Point(batch_size=2, prompt_length=20, output_length=4), turn=0)
        seconds = time.perf_counter() - started
        names = {"products", "convolution", "scan", "attention", "norms and gates", "head and router"}
        for phase in phases:
            parts = {name for name, part in phase.items() if part.seconds > 0}
            assert names <= parts
            assert all(part.busy_seconds > 0 for name, part in phase.items() if name in names)
            assert phase[ALL].seconds == pytest.approx(sum(part.seconds for part in phase.values()) / 2)
        assert phases[0][ALL].seconds + 3 * phases[1][ALL].seconds < seconds

    def test_table(self, capsys):
        benchmark_latency.main([*SMALL, "--profile"])
        printed = capsys.readouterr().out
        assert "batch 1, prompt 9, 1 threads" in printed and "batch 1, prompt 20, 1 threads" in printed
        assert printed.count("norms and gates") == 2


LLAMA_BENCH = """#!/bin/sh
# As llama-bench: it takes a second for a prompt, and 30 ms for three steps after one.
case "$*" in
    "-m {gguf} -t 1 -dev none -r 1 -o json -p 9 -n 0") echo '[{{"samples_ns": [1000000000]}}]' ;;
    "-m {gguf} -t 1 -dev none -r 1 -o json -p 0 -n 3 -d 9") echo '[{{"samples_ns": [30000000]}}]' ;;
    *) echo "error: failed to load model" >&2; exit 1 ;;
esac
"""


class TestLlamaCpp:
    @pytest.fixture
    def programs(self, tmp_path):
        bench = tmp_path / "llama-bench"
        bench.write_text(LLAMA_BENCH.format(gguf=tmp_path / "model.gguf"))
        bench.chmod(0o700)
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        return tmp_path

    @pytest.mark.exhaustive
    def test_in_turns(self, programs):
        numbers = programs / "numbers.json"
        options = ("--compare", "llama.cpp", "--llama-cpp", programs, "--gguf", programs / "model.gguf")
        done = run(*SMALL, "--repeats", "2", "--prompt-length", "9", *options, "--json", numbers)
        assert done.returncode == 0, done.stderr
        ours, theirs = json.loads(numbers.read_text())["results"]
        assert (ours["implementation"], theirs["implementation"]) == ("granite4-neuron", "llama.cpp")
        assert theirs["first_token_ms"] == 1000 and theirs["token_ms_p50"] == pytest.approx(10)
        assert [sample["token_ms"] for sample in theirs["samples"]] == pytest.approx([10, 10])

    @pytest.mark.exhaustive
    def test_its_failure_is_reported(self, programs):
        options = ("--compare", "llama.cpp", "--llama-cpp", programs, "--gguf", programs / "model.gguf")
        done = run(*SMALL, "--prompt-length", "7", *options)
        assert done.returncode == 2 and "failed: error: failed to load model" in done.stderr

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (("--compare", "llama.cpp"), "needs --llama-cpp, the folder of llama-bench"),
            (("--compare", "llama.cpp", "--llama-cpp", "/no/such/folder"), "there is no file /no/such/folder/llama-b"),
            (("--compare", "llama.cpp", "--llama-cpp", "x", "--batch-size", "2"), "llama-bench decodes one sequence"),
            (("--gguf", "model.gguf"), "belong to --compare llama.cpp"),
            (("--compare", "openvino"), "--openvino, the folder of the exported model, go together"),
            (("--openvino", "x"), "--openvino, the folder of the exported model, go together"),
            (("--temperature", "1", "--speculate", "ngram:4"), "leave out --temperature"),
        ],
    )
    def test_bad_input_is_refused(self, arguments, message, capsys):
        assert benchmark_latency.main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("--speculate", "ngram:3"), "of 4 tokens"),
        pytest.param(
            ("--draft-model", bundled_checkpoint(), "--draft-tokens", "2"), "100%", marks=pytest.mark.exhaustive
        ),
        (("--kept-prompt",), "from the file"),
    ],
    ids=["n-gram", "draft model", "kept prompt"],
)
def test_reuse(arguments, expected):
    done = run(*SMALL, *arguments)
    assert done.returncode == 0 and expected in done.stdout, done.stderr


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--speculate", "eagle"), "must be ngram, ngram:K, mtp or mtp:K"),
        (("--speculate", "ngram", "--kept-prompt"), "give one of --speculate and --kept-prompt at a time"),
        (("--kept-prompt", "--json", "numbers.json"), "leave out --json"),
        (("--prompt-length", "131072"), "this model takes at most 131072"),
        (("--batch-size", "0"), "--batch-size must be at least 1"),
        (("--busy", "-1"), "--busy must be at least 0"),
        (("--model", "/no/such/folder"), "is not a folder"),
        (("--model", "x", "--random-weights", "h-350m"), "not both"),
        (("--random-weights", "h-9b"), "no family member"),
        (("--json", "/no/such/folder/x.json"), "cannot be written"),
        (("--backend", "nxdi", "--compiled", "x", "--quantize", "int8"), "int8 weights are for the backend cpu"),
        (("--backend", "nxdi", "--compiled", "x", "--dtype", "float32"), "were chosen when they were compiled"),
        (("--backend", "nxdi", "--compiled", "x", "--state-dtype", "bfloat16"), "were chosen when they were compiled"),
        (("--tuned-configs", "/no/such/folder"), "not a folder"),
    ],
)
def test_bad_input_is_refused(arguments, message, capsys):
    assert benchmark_latency.main([str(argument) for argument in arguments]) == 2
    output, error = capsys.readouterr()
    assert output == "" and message in error


def test_random_weights_for_a_device_are_not_written():
    """The process that runs the model draws its weights. The folder has the config only, and a dtype is chosen."""
    options = parser("").parse_args(["--random-weights", "h-350m", "--backend", "torch", "--device", "cuda"])
    with benchmark_latency._checkpoint(options) as folder:
        assert [file.name for file in folder.iterdir()] == ["config.json"]
        assert open_checkpoint(folder).config == published_config("h-350m")
    assert options.dtype == "bfloat16" and draws_weights(options)
    options.compare = ["transformers"]
    assert not draws_weights(options)


def test_a_random_checkpoint_of_some_layers(tmp_path, capsys):
    """Its layers are as wide as the family member's, and its tokenizer is the bundled one."""
    arguments = ["h-350m", str(tmp_path / "model"), "--layers", "attention", "mamba"]
    assert random_checkpoint.main(arguments) == 0
    checkpoint, member = open_checkpoint(tmp_path / "model"), published_config("h-350m")
    assert checkpoint.config.layer_types == ("attention", "mamba")
    assert checkpoint.config.hidden_size == member.hidden_size
    assert max(checkpoint.load_tokenizer().get_vocab().values()) < checkpoint.config.vocab_size < member.vocab_size
    assert random_checkpoint.main(["h-tiny", str(tmp_path / "other"), "--experts", "5"]) == 2
    assert "--experts is 5; a token has 6 of 64" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_a_random_checkpoint_of_parts_of_a_nemotron_model(tmp_path, capsys):
    arguments = ["nemotron-3-nano-30b-a3b", str(tmp_path / "model"), "--layers", "mamba", "--vocabulary"]
    assert random_checkpoint.main([*arguments, "2000"]) == 0
    config, member = open_checkpoint(tmp_path / "model").config, published_config("nano-30b-a3b")
    assert config.layer_types == ("mamba",) and config.hidden_size == member.hidden_size and config.vocab_size == 2000
    assert random_checkpoint.main([*arguments, "1000"]) == 2
    assert "--vocabulary is 1000; the tokenizer has 1024 tokens" in capsys.readouterr().err


def test_a_backends_options_reach_its_runtime(monkeypatch, texting_folder):
    given = []

    def runtime(model, generation_config, **options):
        given.append(options)
        return argparse.Namespace(weight_bytes=0)

    monkeypatch.setattr(implementations, "TorchRuntime", runtime)
    forms = ["--compiler", "eager", "--kv-write", "select", "--no-prefill-by-view", "--decode-kernel", "nki"]
    options = parser("").parse_args(["--backend", "torch", *forms, "--temperature", "0.7", "--top-k", "5"])
    ours = implementations.Ours(texting_folder, options)
    monkeypatch.setattr(implementations, "stream_generate", lambda *_, **options: [given.append(options)])
    ours.run([[1]], 2)
    assert given.pop() == dict(temperature=0.7, top_k=5, max_tokens=2, ignore_eos=True)
    chosen = dict(device="cpu", compiler="eager", kv_write="select", prefill_by_view=False, decode_kernel="nki")
    assert given[0].items() >= chosen.items() and given[0].keys() == {
        option.name for option in BACKENDS["torch"].options
    } - {"dtype", "tp_degree"}


def test_an_unsupported_backend_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark_latency.main(["--backend", "xla"])
    assert "invalid choice: 'xla'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_broken_checkpoint_is_reported_by_the_process_that_reads_it(tmp_path, texting_folder):
    (tmp_path / "config.json").write_text((texting_folder / "config.json").read_text())
    done = run("--model", tmp_path, *SMALL)
    assert done.returncode == 2 and "has no model.safetensors" in done.stderr and "Traceback" not in done.stderr


class TestResult:
    """Known times: prompts take 0.5 and 0.7 s, and further tokens come after 10 to 40 ms."""

    RUNS = (
        Run([0.5, 0.51, 0.53, 0.54], peak_bytes=2 * 2**20, weight_bytes=2**20, round_trips=(5e-8, 6e-8)),
        Run([0.7, 0.72, 0.74, 0.78], peak_bytes=3 * 2**20, weight_bytes=2**20, round_trips=(3e-7, None)),
    )
    POINT = Point(batch_size=3, prompt_length=100, output_length=4)

    @pytest.fixture
    def result(self):
        rates = Rates(flops=200e9, bytes=40e9)
        return result_of("ours", self.POINT, list(self.RUNS), (0.3, 0.005), rates)

    def test_times(self, result):
        assert result.first_token_ms == pytest.approx(600)
        assert result.token_ms_p50 == pytest.approx(20)
        assert result.token_ms_p99 == pytest.approx(40)

    def test_rates(self, result):
        """Every row of the batch counts once."""
        assert result.prefill_tokens_per_second == pytest.approx(3 * 100 / 0.6)
        assert result.decode_tokens_per_second == pytest.approx(3 / 0.02)

    def test_shares_of_the_bound(self, result):
        assert result.prefill_of_bound == pytest.approx(0.3 / 0.6)
        assert result.decode_of_bound == pytest.approx(0.005 / 0.02)
        assert (result.machine_gflops, result.machine_gbytes_per_second) == (200, 40)
        assert (result.peak_memory_mib, result.over_weights_mib) == (3, 2)

    def test_samples(self, result):
        assert [sample.first_token_ms for sample in result.samples] == pytest.approx([500, 700])
        assert [sample.token_ms for sample in result.samples] == pytest.approx([40 / 3, 80 / 3])
        assert result.samples[0].round_trips_ns == pytest.approx((50, 60))
        assert result.samples[1].round_trips_ns == (pytest.approx(300), None)

    def test_the_machine_is_printed(self, result):
        (line,) = machine_rates([result])
        assert line == "machine, at batch 3 and prompt 100: 200 GFLOP/s, 40.0 GB/s"

    def test_the_bound(self, texting_folder):
        """A prompt's bound is its arithmetic at the machine's FLOP/s. Decode's is weights and state at its bytes/s."""
        config = config_from_file(texting_folder / "config.json")
        options = argparse.Namespace(dtype=None, quantize=None, state_dtype=None)
        rates = Rates(flops=2e9, bytes=3e9)
        prefill, decode = least_seconds(texting_folder, self.POINT, options, rates)
        assert prefill == pytest.approx(3 * prefill_flops(config, 100) / 2e9)
        assert decode == pytest.approx(decode_bytes(config, torch.float32, 3, 102) / 3e9)

    def test_the_bound_of_stored_quantized_weights(self, texting_folder, tmp_path):
        assert (
            cli.main(
                ["convert", "--model", str(texting_folder), "--quantize", "int4", "--output", str(tmp_path / "int4")]
            )
            == 0
        )
        rates = Rates(flops=2e9, bytes=3e9)
        bounds = [
            least_seconds(folder, self.POINT, argparse.Namespace(dtype=None, quantize=name, state_dtype=None), rates)
            for folder, name in ((texting_folder, "int4"), (tmp_path / "int4", None))
        ]
        assert bounds[0] == bounds[1]


class TestStates:
    """Ours takes 100 and 10 ms near and 300 and 40 ms far; theirs takes 200 and 15 ms near and 450 and 100 ms far."""

    NEAR, FAR, CHANGED = (60.0, 80.0), (300.0, 350.0), (60.0, 300.0)

    def result(self, *samples):
        run = Run([0.1, 0.2], 0, 0)
        whole = result_of("x", Point(1, 100, 2), [run], (0.0, 0.0))
        return dataclasses.replace(whole, samples=[Sample(*each) for each in samples])

    def test_each_state_is_compared_by_itself(self):
        ours = self.result((100, 10, self.NEAR), (300, 40, self.FAR), (1e6, 1e6, self.CHANGED), (1e6, 1, (None, 60.0)))
        theirs = self.result((450, 100, self.FAR), (200, 15, self.NEAR), (200, 15, self.NEAR))
        near, far = compare_in_states(ours, theirs)
        assert (near.prefill, near.decode, near.runs) == (2, 1.5, (1, 2)) and 60 <= near.round_trip_ns <= 80
        assert (far.prefill, far.decode, far.runs) == (1.5, 2.5, (1, 1)) and 300 <= far.round_trip_ns <= 350

    def test_one_state(self):
        ours, theirs = self.result((100, 10, self.FAR)), self.result((200, 30, self.FAR))
        (state,) = compare_in_states(ours, theirs)
        assert (state.prefill, state.decode) == (2, 3)

    def test_a_state_that_only_one_has_seen_is_not_compared(self):
        assert not compare_in_states(self.result((1, 1, self.NEAR)), self.result((1, 1, self.FAR)))
        assert not compare_in_states(self.result((1, 1, (None, None))), self.result((1, 1, (None, None))))


@pytest.mark.parametrize(
    "case_folder", [case for case in CASES if case.name in ("moe", "two_groups", "untied_head")], indirect=True
)
def test_a_checkpoint_as_gguf(tmp_path, case_folder):
    """Every weight is there once, under llama.cpp's name and with the values that llama.cpp computes with."""
    config = config_from_file(case_folder / "config.json")
    stored = StoredTensors(case_folder, config)
    write_gguf(case_folder, tmp_path / "model.gguf")
    tensors = {
        tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
    }
    numbers = sum(one.numel for one in parameters(config).values())
    assert sum(tensor.numel() for tensor in tensors.values()) == numbers
    assert torch.equal(tensors["token_embd.weight"], stored.read(EMBEDDING).float())
    mamba = config.layer_types.index("mamba")
    expected = -stored.read(f"model.layers.{mamba}.mamba.A_log").float().exp()
    assert torch.equal(tensors[f"blk.{mamba}.ssm_a"].flatten(), expected)
    gate, up = stored.read("model.layers.0.shared_mlp.input_linear.weight").float().chunk(2)
    ending = "_shexp" if config.num_local_experts else ""
    assert torch.equal(tensors[f"blk.0.ffn_gate{ending}.weight"], gate)
    assert torch.equal(tensors[f"blk.0.ffn_up{ending}.weight"], up)


def test_a_round_trip():
    assert (seconds := load_round_trip()()) is None or 1e-9 < seconds < 1e-2


class TestBound:
    """The bounds of small models equal figures counted by hand."""

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
        slot_bytes = sum(tensor.nbytes // 2 for tensor in state.tensors())
        assert decode_bytes(config, torch.bfloat16, 3, 7) == 2 * (matrices + head) + 3 * slot_bytes

    def test_quantized_weights_are_counted_with_their_scales(self):
        """Columns are multiples of 32, so four bits with scales take 4.5 bits per value."""
        config = small_config(num_local_experts=0, tie_word_embeddings=True, shared_intermediate_size=96)
        model = random_model(config)
        matrices = [
            parameter
            for name, parameter in model.model.layers.named_parameters()
            if name.endswith(("proj.weight", "linear.weight"))
        ]
        assert all(matrix.shape[1] % 32 == 0 for matrix in matrices)
        numbers, rows = sum(matrix.numel() for matrix in matrices), sum(len(matrix) for matrix in matrices)
        head = model.lm_head.weight.numel() + 4 * len(model.lm_head.weight)
        state = decode_bytes(config, torch.bfloat16, 1, 7) - 2 * (numbers + model.lm_head.weight.numel())
        assert decode_bytes(config, torch.bfloat16, 1, 7, "int8") == numbers + 4 * rows + head + state
        assert decode_bytes(config, torch.bfloat16, 1, 7, "int4") == numbers * 4.5 / 8 + head + state

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
