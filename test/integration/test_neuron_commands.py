"""Commands with --backend nxdi in NxD Inference's CPU mode give the text of the cpu backend."""

import json
import re
from concurrent import futures

import pytest
import torch

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.commands.cli import main
from granite4_neuron.config import config_from_file
from granite4_neuron.devices.neuron import sdk
from granite4_neuron.devices.neuron.compiled_graphs import compiled_ranks
from granite4_neuron.devices.neuron.sdk import KERNELS
from test.integration.test_model import cpu_mode  # noqa: F401 (a fixture)
from test.support import nxdi
from test.support.checkpoints import save_byte_tokenizer, small_config

PROMPT = "A text of some length, which says the same again: a text of some length, which says"
SLOTS, VERIFIED, LONGEST = 6, 4, 256
OPTIONS = (
    "batch_size",
    "ctx_batch_size",
    "is_continuous_batching",
    "speculation_length",
    "max_context_length",
    "seq_len",
    "enable_bucketing",
    "context_encoding_buckets",
    "token_generation_buckets",
)

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("cpu_mode")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a random checkpoint that the NKI kernels also take."""
    return saved(tmp_path_factory.mktemp("commands") / "model", layer_types=("mamba", "attention", "mamba"))


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("commands") / "draft", layer_types=("mamba", "attention"))


def saved(path, **options):
    sizes = dict(vocab_size=264, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=64, max_position_embeddings=LONGEST)
    save_model(
        random_model(small_config(**{**sizes, "eos_token_id": 1, "tie_word_embeddings": False, **options})), path
    )
    save_byte_tokenizer(path)
    return path


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Replace the SDK: compiling saves only the config, and models run in CPU mode. Return the loaded models."""
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM, loading
    from granite4_neuron.devices.neuron.nxdi.runtime import NeuronRuntime

    loaded = []

    def load_compiled(folder, compiled, generation_config):
        config = loading.GraniteMoeHybridInferenceConfig.load(str(compiled))
        assert config.granite == config_from_file(folder / "config.json")
        options = {name: getattr(config.neuron_config, name) for name in OPTIONS}
        model = nxdi.cpu_model(
            folder, {name: getattr(config, name) for name in (*KERNELS["torch"], "state_dtype")}, **options
        )
        loaded.append(model)
        return NeuronRuntime(model, generation_config)

    monkeypatch.setattr(NeuronGraniteMoeHybridForCausalLM, "compile", lambda model, path: model.config.save(path))
    monkeypatch.setattr(sdk, "require", lambda: None)
    monkeypatch.setattr(loading, "load_compiled", load_compiled)
    return loaded


@pytest.fixture
def command(capsys, folder):
    """Return a function that runs the command and returns (status, standard output, standard error)."""

    def run(name, *arguments):
        arguments = (name, "--model", folder, *arguments)
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return run


@pytest.fixture
def generate(command):
    def run(*arguments):
        return command("generate", "--ignore-eos", "--max-tokens", 12, "--verbose", *arguments)

    return run


@pytest.fixture
def graphs(command, tmp_path):
    """Return a function that compiles and returns the options that run the compiled model."""

    def compiled(*options):
        folder = tmp_path / f"graphs{len(list(tmp_path.iterdir()))}"
        sizes = ("--tp-degree", 1, "--max-context-length", 128, "--seq-len", LONGEST)
        status, _, report = command("compile", *sizes, *options, "--output", folder)
        assert status == 0, report
        assert compiled_ranks(folder) == 1
        return ["--backend", "nxdi", "--compiled", folder]

    return compiled


def test_a_draft_model_changes_no_text(generate, graphs, draft_folder, device):
    expected = generate(PROMPT)[1]
    with_draft = graphs("--verify", VERIFIED, "--draft-model", draft_folder)
    assert {path.name for path in with_draft[-1].iterdir()} == {"draft", "neuron_config.json"}
    status, text, report = generate(PROMPT, *with_draft, "--draft-model", draft_folder, "--draft-tokens", 3)
    assert (status, text) == (0, expected), report
    assert re.search(r"speculation: \d+% of \d+ drafts accepted", report)
    assert [len(model.config.granite.layer_types) for model in device] == [3, 2]
    status, text, report = generate(PROMPT, *with_draft, "--speculate", "ngram:3")
    assert (status, text) == (0, expected), report


def test_a_draft_of_itself_is_always_right(generate, graphs, folder):
    with_draft = graphs("--verify", VERIFIED, "--draft-model", folder)
    assert "100% of" in generate(PROMPT, *with_draft, "--draft-model", folder)[2]


