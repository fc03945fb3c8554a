"""The command as a person types it: its output, its exit status, and one sentence for every bad input."""

import argparse
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from granite4_neuron import UserError, load
from granite4_neuron.checkpoint.folder_contents import GENERATION_CONFIG
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.commands.cli import main, parser
from granite4_neuron.commands.options import print_time
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.neuron import sdk
from granite4_neuron.devices.neuron.stand_ins import SOURCES
from granite4_neuron.ops import LaunchParameters
from granite4_neuron.ops.launch_parameters import file_name, write_launch_parameters
from granite4_neuron.planning.analysis.graphs import GraphReport
from granite4_neuron.planning.analysis.hlo_cost import Cost
from granite4_neuron.planning.analysis.roofline import Minimum
from test.support.tool_template import NEMOTRON_TEMPLATE

BUNDLED = "Using the small model that comes with the package; --model chooses another.\n"
LAUNCH_PARAMETERS = file_name(32, 32, torch.float32)  # for texting_folder


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs the command and returns (status, standard output, standard error)."""

    def command(*arguments, stdin=None):
        monkeypatch.setattr(sys, "stdin", Terminal() if stdin is None else io.StringIO(stdin))
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # of --help
            status = exit.code
        return status, *capsys.readouterr()

    return command


@pytest.fixture
def folder(texting_folder, tmp_path):
    """Copy the random checkpoint with a tokenizer, so that a test can damage it."""
    return shutil.copytree(texting_folder, tmp_path / "model")


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class TestGenerate:
    def test_prompt_as_argument_file_and_standard_input(self, run, texting_folder, tmp_path):
        (tmp_path / "prompt.txt").write_text("Some text\n")
        common = ("generate", "--model", texting_folder, "--max-tokens", 6, "--ignore-eos")
        status, expected, _ = run(*common, "Some text")
        assert status == 0 and len(expected) > 1
        assert run(*common, "--file", tmp_path / "prompt.txt")[:2] == (0, expected)
        assert run(*common, "--file", "-", stdin="Some text")[:2] == (0, expected)
        assert run(*common, stdin="Some text")[:2] == (0, expected)

    def test_several_prompts(self, run, texting_folder):
        common = ("generate", "--model", texting_folder, "--max-tokens", 6, "--ignore-eos")
        alone = [run(*common, prompt)[1] for prompt in ("one", "another one")]
        assert run(*common, "one", "another one")[1] == f"=== one\n{alone[0]}\n=== another one\n{alone[1]}\n"

    def test_one_of_several_prompts_is_wrong(self, run, texting_folder):
        arguments = "--model", texting_folder, "--max-tokens", 4, "--ignore-eos"
        _, expected, _ = run("generate", *arguments, "One", "Two")
        status, out, err = run("generate", *arguments, "One", "", "Two")
        assert status == 2 and out.replace("=== \n\n\n", "") == expected
        assert err.endswith("prompt 2 is empty; give at least one token of text.\n")
        status, out, err = run("generate", *arguments, "", "")
        assert status == 2 and out == "" and "2 of 2 prompts failed; the first: prompt 1 is empty" in err

    def test_options_reach_the_sampler(self, run, texting_folder):
        common = ("generate", "--model", texting_folder, "--max-tokens", 20, "--ignore-eos", "text", "--temperature", 2)
        first, again, other = (run(*common, "--seed", seed)[1] for seed in (1, 1, 2))
        assert first == again != other
        greedy = run("generate", "--model", texting_folder, "--max-tokens", 20, "--ignore-eos", "text")[1]
        assert run(*common, "--top-k", 1)[1] == greedy == run(*common, "--top-p", 1e-9)[1]
        assert run(*common, "--min-p", 1)[1] == greedy
        longer = (*common, "--seed", 1, "--max-tokens", 80)
        assert run(*longer)[1] != run(*longer, "--repetition-penalty", 1000)[1]

    def test_chat_and_system(self, run, texting_folder):
        common = ("generate", "--model", texting_folder, "--max-tokens", 8, "--ignore-eos", "--verbose")
        status, output, error = run(*common, "--chat", "hi")
        assert status == 0 and output == run(*common, "<|user|>hi<|end|><|assistant|>")[1]
        assert "prefill: 5 tokens" in error
        assert "prefill: 15 tokens" in run(*common, "--chat", "--system", "be brief", "hi")[2]

    @pytest.mark.slow
    def test_chat_template_kwargs(self, run, texting_folder, tmp_path):
        folder = shutil.copytree(texting_folder, tmp_path / "model")
        (folder / "chat_template.jinja").write_text(NEMOTRON_TEMPLATE)
        common = ("--model", folder, "--max-tokens", 5, "--ignore-eos")
        answer = run("generate", *common, "<|user|>hi<|end|><|assistant|><think></think>")[1]
        off = (*common, "--chat", "--chat-template-kwargs", '{"enable_thinking": false}')
        assert run("generate", *off, "hi")[1] == answer != run("generate", *common, "--chat", "hi")[1]
        stored = ("--prompt-cache", tmp_path / "state", "--verbose", "hi")
        assert "prefix cache: 0 tokens found" in run("generate", *off, *stored)[2]
        assert "prefix cache: 20 tokens found" in run("generate", *off, *stored)[2]
        for given, message in (("[]", "must be an object in JSON"), ('{"a": x}', "is not JSON (Expecting value")):
            bad = run("generate", "--chat", "--chat-template-kwargs", given, "hi")
            assert bad[0] == 2 and f"--chat-template-kwargs {message}" in bad[2]
        rows, results = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
        rows.write_text('{"prompt": "hi"}')
        assert run("batch", rows, results, *off)[0] == 0
        assert json.loads(results.read_text())["generated_text"] + "\n" == answer

    def test_stop(self, run, texting_folder):
        common = ("generate", "--model", texting_folder, "--max-tokens", 20, "--ignore-eos", "text")
        text = run(*common)[1]
        assert run(*common, "--stop", text[3:5])[1] == text[: text.index(text[3:5])] + "\n"

    @pytest.mark.parametrize("backend", ["cpu", "torch", "xla", "nxdi"])
    def test_times_to_start(self, capsys, backend):
        """A device takes minutes to load and to compile, so its commands say how long; the CPU's only if asked."""
        print_time(argparse.Namespace(backend=backend), "load", time.perf_counter() - 5)
        assert bool(re.fullmatch(r"load: 5\.\d s\n", capsys.readouterr().err)) == (backend != "cpu")

    def test_verbose(self, run, texting_folder):
        status, _, error = run("generate", "--model", texting_folder, "--max-tokens", 5, "--verbose", "text")
        assert status == 0
        for part in ("load: ", "prefill: 4 tokens, ", "tokens/s", "decode: ", "peak memory: ", "MiB"):
            assert part in error
        assert "not used" not in error or not cpu.has_fused_kernels()

    @pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
    def test_verbose_says_which_kernels_are_not_used(self, run, texting_folder):
        common = ("generate", "--model", texting_folder, "--max-tokens", 2, "--prefill-scan", "quadratic", "text")
        assert "the fused decoder layers are not used: they have their own scan" in run(*common, "--verbose")[2]
        assert "not used" not in run(*common)[2]

    def test_dtype(self, run, texting_folder):
        assert run("generate", "--model", texting_folder, "--dtype", "bfloat16", "--max-tokens", 3, "text")[0] == 0

    def test_quantize(self, run, texting_folder):
        common = ("generate", "--model", texting_folder, "--max-tokens", 3, "--ignore-eos", "text")
        for kernels in ("fused", "torch"):
            assert run(*common, "--quantize", "int8", "--cpu-kernels", kernels)[0] == 0

    def test_tuned_configs_change_no_text(self, run, texting_folder, tmp_path):
        common = ("generate", "--model", texting_folder, "--max-tokens", 6, "--ignore-eos", "x" * 150)
        write_launch_parameters(tmp_path / LAUNCH_PARAMETERS, LaunchParameters(32, 1, 32))
        assert run(*common, "--tuned-configs", tmp_path) == run(*common)

    def test_without_a_model_the_bundled_one_is_used_and_named(self, run):
        status, output, error = run("generate", "An assignment statement", "--max-tokens", 8)
        assert status == 0 and "evaluates the expression list" in output
        assert "small model that comes with the package" in error


