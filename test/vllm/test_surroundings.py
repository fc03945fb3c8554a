"""Drafts by a model, sampling, bfloat16, refusals, a machine without a compiler, other plugins, and a vLLM that
this package does not know.
"""

import os

import pytest
import torch

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from test.vllm.conftest import ALL, NGRAM, ONE_PROCESS, Greedy, prompts_of, run_engines

MODEL = str(bundled_checkpoint())
PROPOSER = "granite4_neuron.vllm.cpu.draft_model.DraftModelProposer"


# The options, and the error for them.
REFUSED = {
    "draft_model": (
        dict(speculative_config=dict(method="draft_model", model=MODEL, num_speculative_tokens=3)),
        "cannot draft for or with a hybrid model; use custom_class",
    ),
    "LoRA": (dict(enable_lora=True), "has no LoRA in vLLM; convert --adapter merges one into a checkpoint."),
    "fp8": (dict(kv_cache_dtype="fp8"), "no cache of fp8 with a model of float32; leave out --kv-cache-dtype."),
}
SEEDED = [number for number in ALL if number % 3]


@pytest.fixture(scope="module")
def folder():
    return MODEL


@pytest.fixture(scope="module")
def greedy(folder):
    return Greedy(folder)


@pytest.fixture(scope="module")
def prompts(greedy):
    return prompts_of(greedy.model.config.vocab_size)[: len(ALL)]


def drafted_by(method, model, **options):
    return dict(options, speculative_config=dict(method=method, model=model, num_speculative_tokens=3))


@pytest.fixture(scope="module")
def served(folder, prompts, tmp_path_factory):
    key = {"additional_config": {"granite4_draft_model": folder}}
    seeds = [dict(temperature=1.0, **({"seed": number} if number in SEEDED else {})) for number in ALL]
    engines = {
        "custom_class": dict(options=drafted_by("custom_class", PROPOSER, max_num_seqs=8, **key)),
        "custom_class, prefix caching": dict(
            options=drafted_by("custom_class", PROPOSER, max_num_seqs=8, enable_prefix_caching=True, **key)
        ),
        "sampled": dict(options=dict(speculative_config=NGRAM), sampling=dict(temperature=0.001)),
        "seeds, alone": dict(options=dict(max_num_seqs=1), sampling=seeds),
        "seeds, together": dict(options=dict(max_num_batched_tokens=256), sampling=seeds),
        **{name: dict(options=options, prompts=[0]) for name, (options, _) in REFUSED.items()},
    }
    engines = {name: dict(engine, model=folder) for name, engine in engines.items()}
    return run_engines(engines, prompts, tmp_path_factory.mktemp("served"), **ONE_PROCESS)


@pytest.mark.parametrize("name", ["custom_class", "custom_class, prefix caching"])
def test_drafts_of_a_hybrid_model_change_no_text(served, greedy, prompts, name):
    assert greedy.right(prompts, served[name]) == [len(prompts)]
    metrics = served[name]["metrics"]
    assert metrics["accepted"] > 0.9 * metrics["drafts"] > 0  # the draft model is the model itself


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_options_are_refused(served, name):
    _, sentence = REFUSED[name]
    assert sentence in served[name]["error"]


def test_sampled_drafts_have_their_temperature(served, greedy, prompts):
    """The temperature is so low that the text is the greedy one. vLLM itself reads temperatures from unset memory."""
    assert greedy.right(prompts, served["sampled"]) == [len(prompts)]


def test_seeded_texts_do_not_depend_on_others(served):
    """A seeded request gets the same text alone and beside others, however prompts are cut. vLLM's own engine ends."""
    assert "error" not in served["seeds, together"], served["seeds, together"]["error"]
    (alone,), (together,) = (served[f"seeds, {how}"]["tokens"] for how in ("alone", "together"))
    assert [alone[number] for number in SEEDED] == [together[number] for number in SEEDED]
    assert len({tuple(text) for text in (*alone, *together)}) > len(ALL)  # the others have no fixed text


@pytest.mark.exhaustive
def test_plain_torch_gives_the_same_without_a_compiler(folder, greedy, prompts, tmp_path):
    """Plain torch computes the same, and one line says so."""
    options = dict(enable_prefix_caching=True, speculative_config=NGRAM)
    environment = dict(ONE_PROCESS, CXX="false", XDG_CACHE_HOME=str(tmp_path / "cache"))
    results = run_engines({"plain": dict(model=folder, options=options)}, prompts, tmp_path, **environment)
    assert greedy.right(prompts, results["plain"]) == [len(prompts)]
    assert results["log"].count("install a C++ compiler such as g++") == 1