def test_buckets_and_jobs(generate, graphs, device, monkeypatch):
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    threads = []

    def compile(model, path):
        with futures.ThreadPoolExecutor() as executor:
            threads.append(executor._max_workers)
        model.config.save(path)

    monkeypatch.setattr(NeuronGraniteMoeHybridForCausalLM, "compile", compile)
    compiled = graphs("--context-buckets", 32, 128, "--token-buckets", 64, LONGEST, "--jobs", 3, "--batch-size", 2)
    prompts = ("Short", PROMPT)
    status, texts, report = generate(*prompts, *compiled)
    assert (status, texts) == (0, generate(*prompts)[1]), report
    (model,) = device
    assert model.context_encoding_model.neuron_config.buckets == [32, 128]
    assert model.token_generation_model.neuron_config.buckets == [64, LONGEST]
    assert threads == [3] and isinstance(futures.ThreadPoolExecutor, type), "the bound is for compiling only"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), KERNELS["torch"]),
        (("--kernels", "nki", "--expert-path", "torch"), dict(KERNELS["nki"], expert_path="torch")),
        (
            ("--kernels", "nki", "--expert-path", "torch", "--prefill-scan", "scan"),
            dict(decode_kernel="nki", prefill_scan="scan"),
        ),
        (("--decode-kernel", "nki"), dict(decode_kernel="nki")),
    ],
)
def test_kernels_are_chosen_by_one_name_or_each(graphs, options, expected):
    config = json.loads((graphs(*options)[-1] / "neuron_config.json").read_text())
    chosen = {name: config.get(name, KERNELS["torch"][name]) for name in KERNELS["torch"]}
    assert chosen == KERNELS["torch"] | expected


def test_attention_torch_turns_the_kernel_off(graphs):
    for options, enabled in (((), None), (("--attention", "torch"), False)):
        config = json.loads((graphs(*options)[-1] / "neuron_config.json").read_text())
        assert config["neuron_config"]["attn_kernel_enabled"] is enabled


def test_a_failure_names_other_forms_of_graphs(graphs, monkeypatch, capsys, tmp_path):
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    def compile(model, path):
        raise RuntimeError("NCC_INLA001")

    monkeypatch.setattr(NeuronGraniteMoeHybridForCausalLM, "compile", compile)
    with pytest.raises(RuntimeError, match="NCC_INLA001"):
        graphs()
    assert "try --prefill-scan quadratic" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_begin_alike_share_slots(generate, graphs):
    prompts = [PROMPT + end for end in (" one thing", " another", "")]
    expected = generate(*prompts)[1]
    compiled = graphs("--batch-size", SLOTS)
    status, texts, report = generate(*prompts, *compiled, "--prefix-cache", "1GiB")
    assert (status, texts) == (0, expected), report
    assert f"prefix cache: {2 * len(PROMPT)} tokens found" in report
    assert f"prefill: {len(''.join(prompts)) - 2 * len(PROMPT)} tokens" in report


@torch.inference_mode()
def test_a_bug_of_slots_is_seen(generate, graphs, monkeypatch):
    """The planted bug is a copy that does nothing."""
    from granite4_neuron.devices.neuron.nxdi.runtime import NeuronRuntime

    prompts = [PROMPT + end for end in (" one thing", " another", "")]
    expected = generate(*prompts)[1]
    monkeypatch.setattr(NeuronRuntime, "copy", lambda *args: None)
    assert generate(*prompts, *graphs("--batch-size", SLOTS), "--prefix-cache", "1GiB")[1] != expected


def test_states_of_16_bits(generate, graphs, device, monkeypatch):
    """The compiled graphs handle states of 16 bits. The text of a few tokens is the same."""
    expected = generate(PROMPT, "--max-tokens", 4)[1]
    compiled = graphs("--state-dtype", "bfloat16", "--prefill-scan", "ssd", "--decode-kernel", "nki")
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    status, text, report = generate(PROMPT, *compiled, "--max-tokens", 4)
    assert (status, text) == (0, expected), report
    states = device[0].models[0].model.kv_mgr.past_key_values
    assert [states[place].dtype for place in (0, 1, 4, 5)] == [torch.float32, torch.bfloat16] * 2


def test_what_the_compiled_graphs_cannot_do_is_refused(command, generate, graphs, draft_folder, tmp_path):
    compiled, other = graphs(), tmp_path / "other"
    sizes = ("--tp-degree", 1, "--max-context-length", 128, "--seq-len", LONGEST, "--output", other)
    wide = saved(tmp_path / "wide", vocab_size=300)
    for arguments, message in (
        (["compile", *sizes, "--draft-model", draft_folder], "--draft-model needs --verify"),
        (["compile", *sizes, "--verify", 4, "--draft-model", wide], "has another vocabulary than the model"),
        (["compile", *sizes, "--verify", 4, "--draft-model", tmp_path / "none"], "none"),
        (["compile", *sizes, "--state-dtype", "bfloat16"], "need decode_kernel='nki'"),
        (["generate", PROMPT, *compiled, "--speculate", "ngram"], "compile it with --verify"),
        (["generate", PROMPT, *compiled, "--prefix-cache", "1GiB"], "there is no other slot to copy it to"),
        (["generate", PROMPT, *compiled, "--prompt-cache", tmp_path / "file"], "keeps the state on the device"),
        (["generate", PROMPT, *compiled, "--state-dtype", "bfloat16"], "were chosen when they were compiled"),
    ):
        status, _, report = command(*arguments)
        assert status == 2 and message in report, report
        assert not other.exists()
    compiled = graphs("--batch-size", 2, "--verify", 4)
    for arguments, message in (
        ([PROMPT, PROMPT, "--prefix-cache", "1GiB"], "compiled for 2 sequences, and 2 run at a time"),
        ([PROMPT, "--prefix-cache", "1KiB"], "the prefix cache has 1,024"),
        ([PROMPT, "--draft-model", draft_folder], "no graphs of a draft model; compile it with --draft-model"),
    ):
        status, _, report = generate(*arguments, *compiled)
        assert status == 2 and message in report, report