class TestBadInput:
    """Bad input gives one sentence on standard error, status 2 and nothing on standard output."""

    def refused(self, result, message):
        status, output, error = result
        assert status == 2 and output == ""
        assert message in error.replace("\n", " "), error
        assert "Traceback" not in error
        error = error.removeprefix(BUNDLED)
        assert error.startswith("granite4-neuron: ") and error.count("\n") == 1 and error.rstrip().endswith(".")

    def test_no_such_folder(self, run, tmp_path):
        self.refused(run("generate", "--model", tmp_path / "none", "x"), "is not a folder")

    def test_a_file_instead_of_a_folder(self, run, folder):
        self.refused(run("generate", "--model", folder / "config.json", "x"), "is not a folder but a file")

    def test_an_empty_folder(self, run, tmp_path):
        self.refused(run("generate", "--model", tmp_path, "x"), "config.json does not exist")

    def test_not_a_granite_hybrid(self, run, folder):
        edit_config(folder, model_type="llama")
        self.refused(run("generate", "--model", folder, "x"), "model_type is 'llama'")

    def test_truncated_weights(self, run, folder):
        os.truncate(folder / WEIGHTS, 5000)
        self.refused(run("generate", "--model", folder, "x"), "damaged or incomplete")

    def test_missing_shard(self, run, folder, tmp_path):
        save_model(load_model(folder), tmp_path / "shards", folder, max_shard_size="200KB")
        next((tmp_path / "shards").glob("model-00002*")).unlink()
        self.refused(run("generate", "--model", tmp_path / "shards", "x"), "lacks 1 of its")

    def test_empty_prompt(self, run, texting_folder):
        self.refused(run("generate", "--model", texting_folder, ""), "the prompt is empty")
        self.refused(run("generate", "--model", texting_folder, stdin=""), "the prompt is empty")

    def test_no_prompt(self, run, texting_folder):
        self.refused(run("generate", "--model", texting_folder), "there is no prompt")

    def test_prompt_too_long(self, run, texting_folder):
        self.refused(run("generate", "--model", texting_folder, "x" * 600), "at most 599")

    @pytest.mark.parametrize(
        "option, value, message",
        [
            ("--max-tokens", "-3", "argument --max-tokens: -3 is not a whole number of at least 1"),
            ("--max-tokens", "many", "many is not a whole number of at least 1"),
            ("--temperature", "-1", "-1 is not a number at least 0"),
            ("--temperature", "nan", "nan is not a number at least 0"),
            ("--temperature", "inf", "inf is not a number at least 0"),
            ("--top-p", "7", "7 is not a number above 0 and at most 1"),
            ("--top-k", "-2", "-2 is not a whole number of at least 0"),
            ("--min-p", "2", "2 is not a number at least 0 and at most 1"),
            ("--repetition-penalty", "-1", "-1 is not a number above 0"),
            ("--seed", "-1", "-1 is not a whole number of at least 0"),
            ("--stop", "", "stop is [''], and must be a string or a list"),
            ("--dtype", "int3", "invalid choice"),
            ("--quantize", "int3", "invalid choice"),
            ("--prefill-scan", "fast", "invalid choice"),
            ("--cpu-kernels", "fast", "invalid choice"),
            ("--system", "be brief", "--system is part of a conversation; give --chat too"),
            ("--chat-template-kwargs", "{}", "--chat-template-kwargs is part of a conversation; give --chat too"),
            ("--file", "/no/such/file", "cannot be read"),
        ],
    )
    def test_absurd_options(self, run, texting_folder, option, value, message):
        prompt = [] if option == "--file" else ["text"]
        self.refused(run("generate", "--model", texting_folder, *prompt, f"{option}={value}"), message)

    @pytest.mark.parametrize("backend", [("xla",), ("nxdi", "--compiled", "graphs")], ids=["xla", "nxdi"])
    @pytest.mark.parametrize(
        "option, message",
        [
            (("--quantize", "int8"), "are for the backend cpu"),
            (("--cpu-kernels", "torch"), "CPU kernels belong to the backend cpu"),
        ],
        ids=["quantize", "cpu-kernels"],
    )
    def test_options_of_the_cpu(self, run, texting_folder, backend, option, message):
        options = (*option, "--backend", *backend)
        self.refused(run("generate", "--model", texting_folder, "x", *options), message)

    @pytest.mark.parametrize(
        "backend, options, message",
        [
            ("xla", dict(quantize="int8"), "are for the backend cpu"),
            ("xla", {}, "the xla backend needs torch_xla"),
            ("nxdi", {}, "needs a folder of compiled graphs"),
            ("nxdi", dict(compiled="graphs"), "NxD Inference needs the Neuron SDK"),
            ("torch", dict(device="cuda"), "torch finds no GPU here"),
            ("torch", dict(device="neuron"), "needs the torch-neuronx"),
        ],
    )
    def test_nothing_is_downloaded_for_a_backend_that_cannot_run(self, run, monkeypatch, backend, options, message):
        there = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else there(name))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr("granite4_neuron.checkpoint.opening.download", lambda *_: pytest.fail("it is downloaded"))
        with pytest.raises(UserError, match=message):
            load("somebody/some-model", backend=backend, **options)
        given = [argument for name, value in options.items() for argument in (f"--{name}", value)]
        status, _, error = run("generate", "--model", "somebody/some-model", "x", "--backend", backend, *given)
        assert status == 2 and message in error

    def test_prompt_twice(self, run, folder):
        self.refused(run("generate", "--model", folder, "x", "--file", folder / "config.json"), "not both")

    def test_a_prompt_that_is_not_text(self, run, folder, tmp_path):
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        self.refused(run("generate", "--model", folder, "--file", tmp_path / "binary"), "is not text in UTF-8")

    def test_a_tokenizer_of_another_model(self, run, folder):
        edit_config(folder, vocab_size=100)
        self.refused(run("generate", "--model", folder, "x"), "has 262 entries and the model only 100")

    def test_no_tokenizer(self, run, folder):
        (folder / "tokenizer.json").unlink()
        self.refused(run("generate", "--model", folder, "x"), "has no tokenizer.json")

    def test_a_broken_tokenizer(self, run, folder):
        (folder / "tokenizer.json").write_text("{}")
        self.refused(run("generate", "--model", folder, "x"), "the tokenizer in")

    def test_a_broken_generation_config(self, run, folder):
        (folder / GENERATION_CONFIG).write_text("{")
        self.refused(run("generate", "--model", folder, "x"), "generation_config.json is not valid JSON")

    def test_chat_without_a_template(self, run, folder):
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
        tokenizer_config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        self.refused(run("generate", "--model", folder, "--chat", "x"), "no chat template")

    def test_an_unwritable_place(self, run, folder):
        self.refused(run("convert", "--model", folder, "--output", folder), "not an empty folder")
        self.refused(
            run("convert", "--model", folder, "--output", folder / "config.json" / "x"), "could not be written"
        )

    def test_a_checkpoint_with_broken_numbers(self, run, folder):
        model = load_model(folder)
        model.model.norm.weight.fill_(float("nan"))
        shutil.rmtree(folder.parent / "nan", ignore_errors=True)
        save_model(model, folder.parent / "nan", files_from=folder)
        for options in ([], ["--temperature", "1"]):
            result = run("generate", "--model", folder.parent / "nan", "x", *options)
            self.refused(result, "the model's logits are not finite")

    def test_the_lowest_temperatures_are_greedy(self, run, texting_folder):
        texts = {run("generate", "--model", texting_folder, "x", "--temperature", each)[:2] for each in ("0", "1e-300")}
        assert len(texts) == 1 and {status for status, _ in texts} == {0}

    @pytest.mark.parametrize(
        "field, value", [("temperature", "hot"), ("eos_token_id", [[1]]), ("eos_token_id", {}), ("do_sample", 1)]
    )
    def test_a_generation_config_of_wrong_types(self, run, folder, field, value):
        (folder / GENERATION_CONFIG).write_text(json.dumps({field: value}))
        self.refused(run("generate", "--model", folder, "x"), f"{field} is {value!r}")

    def test_a_chat_template_that_refuses(self, run, folder):
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        file = folder / "tokenizer_config.json"
        template = "{{ raise_exception('no system message, please') }}"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
        self.refused(run("generate", "--model", folder, "--chat", "x"), "no system message, please")

    def test_a_prompt_of_undecodable_bytes(self, run, texting_folder):
        self.refused(run("generate", "--model", texting_folder, "abc\udcff"), "is not text in UTF-8")

    def test_a_very_long_name(self, run):
        self.refused(run("generate", "--model", "x" * 5000, "x"), "is not a folder")

    def test_weights_of_an_unsupported_dtype(self, run, folder):
        tensors = {name: tensor.double() for name, tensor in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS)
        self.refused(run("generate", "--model", folder, "x"), "of a dtype that is not supported")

    @pytest.mark.parametrize("command", [("generate", "x"), ("check",)])
    def test_tuned_configs(self, run, texting_folder, tmp_path, command):
        common = (*command, "--model", texting_folder, "--tuned-configs")
        self.refused(run(*common, tmp_path / "none"), "none', which is not a folder")
        (tmp_path / LAUNCH_PARAMETERS).write_text("{}")
        self.refused(run(*common, tmp_path), f"{LAUNCH_PARAMETERS} does not hold launch parameters; it must have")

    def test_tuned_configs_of_another_backend(self, run, tmp_path):
        for backend in ("xla", "nxdi"):
            extra = ("--compiled", tmp_path) if backend == "nxdi" else ()
            result = run("generate", "x", "--backend", backend, *extra, "--tuned-configs", tmp_path)
            self.refused(result, "belong to the backend cpu")

    def test_nonsense(self, run):
        self.refused(run("sing"), "invalid choice")
        self.refused(run("genrate", "x"), "did you mean generate?")
        self.refused(run("generate", "x", "--dtype", "bfloat"), "did you mean bfloat16?")
        self.refused(run("generate", "x", "--max_tokens", "3"), "did you mean --max-tokens?")
        self.refused(run("plan", "--modle=h-small"), "did you mean --model? (see granite4-neuron plan --help)")
        self.refused(run("chat", "--wholly-unknown"), "unrecognized arguments: --wholly-unknown (see")
        self.refused(run("info", "--revision", "v1", "--model", "."), "only a Hugging Face id has a revision")
        self.refused(run("check", "--tokens", "0"), "0 is not a whole number of at least 1")
        self.refused(run("graphs", "--buckets", "0"), "0 is not a whole number of at least 1")
        if importlib.util.find_spec("torch_xla") is None:
            for command in (("graphs",), ("generate", "--backend", "xla", "x")):
                status, _, error = run(*command)
                assert status == 2 and "torch_xla, which is not installed; install it, in an environment" in error
        if importlib.util.find_spec("torch_mlir") is None:
            self.refused(run("graphs", "--backend", "torch"), "torch_mlir, which is not installed")