def plugin(code, where):
    """Return the environment in which vLLM finds a further plugin before this package's."""
    information = where / "other-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other_plugin:register\n")
    (where / "other_plugin.py").write_text(code)
    return dict(PYTHONPATH=os.pathsep.join([str(where), *filter(None, [os.environ.get("PYTHONPATH")])]))


OTHER_LAYER = """
def register():
    from vllm.model_executor.models import granitemoehybrid

    class OtherLayer(granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer):
        pass

    layers = granitemoehybrid.ALL_DECODER_LAYER_TYPES
    layers.update({name: OtherLayer for name, layer in layers.items() if issubclass(OtherLayer, layer)})
"""


@pytest.mark.exhaustive
def test_layers_of_another_plugin_are_kept(folder, greedy, prompts, tmp_path):
    """vLLM keeps that plugin's layers, with this package's mixer in them, and one line says so."""
    engine = dict(model=folder, options=dict(enable_prefix_caching=True, speculative_config=NGRAM))
    results = run_engines({"other": engine}, prompts, tmp_path, **ONE_PROCESS, **plugin(OTHER_LAYER, tmp_path))
    assert greedy.right(prompts, results["other"]) == [len(prompts)]
    (line,) = (line for line in results["log"].splitlines() if "does not know the layer" in line)
    assert "WARNING" in line and "OtherLayer" in line


# A stand-in for a release that changes a function of the metadata builder. vLLM's own builder has imported the old one.
OTHER_VLLM = """
def register():
    from vllm.v1.attention.backends import mamba_attn, utils

    utils.mamba_get_block_table_tensor = lambda block_table: block_table
"""


@pytest.mark.exhaustive
def test_an_unknown_vllm_starts_without_speculation_only(folder, greedy, prompts, tmp_path):
    """vLLM's own mixer is right without speculation. With speculation it would be wrong, so no engine starts."""
    engines = {"plain": {}, "n-gram": dict(speculative_config=NGRAM)}
    engines = {name: dict(model=folder, options=options) for name, options in engines.items()}
    results = run_engines(engines, prompts, tmp_path, **ONE_PROCESS, **plugin(OTHER_VLLM, tmp_path))
    assert greedy.right(prompts, results["plain"]) == [len(prompts)]
    (line,) = (line for line in results["log"].splitlines() if "granite4-neuron does not take over this model" in line)
    assert "WARNING" in line and "mamba_get_block_table_tensor has the parameters block_table, and not" in line
    assert "wrong text on a CPU with speculation, and granite4-neuron does not take over" in results["n-gram"]["error"]
    assert "mamba_get_block_table_tensor has the parameters block_table, and not" in results["n-gram"]["error"]


def test_bfloat16_errors_are_bounded_by_vllms(folder, greedy, prompts, tmp_path_factory):
    """Mean errors of log-probabilities are at most vLLM's for prompts, and at most twice vLLM's for texts."""
    plain = dict(dtype="bfloat16")
    drafts = dict(plain, enable_prefix_caching=True, speculative_config=NGRAM)
    errors = {}
    for options, environment in (({"ours": plain, "drafts": drafts}, {}), ({"vLLM": plain}, dict(VLLM_PLUGINS=""))):
        sampling = dict(prompt_logprobs=0, logprobs=0, max_tokens=32)
        engines = {name: dict(model=folder, options=options[name], sampling=sampling) for name in options}
        results = run_engines(engines, prompts, tmp_path_factory.mktemp("bfloat16"), **ONE_PROCESS, **environment)
        errors |= {name: mean_errors(greedy, prompts, results[name]) for name in engines}
    for name in ("ours", "drafts"):
        (prompt_errors, text_errors), (their_prompt_errors, their_text_errors) = errors[name], errors["vLLM"]
        assert 0 < prompt_errors <= their_prompt_errors, errors
        assert 0 < text_errors <= 2 * their_text_errors, errors


def mean_errors(greedy, prompts, result):
    """Return the mean errors of prompts and of the texts after them."""
    assert "error" not in result, result["error"]
    prompt_errors, text_errors = [], []
    for prompt, text, logprobs in zip(prompts, result["tokens"][0], result["logprobs"], strict=True):
        errors = (torch.tensor(logprobs) - greedy.logprobs(prompt + text)).abs()
        prompt_errors.append(errors[: len(prompt) - 1])
        text_errors.append(errors[len(prompt) - 1 :])
    return torch.cat(prompt_errors).mean().item(), torch.cat(text_errors).mean().item()
