"""Greedy texts in float32 are those of transformers, whatever vLLM does at the same time."""

import pytest
import torch

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from test.support.checkpoints import CASES, NEMOTRON_CASES, nemotron_config, small_config
from test.vllm.conftest import ALL, CROWDED, NGRAM, ONE_PROCESS, TOKENS, Greedy, prompts_of, run_engines

PREFIX = dict(enable_prefix_caching=True)
SPECULATION = dict(speculative_config=NGRAM)
CHUNKS = dict(max_num_batched_tokens=256)
COMPILED = dict(enforce_eager=False)


def crowded(blocks, **options):
    """Return options with so little cache that some sequences are preempted."""
    return dict(options, max_model_len=512, num_gpu_blocks_override=blocks)


OPTIONS = {
    "alone": dict(max_num_seqs=1),
    "plain": {},
    "chunked prefill": CHUNKS,
    "prefix caching": PREFIX,
    "n-gram": SPECULATION,
    "n-gram, chunked prefill": {**SPECULATION, **CHUNKS},
    "prefix caching, n-gram": {**PREFIX, **SPECULATION},
    "prefix caching, n-gram, chunked prefill": {**PREFIX, **SPECULATION, **CHUNKS},
    "compiled": COMPILED,
    "compiled, prefix caching, n-gram": {**COMPILED, **PREFIX, **SPECULATION},
}
PREEMPTED = {
    "preempted": crowded(22),
    "preempted, chunked prefill": crowded(22, **CHUNKS),
    "preempted, prefix caching": crowded(26, **PREFIX),
    "preempted, n-gram": crowded(34, **SPECULATION),
    "preempted, prefix caching, n-gram": crowded(34, **PREFIX, **SPECULATION),
    "preempted, prefix caching, n-gram, chunked prefill": crowded(34, **PREFIX, **SPECULATION, **CHUNKS),
}
EVERYTHING = {**PREFIX, **SPECULATION, **CHUNKS}
PROCESSES = {
    "tensor parallel": {**EVERYTHING, "tensor_parallel_size": 2},
    "pipeline parallel": {**COMPILED, **PREFIX, **CHUNKS, "pipeline_parallel_size": 2},
}
# Ways to serve over two ranks.
RANKS = {
    "alone": dict(max_num_seqs=1),
    "together": {},
    "n-gram, chunked prefill": {**SPECULATION, **CHUNKS},
}
REPLICAS = {**EVERYTHING, "data_parallel_size": 2, "skip_tokenizer_init": True}
FEW = (0, 3, 5, 7)  # vLLM's processes wait for one another at every layer
A_PROCESSOR_EACH = dict(VLLM_CPU_OMP_THREADS_BIND="0|1")  # the machine may have one NUMA node
# pytest -m "not slow" runs these, which together test each part of this package.
FAST = {
    "alone", "prefix caching, n-gram, chunked prefill", "preempted, prefix caching, n-gram, chunked prefill",
    "tensor parallel", "nemotron_dense",
}  # fmt: skip
# vLLM's attention needs heads of 32 or wider. An untied head keeps a random model from repeating its last token.
WIDE = dict(hidden_size=128, mamba_n_heads=8, mamba_d_head=32, tie_word_embeddings=False)
FAMILY = (
    "moe", "dense", "conv3_no_bias", "projection_bias", "rope", "attention_only_rope",
    "attention_only_nope", "time_step_limit", "one_expert_per_token", "nemotron_dense",
)  # fmt: skip


def cases(names):
    return [pytest.param(name, marks=[] if name in FAST else [pytest.mark.exhaustive], id=name) for name in names]


def selected(request, test):
    """Return the cases of a test that this session runs."""
    return {item.callspec.params["name"] for item in request.session.items if item.originalname == test.__name__}


def random_checkpoint(name, where):
    """Write a small model with the traits of the named case, and return its folder."""
    (case,) = (case for case in (*CASES, *NEMOTRON_CASES) if case.name == name)
    if case in NEMOTRON_CASES:
        config = nemotron_config(**{**case.changes, **WIDE, "head_dim": 32})
    else:
        config = small_config(**{**case.changes, **WIDE})
    save_model(random_model(config, seed=len(name)), where / name)
    return where / name


def engine(options, model, prompts):
    return dict(model=str(model), options=options, prompts=list(prompts), rounds=1 + options.get(*PREFIX, False))


@pytest.fixture(scope="module")
def folder():
    return bundled_checkpoint()


@pytest.fixture(scope="module")
def greedy(folder):
    return Greedy(folder)


@pytest.fixture(scope="module")
def prompts(greedy):
    return prompts_of(greedy.model.config.vocab_size)