class TestInfo:
    def test_family_member(self, run):
        status, output, _ = run("info", "--model", "granite-4.0-h-small")
        assert status == 0
        for part in (
            "32,207,337,984",
            "8,803,121,664",
            "145.7 MiB",
            "16,384 bytes",
            "36 Mamba-2, 4 attention",
            "131,072",
        ):
            assert part in output

    def test_a_folder_comes_before_a_family_member(self, run, folder, monkeypatch):
        assert "4,096 bytes" in run("info", "--model", "h-350m")[1]
        monkeypatch.chdir(folder.parent)
        folder.rename("h-350m")
        assert "4,096 bytes" not in run("info", "--model", "h-350m")[1]

    def test_a_name_with_brackets(self, run, folder):
        assert "m[red]x" in run("info", "--model", folder.rename(folder.parent / "m[red]x"))[1].replace("\n", "")

    def test_folder(self, run, texting_folder):
        status, output, _ = run("info", "--model", texting_folder)
        assert status == 0 and "float32" in output and "6, 3" in output


class TestCheck:
    def test_passes(self, run, texting_folder):
        status, output, _ = run("check", "--model", texting_folder, "--tokens", 5)
        assert status == 0 and "passed" in output
        for part in ("max diff", "mean diff", "top-1", "Pearson", "position 0", "positions 4-7", "prefill", "decode"):
            assert part in output
        assert output.count("100.0%") >= 4 and "R-ratio" not in output and "not passed" not in output

    @pytest.mark.slow
    def test_bfloat16_is_compared_with_transformers_own_error(self, run, texting_folder):
        status, output, _ = run("check", "--model", texting_folder, "--tokens", 5, "--dtype", "bfloat16")
        assert status == 0 and "transformers in this dtype" in output
        assert "transformers in bfloat16" in output and re.search(r"R-ratio 0\.\d\d: passed \(", output)

    @pytest.mark.slow
    def test_int8_is_judged_by_its_top_tokens(self, run, texting_folder, monkeypatch):
        command = ("check", "--model", texting_folder, "--tokens", 5, "--quantize", "int8")
        status, output, _ = run(*command)
        assert status == 0 and "quantized weights" in output and "not passed" not in output
        assert "passed (quantized: the same top token for 90% of the tokens at least)" in output
        original = load_model

        def with_columns_in_another_order(*arguments, operators, **options):
            operators = replace(operators, quantize=lambda weight, format: format.quantize(weight.flip(-1)))
            return original(*arguments, operators=operators, **options)

        monkeypatch.setattr("granite4_neuron.checkpoint.loading.load_model", with_columns_in_another_order)
        status, output, _ = run(*command)
        assert status == 1 and "FAILED" in output

    def test_fails_with_a_planted_bug(self, run, texting_folder, monkeypatch):
        original = load_model

        def without_D(*arguments, **options):
            model = original(*arguments, **options)
            model.model.layers[0].mamba.D.zero_()
            return model

        monkeypatch.setattr("granite4_neuron.checkpoint.loading.load_model", without_D)
        status, output, _ = run("check", "--model", texting_folder, "--tokens", 5)
        assert status == 1 and "FAILED" in output and output.count("not passed") == 4
        status, output, _ = run("check", "--model", texting_folder, "--tokens", 5, "--dtype", "bfloat16")
        assert status == 1 and re.search(r"R-ratio \d+\.\d\d: not passed \(", output)


