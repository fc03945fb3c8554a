"""The config of the NxD Inference port: settings that it refuses, and settings that it saves and reads back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from granite4_neuron.config import MAMBA, config_from_file
from granite4_neuron.devices.neuron.compiled_graphs import (
    COMMIT,
    CONTEXT,
    CONTINUATION,
    COPY,
    TOKEN,
    VERIFICATION,
    CompiledGraph,
    GraphOptions,
    default_context_buckets,
)
from granite4_neuron.errors import UserError
from test.support import nxdi
from test.support.checkpoints import CASES

pytestmark = pytest.mark.versions


@pytest.fixture(scope="module", autouse=True)
def nxd_inference():
    nxdi.skip_unless_importable()


@pytest.fixture
def folder(random_checkpoints):
    return random_checkpoints(CASES[0])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(sequence_parallel_enabled=True), "sequence_parallel_enabled is True; this model runs with False only"),
        (dict(padding_side="left"), "padding_side is 'left'; this model runs with 'right' only"),
        (dict(windowed_context_encoding_size=64), "windowed_context_encoding_size is 64; this model runs with None"),
        (dict(speculation_length=4), "speculation_length is set; without enable_fused_speculation"),
        (
            dict(is_continuous_batching=True, speculation_length=1),
            "speculation_length is 1; it must be at least 2, and",
        ),
        (dict(is_continuous_batching=True, speculation_length=128), "speculation_length is 128; .* less than 128"),
        (dict(async_mode=True), "async_mode is True; this model runs with False only"),
        (dict(output_logits=True), "set both or neither"),
        (dict(tp_degree=3), "tp_degree is 3; this model can be split by 1, 2"),
        (dict(max_context_length=1), "max_context_length is 1, which is a graph for decode"),
        (dict(context_encoding_buckets=[1, 64]), "context_encoding_buckets has 1, which is a graph for decode"),
        (dict(seq_len=5000), "seq_len is 5000; the model's longest is 4096"),
        (dict(is_continuous_batching=True, batch_size=2, ctx_batch_size=2), "ctx_batch_size must be 1"),
        (dict(kv_cache_batch_size=3), "kv_cache_batch_size must be what it is by default"),
        (dict(kernels=dict(prefill_scan="foo")), "prefill_scan is 'foo'; it must be one of chunked, quadratic"),
        (dict(kernels=dict(experts_decode="foo")), "experts_decode is 'foo'; it must be one of kernel, all, gather"),
        (dict(kernels=dict(experts_decode="all", expert_path="nxd")), "with expert_path='nxd' NxD's kernels decide"),
        (dict(kernels=dict(experts_decode="kernel"), logical_nc_config=1), "logical_nc_config is 1; with NKI kernels"),
        (dict(kernels=dict(decode_kernel="nki"), logical_nc_config=1), "logical_nc_config is 1; with NKI kernels"),
    ],
)
def test_unsupported_settings_are_refused_in_one_sentence(options, message, folder):
    with pytest.raises(UserError, match=message):
        nxdi.make_config(folder, **options)


def test_a_neuron_config_for_dense_models_is_refused(folder):
    from neuronx_distributed_inference.models.config import NeuronConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    from granite4_neuron.devices.neuron.nxdi import GraniteMoeHybridInferenceConfig

    with pytest.raises(UserError, match="neuron_config is a NeuronConfig, and must be a MoENeuronConfig"):
        GraniteMoeHybridInferenceConfig(NeuronConfig(), load_config=load_pretrained_config(str(folder)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_saved_config_is_read_back(case, random_checkpoints, tmp_path):
    """compile() saves the config beside the graphs. A model made from only that folder reads it."""
    folder = random_checkpoints(case)
    config = nxdi.make_config(folder, is_continuous_batching=True, batch_size=3, ctx_batch_size=1)
    config.save(tmp_path)
    again = type(config).load(tmp_path)
    assert again.granite == config.granite == config_from_file(folder / "config.json")
    assert again.neuron_config.apply_seq_ids_mask
    if case.config().num_local_experts:
        assert again.neuron_config.router_config.dtype == torch.float32
    assert json.loads(again.to_json_string()) == json.loads(config.to_json_string())


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("dense", [False, True], ids=["hybrid", "dense"])
@pytest.mark.parametrize(
    "options, seq_len",
    [
        (GraphOptions(), 4096),
        (GraphOptions(max_context_length=300, verified_tokens=4), 1000),
        (GraphOptions(max_context_length=512, verified_tokens=2, token_buckets=(400, 700)), 700),
        (GraphOptions(max_context_length=700, context_buckets=(100, 700)), 700),
        (GraphOptions(max_context_length=128), 128),
        (GraphOptions(max_context_length=2048), 4096),
    ],
)
def test_the_plan_lists_the_graphs_that_are_made(options, seq_len, batch_size, dense, random_checkpoints):
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    case = next(case for case in CASES if (MAMBA not in case.config().layer_types) == dense)
    folder = random_checkpoints(case)
    config = nxdi.make_config(
        folder,
        batch_size=batch_size,
        ctx_batch_size=1,
        is_continuous_batching=True,
        max_context_length=options.max_context_length,
        seq_len=seq_len,
        speculation_length=options.verified_tokens,
        enable_bucketing=True,
        context_encoding_buckets=list(options.context_buckets or default_context_buckets(options.max_context_length)),
        token_generation_buckets=options.token_buckets and list(options.token_buckets),
    )
    application = NeuronGraniteMoeHybridForCausalLM(str(folder), config)
    tags = {"context_encoding": CONTEXT, "prefill_continuation": CONTINUATION, "token_generation": TOKEN}
    tags |= {"speculation": VERIFICATION, "commit": COMMIT, "copy": COPY}
    made = [
        CompiledGraph(tags[model.tag.removesuffix("_model")], bucket)
        for model in application.models
        for bucket in model.neuron_config.buckets
    ]
    listed = options.graphs(config.granite, batch_size, seq_len)
    assert sorted(made, key=str) == sorted(listed, key=str) and len(set(listed)) == len(listed)


def test_a_checkpoint_that_lacks_a_weight_is_refused(folder, tmp_path):
    """NxD Inference itself would load the weights that exist."""
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mamba.A_log"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = NeuronGraniteMoeHybridForCausalLM(str(tmp_path), nxdi.make_config(tmp_path))
    with pytest.raises(UserError, match=r"missing: model\.layers\.0\.mamba\.A_log"):
        model.checkpoint_loader_fn()


def test_the_choice_of_kernels_is_saved(folder, tmp_path):
    config = nxdi.make_config(folder, dict(prefill_scan="ssd", decode_kernel="nki"))
    config.save(tmp_path)
    again = type(config).load(tmp_path)
    assert (again.prefill_scan, again.decode_kernel) == ("ssd", "nki")
    assert (nxdi.make_config(folder).prefill_scan, nxdi.make_config(folder).decode_kernel) == ("chunked", "torch")


def test_graphs_of_another_model_are_refused(folder, random_checkpoints, tmp_path):
    from granite4_neuron.devices.neuron.nxdi.loading import load_compiled

    nxdi.make_config(random_checkpoints(CASES[1]), is_continuous_batching=True, ctx_batch_size=1).save(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(UserError, match="was compiled for another model"):
        load_compiled(folder, tmp_path, GenerationConfig())
    with pytest.raises(UserError, match=r"has no neuron_config\.json"):
        load_compiled(folder, folder, GenerationConfig())
    (tmp_path / "neuron_config.json").write_text("{")
    with pytest.raises(UserError, match=r"neuron_config\.json is damaged"):
        load_compiled(folder, tmp_path, GenerationConfig())
    (tmp_path / "model.pt").unlink()
    with pytest.raises(UserError, match=r"has no model\.pt"):
        load_compiled(folder, tmp_path, GenerationConfig())


def test_a_compilation_that_fails_leaves_nothing(folder, tmp_path, monkeypatch):
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM
    from granite4_neuron.devices.neuron.nxdi.loading import CONFIG_FILE, compile_model

    def fails(model, path):
        model.config.save(path)
        assert (path / CONFIG_FILE).is_file() and model.neuron_config.tp_degree == 2
        raise RuntimeError("the compiler stopped")

    monkeypatch.setattr(NeuronGraniteMoeHybridForCausalLM, "compile", lambda model, path: fails(model, Path(path)))
    with pytest.raises(RuntimeError, match="the compiler stopped"):
        sizes = dict(tp_degree=2, batch_size=3, max_context_length=128, seq_len=256)
        compile_model(folder, tmp_path / "graphs", dtype=torch.float32, jobs=1, **sizes)
    assert list(tmp_path.iterdir()) == []
