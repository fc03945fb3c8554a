"""Drafts by a model, sampled drafts, bfloat16, machines on which the kernels cannot be compiled, and other plugins."""

import os

import pytest
import torch

from granite4_neuron.checkpoint_folder import bundled_checkpoint
from test.vllm.conftest import ALL, NGRAM, ONE_PROCESS, Greedy, prompts_of, run_engines

PROPOSER = "granite4_neuron.vllm_cpu.draft_model.DraftModelProposer"


@pytest.fixture(scope="module")
def folder():
    return str(bundled_checkpoint())


@pytest.fixture(scope="module")
def greedy(folder):
    return Greedy(folder)


@pytest.fixture(scope="module")
def prompts(greedy):
    return prompts_of(greedy.model.config.vocab_size)[: len(ALL)]


def drafted_by(method, model, **options):
    return dict(options, speculative_config=dict(method=method, model=model, num_speculative_tokens=3))


@pytest.fixture(scope="module")
def drafted(folder, prompts, tmp_path_factory):
    key = {"additional_config": {"granite4_draft_model": folder}}
    engines = {
        "custom_class": dict(options=drafted_by("custom_class", PROPOSER, max_num_seqs=8, **key)),
        "custom_class, prefix caching": dict(
            options=drafted_by("custom_class", PROPOSER, max_num_seqs=8, enable_prefix_caching=True, **key)
        ),
        "draft_model": dict(options=drafted_by("draft_model", folder), prompts=[0]),
        "sampled": dict(options=dict(speculative_config=NGRAM), sampling=dict(temperature=0.001)),
    }
    engines = {name: dict(engine, model=folder) for name, engine in engines.items()}
    return run_engines(engines, prompts, tmp_path_factory.mktemp("drafted"), **ONE_PROCESS)


@pytest.mark.parametrize("name", ["custom_class", "custom_class, prefix caching"])
def test_a_hybrid_draft_model(drafted, greedy, prompts, name):
    assert greedy.right(prompts, drafted[name]) == [len(prompts)]
    metrics = drafted[name]["metrics"]
    assert metrics["accepted"] > 0.9 * metrics["drafts"] > 0  # it is the model itself


def test_what_vllm_cannot_draft_with_is_refused(drafted):
    assert "cannot draft for or with a hybrid model; use custom_class" in drafted["draft_model"]["error"]


def test_temperatures_of_sampled_drafts(drafted, greedy, prompts):
    """So cold that the text is the greedy one; vLLM's own temperatures are whatever is in memory."""
    assert greedy.right(prompts, drafted["sampled"]) == [len(prompts)]


def test_without_a_compiler(folder, greedy, prompts, tmp_path):
    """Plain torch computes the same, and one line says so."""
    options = dict(enable_prefix_caching=True, speculative_config=NGRAM)
    environment = dict(ONE_PROCESS, CXX="false", XDG_CACHE_HOME=str(tmp_path / "cache"))
    results = run_engines({"plain": dict(model=folder, options=options)}, prompts, tmp_path, **environment)
    assert greedy.right(prompts, results["plain"]) == [len(prompts)]
    assert results["log"].count("install a C++ compiler such as g++") == 1


OTHER_PLUGIN = """
def register():
    from vllm.model_executor.models import granitemoehybrid

    class OtherLayer(granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer):
        pass

    layers = granitemoehybrid.ALL_DECODER_LAYER_TYPES
    layers.update({name: OtherLayer for name, layer in layers.items() if issubclass(OtherLayer, layer)})
"""


def test_a_layer_of_another_plugin(folder, greedy, prompts, tmp_path):
    """The layers are left to vLLM, with this package's mixer in them, and one line says so."""
    information = tmp_path / "other-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other_plugin:register\n")
    (tmp_path / "other_plugin.py").write_text(OTHER_PLUGIN)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    engine = dict(model=folder, options=dict(enable_prefix_caching=True, speculative_config=NGRAM))
    results = run_engines({"other": engine}, prompts, tmp_path, **ONE_PROCESS, PYTHONPATH=path)
    assert greedy.right(prompts, results["other"]) == [len(prompts)]
    (line,) = (line for line in results["log"].splitlines() if "does not know the layer" in line)
    assert "WARNING" in line and "OtherLayer" in line


def test_bfloat16(folder, greedy, prompts, tmp_path_factory):
    """The mean error of log probabilities is not above that of vLLM as it is."""
    engine = dict(model=folder, options=dict(dtype="bfloat16"), sampling=dict(prompt_logprobs=0, max_tokens=1))
    errors = {}
    for name, environment in (("this package", {}), ("vLLM", dict(VLLM_PLUGINS=""))):
        where = tmp_path_factory.mktemp("bfloat16")
        result = run_engines({"one": engine}, prompts, where, **ONE_PROCESS, **environment)["one"]
        assert "error" not in result, result["error"]
        errors[name] = [
            (torch.tensor(logprobs) - exact).abs()
            for logprobs, exact in zip(result["prompt_logprobs"], map(greedy.logprobs, prompts), strict=True)
        ]
    ours, theirs = (torch.cat(of_prompts).mean() for of_prompts in errors.values())
    assert 0 < ours <= theirs