WIDE_TABLES = {
    "info": (["--model", "h-small"], "attention heads, key heads, width, positions | 32, 8, 128, none"),
    "plan": (["--model", "h-small", "--latency"], "step | batch | bound, ms | predicted, ms"),
    "graphs": (
        ["--model", "h-small", "--backend", "torch"],
        "context of many words | 3e+05 | 0.3 | x 1000000.00 | 4e+05 | 0.4 |",
    ),
}


@pytest.mark.parametrize("command", WIDE_TABLES)
def test_tables_are_whole_in_a_file(command, capsys, monkeypatch):
    """A redirected table has whole lines, even if the command was started in a narrow terminal."""
    cost = Cost(flops=3e14, bytes_accessed=4e14)
    least = Minimum(flops=3e8, weights=4e8, state=0, key_values=0, activations=0)
    report = GraphReport("context of many words", 0, 0, cost, {}, least, (), few=None)
    report.__dict__["temporary_bytes"] = 0
    monkeypatch.setattr("granite4_neuron.commands.graphs._reports", lambda *arguments: [report])
    monkeypatch.setenv("COLUMNS", "40")
    arguments, line = WIDE_TABLES[command]
    assert main([command, *arguments]) == 0
    output = capsys.readouterr().out
    assert line in re.sub(r"\s*[│┃]\s*", " | ", output)