@pytest.fixture(scope="module")
def served(request, folder, prompts, tmp_path_factory):
    engines = {name: engine(options, folder, ALL) for name, options in OPTIONS.items()}
    engines |= {name: engine(options, folder, CROWDED) for name, options in PREEMPTED.items()}
    wanted = selected(request, test_texts_in_one_process_are_greedy) | selected(
        request, test_preempted_texts_are_greedy
    )
    engines = {name: engine for name, engine in engines.items() if name in wanted}
    return run_engines(engines, prompts, tmp_path_factory.mktemp("one process"), **ONE_PROCESS)


@pytest.fixture(scope="module")
def served_by_several(request, folder, prompts, tmp_path_factory):
    engines = {name: engine(PROCESSES[name], folder, FEW) for name in selected(request, test_several_processes)}
    return run_engines(engines, prompts, tmp_path_factory.mktemp("processes"), **A_PROCESSOR_EACH)


def check(result, greedy, prompts, options):
    assert set(greedy.right(prompts, result)) == {len(prompts)}
    if "enable_prefix_caching" in options:
        assert result["cached"][-1] > 0
    if "speculative_config" in options:
        assert 0 < result["metrics"]["accepted"] < result["metrics"]["drafts"]


@pytest.mark.parametrize("name", cases(OPTIONS))
def test_texts_in_one_process_are_greedy(served, greedy, prompts, name):
    check(served[name], greedy, prompts[: len(ALL)], OPTIONS[name])


@pytest.mark.parametrize("name", cases(PREEMPTED))
def test_preempted_texts_are_greedy(served, greedy, prompts, name):
    check(served[name], greedy, prompts[len(ALL) :], PREEMPTED[name])
    assert served[name]["metrics"]["preemptions"] > 0


@pytest.mark.parametrize("name", cases(PROCESSES))
def test_several_processes(served_by_several, greedy, prompts, name):
    check(served_by_several[name], greedy, [prompts[number] for number in FEW], PROCESSES[name])


@pytest.mark.exhaustive
def test_two_ranks_within_rounding(folder, prompts, tmp_path):
    """With tensor parallelism the layers around the mixer are vLLM's, whose products depend on the number of rows."""
    engines = {
        name: engine({**options, "tensor_parallel_size": 2}, folder, range(8)) | dict(sampling=dict(logprobs=0))
        for name, options in RANKS.items()
    }
    results = run_engines(engines, prompts, tmp_path, **A_PROCESSOR_EACH)
    assert all("error" not in results[name] for name in RANKS)
    alone = torch.tensor(results["alone"]["logprobs"])
    assert alone.shape == (8, TOKENS)
    for name in RANKS:
        assert results[name]["tokens"] == results["alone"]["tokens"]
        assert (torch.tensor(results[name]["logprobs"]) - alone).abs().max() <= 1e-4
    assert results["n-gram, chunked prefill"]["metrics"]["accepted"]


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    """Return (folders, prompts, results) of random checkpoints that together have the traits of the family."""
    where = tmp_path_factory.mktemp("family")
    folders = {name: random_checkpoint(name, where) for name in selected(request, test_texts_of_the_family_are_greedy)}
    prompts = prompts_of(small_config().vocab_size)
    options = {**EVERYTHING, "skip_tokenizer_init": True}
    engines = {name: engine(options, folder, ALL) for name, folder in folders.items()}
    return folders, prompts, run_engines(engines, prompts, tmp_path_factory.mktemp("served"), **ONE_PROCESS)


@pytest.mark.parametrize("name", cases(FAMILY))
def test_texts_of_the_family_are_greedy(family, name):
    folders, prompts, results = family
    check(results[name], Greedy(folders[name]), prompts[: len(ALL)], EVERYTHING)


@pytest.mark.exhaustive
def test_texts_of_replicas_are_greedy(folder, tmp_path):
    """A model without experts has replicas. vLLM cannot spread experts over a CPU's processes, and an error says so."""
    dense = random_checkpoint("dense", tmp_path)
    prompts = prompts_of(small_config().vocab_size)
    engines = {"dense": engine(REPLICAS, dense, FEW), "experts": engine(REPLICAS, folder, FEW)}
    results = run_engines(engines, prompts, tmp_path, **A_PROCESSOR_EACH)
    check(results["dense"], Greedy(dense), [prompts[number] for number in FEW], REPLICAS)
    assert "no data parallelism with experts on a CPU; start a server for each replica" in results["experts"]["error"]


@pytest.mark.exhaustive
def test_vllm_without_this_package_would_be_seen(folder, greedy, prompts, tmp_path):
    """vLLM's own mixer in place of ours gives wrong text or an error, so these tests can fail."""
    wrong = {name: OPTIONS[name] for name in ("n-gram", "prefix caching", "prefix caching, n-gram")}
    engines = {name: engine(options, folder, ALL) for name, options in wrong.items()}
    results = run_engines(engines, prompts, tmp_path, **ONE_PROCESS, VLLM_PLUGINS="")
    assert greedy.right(prompts[: len(ALL)], results["n-gram"]) == [0]
    assert all("error" in results[name] for name in wrong if name != "n-gram")