def test_convert(run, texting_folder, tmp_path):
    status, _, _ = run("convert", "--model", texting_folder, "--dtype", "bfloat16", "--output", tmp_path / "new")
    assert status == 0
    assert run("generate", "--model", tmp_path / "new", "--max-tokens", 3, "text")[0] == 0
    assert "bfloat16" in run("info", "--model", tmp_path / "new")[1]


COMMANDS = (
    "generate",
    "chat",
    "serve",
    "batch",
    "info",
    "convert",
    "check",
    "evaluate",
    "tune",
    "measure",
    "plan",
    "graphs",
    "compile",
    "vllm-check",
)


def test_help_names_every_command(run):
    status, output, _ = run("--help")
    assert status == 0 and "examples:" in output
    described = [line.split()[0] for line in output.splitlines() if re.match(r"    [\w-]+  +\w", line)]
    assert tuple(described) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(run, command):
    status, output, _ = run(command, "--help")
    assert status == 0
    (subparsers,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    for action in subparsers.choices[command]._actions:
        assert action.help, action.option_strings
        assert not action.option_strings or action.option_strings[-1] in output


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS)], ids=" ".join)
def test_help_fits_into_a_terminal(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, output, _ = run(*command, "--help")
    texts, _, _ = output.partition("examples:")
    wide = [line for line in texts.splitlines() if len(line) > 58]
    assert all(re.match(r"usage:| *[-\[{]", line) for line in wide), "only an option with its values may be wider"


DAILY = {
    "chat": ["--model", "--system", "--max-tokens", "--verbose", "--temperature"],
    "serve": ["--model", "--host", "--port", "--api-key", "--max-num-seqs", "--max-model-len"],
}


@pytest.mark.parametrize("command", DAILY)
def test_help_begins_with_daily_options(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, output, _ = run(command, "--help")
    usage, _, options = output.partition("options:")
    assert usage.count("\n") < 10
    named = re.findall(r"^  (--[\w-]+)", options, re.MULTILINE)
    assert named[: len(DAILY[command])] == DAILY[command]


def test_a_bare_command_prints_help(run):
    assert run() == run("--help")


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_everyday_options_come_first(run, command):
    _, output, _ = run(command, "--help")
    rest, kernels = output.split("weights, kernels and devices:")
    assert "--cpu-kernels" in kernels and "--model MODEL  " in rest and "  --cpu-kernels" not in rest
    examples = kernels.partition("examples:")[2].strip().splitlines()
    assert 2 <= len(examples) <= 3 and all(f"granite4-neuron {command} " in example for example in examples)


def test_help_of_generate(run):
    _, output, _ = run("generate", "--help")
    for option in ("--model", "--chat", "--system", "--file", "--max-tokens", "--temperature", "--top-p", "--seed"):
        assert option in output


NEED_NO_TORCH = [
    ("--help",),
    ("--version",),
    ("info", "--model", "h-small"),
    ("info",),
    ("sing",),
    ("generate", "--model", "h-350m", "x"),
    ("generate",),
    *([] if os.path.exists("/dev/nvidiactl") else [("generate", "--backend", "torch", "--device", "cuda", "A")]),
    *([] if importlib.util.find_spec("torch_xla") else [("graphs",), ("graphs", "--backend", "nxdi")]),
    *([] if importlib.util.find_spec("torch_mlir") else [("graphs", "--backend", "torch")]),
    *[(command, "--help") for command in COMMANDS],
]


@pytest.mark.slow_cases
@pytest.mark.parametrize("arguments", NEED_NO_TORCH, ids=" ".join)
def test_commands_that_need_no_torch_do_not_import_it(arguments):
    """The list of imported modules is checked and not the time, which importing them takes."""
    program = """
import sys
from granite4_neuron.commands.cli import main, parser
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("imported:", *(name for name in sys.modules if "." not in name))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    imported = set(done.stdout.splitlines()[-1].partition("imported: ")[2].split())
    assert "granite4_neuron" in imported
    heavy = {"torch", "transformers", "jax", "torch_xla", "tokenizers", "matplotlib", "prompt_toolkit"}
    assert imported & heavy == set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(run, shell):
    pytest.importorskip("shtab")
    status, output, _ = run("--print-completion", shell)
    assert status == 0 and all(command in output for command in COMMANDS) and "max-tokens" in output


def test_completion_without_shtab(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, output, error = run("--print-completion", "bash")
    assert (status, output) == (2, "") and "install it with: pip install shtab" in error


def test_version(run):
    status, output, _ = run("--version")
    assert status == 0 and re.fullmatch(r"granite4-neuron \d+\.\d+\.\d+\n", output)


def test_threads(run, texting_folder):
    before = torch.get_num_threads()
    try:
        assert run("generate", "--model", texting_folder, "--max-tokens", 1, "--threads", 1, "x")[0] == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_standard_output(texting_folder):
    command = [sys.executable, "-m", "granite4_neuron.commands.cli", "generate", "--model", str(texting_folder), "text"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == (
        "granite4-neuron: the output cannot be written (No space left on device).\n"
    )


@pytest.mark.slow
def test_a_reader_that_goes_away_causes_no_error(texting_folder):
    """This happens with `granite4-neuron generate ... | head -c 1`."""
    command = [sys.executable, "-m", "granite4_neuron.commands.cli", "generate", "--model", str(texting_folder), "text"]
    process = subprocess.Popen([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait() == 141 and error == ""


def test_a_long_prompt_shows_progress(run, texting_folder, monkeypatch):
    """The bar goes to standard error, and only if there is more than one step to wait for."""
    monkeypatch.setattr("granite4_neuron.devices.cpu.runtime.CPURuntime.tokens_per_step", 64)
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=sys.stderr, force_terminal=True))
    short = run("generate", "--model", texting_folder, "--max-tokens", 1, "x" * 60)
    long = run("generate", "--model", texting_folder, "--max-tokens", 1, "x" * 300)
    assert "tokens" not in short[2] and "300" in long[2] and "tokens" in long[2]


def test_a_comparison_shows_progress(run, texting_folder, monkeypatch):
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=sys.stderr, force_terminal=True))
    common = ("check", "--model", texting_folder, "--tokens", 1, "--cpu-kernels", "torch")
    for options, parts in ((("--prompt", "A", "--prompt", "B"), 5), (("--prompt", "A", "--layers"), 6)):
        status, _, error = run(*common, *options)
        assert status == 0 and f"{parts}/{parts}" in error and "Loading weights" not in error


def test_the_command_that_installs_torch_xla():
    requirements = Path(__file__).parents[3] / "requirements" / "xla.txt"
    for requirement in re.findall(r"'(.*?)'", sdk.INSTALL_TORCH_XLA):
        assert requirement in requirements.read_text().splitlines()


@pytest.mark.parametrize(
    "backend, missing, message",
    [
        ("xla", "torch_xla", sdk.INSTALL_TORCH_XLA),
        ("torch", "torch_mlir", sdk.INSTALL_TORCH_MLIR),
        ("nxdi", "torch_xla", "pip install -r requirements/nxdi.txt"),
        ("nxdi", "torch_neuronx", "git clone https://github.com/aws-neuron/neuronx-distributed-inference"),
    ],
)
def test_graphs_names_the_command_that_installs_a_missing_package(run, monkeypatch, backend, missing, message):
    there = importlib.util.find_spec
    found = {missing: None} | ({"torch_xla": there("json")} if missing == "torch_neuronx" else {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name] if name in found else there(name))
    monkeypatch.setitem(sys.modules, missing, None)
    for name in SOURCES:
        monkeypatch.delenv(name, raising=False)
    status, _, error = run("graphs", "--backend", backend, "--buckets", "16", "--max-length", "32")
    assert status == 2 and message in error


class TestPlots:
    """The plots of commands, read as the text of an SVG file."""

    @pytest.fixture
    def drawn(self, run, tmp_path, monkeypatch):
        matplotlib = pytest.importorskip("matplotlib", reason="granite4-neuron[plot] is not installed")
        monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")

        def draw(*arguments):
            file = tmp_path / "plot.svg"
            status, output, error = run(*arguments, "--plot", file)
            assert status == 0, error
            return output, file.read_text()

        return draw

    def test_evaluate(self, drawn, texting_folder, tmp_path):
        (tmp_path / "text").write_text("Words that a model has never seen. " * 6)
        common = ("evaluate", tmp_path / "text", "--model", texting_folder)
        _, alone = drawn(*common)
        assert "perplexity" in alone and "divergence" not in alone
        _, compared = drawn(*common, "--compare", "bfloat16")
        assert all(f">{text}<" in compared for text in ("float32", "bfloat16", "divergence from float32"))

    def test_predicted_latency(self, drawn):
        output, drawing = drawn("plan", "--model", "h-350m", "--latency")
        steps = re.findall(r"^[│|] (\w[\w ,.]*?) +[│|] +(\d+) +[│|]", output, re.MULTILINE)
        assert steps and all(f">{step}, batch {batch}<" in drawing for step, batch in steps)

    def test_tuning_shows_progress_and_a_plot(self, drawn, run, tmp_path, monkeypatch):
        from granite4_neuron.devices.cpu import tuning

        monkeypatch.setattr(tuning, "_step_times", lambda model, name, value: [value / 1000] * 3)
        monkeypatch.setattr(tuning.cpu, "has_fused_kernels", lambda: True)
        monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=sys.stderr, force_terminal=True))
        output, drawing = drawn("tune", "--output", tmp_path / "tuned")
        assert "chunk_size is 32: 32.00 ms with 32" in output and ">heads_per_task: 1<" in drawing
        _, _, error = run("tune", "--output", tmp_path / "tuned")
        assert "65/65" in error and "values" in error, "13 values, each in 5 turns"

    def test_without_matplotlib(self, run, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        status, _, error = run("plan", "--model", "h-350m", "--latency", "--plot", tmp_path / "x.png")
        assert status == 2 and "--plot needs matplotlib; install it with: pip install 'granite4-neuron[plot]'" in error


class TestNeuronSdkIsMissing:
    """Each command that needs the SDK says so in one sentence and leaves nothing behind."""

    @pytest.fixture(autouse=True)
    def no_sdk(self, monkeypatch):
        monkeypatch.setattr(sdk, "PACKAGES", ("torch", "torch_neuronx_that_is_not_here"))

    def test_compile(self, case_folder, tmp_path, capsys):
        output = tmp_path / "graphs"
        assert main(["compile", "--model", str(case_folder), "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert "missing here: torch_neuronx_that_is_not_here." in error and sdk.GUIDE in error
        assert not output.exists()

    def test_generate(self, tmp_path, capsys):
        assert main(["generate", "text", "--backend", "nxdi", "--compiled", str(tmp_path)]) == 2
        assert "missing here: torch_neuronx_that_is_not_here." in capsys.readouterr().err

    def test_compiled_graphs_belong_to_the_backend(self, capsys):
        assert main(["generate", "text", "--backend", "nxdi"]) == 2
        assert "the backend nxdi needs a folder of compiled graphs" in capsys.readouterr().err
        assert main(["generate", "text", "--compiled", "folder"]) == 2
        assert "compiled graphs are for the backend nxdi; the backend here is cpu" in capsys.readouterr().err

    def test_lengths(self, case_folder, tmp_path, capsys):
        arguments = ["compile", "--model", str(case_folder), "--output", str(tmp_path / "graphs")]
        assert main([*arguments, "--max-context-length", "300", "--seq-len", "200"]) == 2
        assert "--seq-len is 200; it must be at least --max-context-length, which is 300" in capsys.readouterr().err
        for option, limit in (
            ("--context-buckets", "--max-context-length, which is 512"),
            ("--token-buckets", "--seq-len, which is 4096"),
        ):
            assert main([*arguments, option, "128", "256"]) == 2
            assert f"{option} ends with 256; its largest must be {limit}." in capsys.readouterr().err
