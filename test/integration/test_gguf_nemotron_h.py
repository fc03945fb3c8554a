"""GGUF files of Nemotron models, as llama.cpp's converter writes them."""

import dataclasses
import math

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from benchmarks.gguf_checkpoint import write_gguf
from granite4_neuron.checkpoint.gguf.file import open_gguf
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.errors import UserError
from granite4_neuron.ops import QuantizedWeight
from test.support.checkpoints import HAS_NEMOTRON, NemotronCase
from test.support.gguf_files import nemotron_file, rewritten
from test.support.stepping import random_tokens, reference_logits, run_cuts

# GGUF cannot store experts and MLPs in one model, or limits of time steps.
UNLIMITED = dict(time_step_limit=(0.0, math.inf))
EXPERTS = NemotronCase("nemotron_experts", dict(layer_types=("mamba", "moe", "mamba", "attention", "moe"), **UNLIMITED))
DENSE = NemotronCase(
    "nemotron_mlps",
    dict(
        layer_types=("mamba", "attention", "mlp", "mamba"),
        num_local_experts=0,
        num_experts_per_tok=0,
        hidden_size=72,
        mamba_n_groups=2,
        mamba_conv_bias=False,
        **UNLIMITED,
    ),
)
LATENT = NemotronCase("nemotron_latent", dict(EXPERTS.changes, moe_latent_size=40))
each_kind = pytest.mark.parametrize("case", [EXPERTS, LATENT, DENSE], ids=lambda case: case.name)


@pytest.fixture
def file(tmp_path, random_checkpoints):
    return nemotron_file(random_checkpoints(EXPERTS), tmp_path / "model.gguf")


@pytest.mark.skipif(not HAS_NEMOTRON, reason="this transformers has no Nemotron models")
@pytest.mark.versions
@each_kind
def test_logits_equal_those_of_transformers(tmp_path, random_checkpoints, case):
    folder = random_checkpoints(case)
    model = load_model(nemotron_file(folder, tmp_path / "model.gguf"))
    tokens = random_tokens(model.config.vocab_size, 2, 60)
    expected = reference_logits(folder, tokens)
    for cuts in ([60], [40] + [1] * 20):
        assert (run_cuts(model, tokens, cuts) - expected).abs().max() <= 1e-5 * expected.abs().max()


@each_kind
def test_every_config_and_weight_comes_back(tmp_path, random_checkpoints, case):
    folder = random_checkpoints(case)
    file = nemotron_file(folder, tmp_path / "model.gguf")
    config, expected = open_checkpoint(file).config, open_checkpoint(folder).config
    # llama.cpp's converter writes one length for all of them.
    unused = ("intermediate_size", "shared_intermediate_size") if case is DENSE else ()
    same = {one.name: getattr(expected, one.name) for one in dataclasses.fields(config) if one.name not in unused}
    assert {name: getattr(config, name) for name in same} == {
        **same,
        "max_position_embeddings": 2**20,
        **({} if case is DENSE else {"mlp_intermediate_size": config.mlp_intermediate_size}),
        **({"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0} if case is DENSE else {}),
    }
    original = dict(load_model(folder).named_parameters())
    for name, weight in load_model(file).named_parameters():
        if name.endswith("A_log"):  # through the exponential and back
            torch.testing.assert_close(weight, original[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(weight, original[name]), name


@each_kind
def test_the_benchmarks_writer_writes_the_same_tensors(tmp_path, random_checkpoints, case):
    folder = random_checkpoints(case)
    write_gguf(folder, tmp_path / "ours.gguf")
    ours, theirs = open_gguf(tmp_path / "ours.gguf"), open_gguf(nemotron_file(folder, tmp_path / "theirs.gguf"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in ours.tensors:
        assert numpy.array_equal(ours.dequantized(name), theirs.dequantized(name)), name
    ours, theirs = (open_checkpoint(tmp_path / f"{name}.gguf").config for name in ("ours", "theirs"))
    assert dataclasses.replace(ours, max_position_embeddings=2**20) == theirs


def test_the_benchmarks_writer_refuses_what_a_file_cannot_hold(tmp_path, random_checkpoints):
    both_kinds = "a Nemotron model with experts and with layers"
    for changes, missing in ((UNLIMITED, both_kinds), ({}, "limits of time steps")):
        with pytest.raises(UserError, match=f"has no place for {missing}"):
            write_gguf(random_checkpoints(NemotronCase("nemotron", changes)), tmp_path / "model.gguf")


def test_multi_token_prediction_is_left_out_with_a_sentence(tmp_path, random_checkpoints, file):
    more = nemotron_file(random_checkpoints(EXPERTS), tmp_path / "more.gguf", predicting=True)
    remarks = []
    weights = dict(load_model(more, remark=remarks.append).named_parameters())
    assert remarks == ["2 tensors for multi-token prediction are left out; only --speculate mtp uses them."]
    expected = dict(load_model(file).named_parameters())
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


def test_missing_metadata_has_llama_cpps_defaults(tmp_path, file):
    left_out = (
        "expert_group_count",
        "expert_group_used_count",
        "expert_weights_norm",
        "expert_weights_scale",
        "expert_shared_count",
        "expert_feed_forward_length",
        "attention.layer_norm_rms_epsilon",
    )
    without = rewritten(file, tmp_path / "without.gguf", metadata={f"nemotron_h_moe.{name}": None for name in left_out})
    before, config = open_checkpoint(file).config, open_checkpoint(without).config
    router = dict(n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0)
    assert config == dataclasses.replace(before, **router)


EXPERTS_KEPT = {"block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"}
LATENTS_KEPT = {"block_sparse_moe.fc1_latent_proj.weight", "block_sparse_moe.fc2_latent_proj.weight"}


@pytest.mark.parametrize(
    ("changes", "plain", "expected"),
    [
        pytest.param(dict(intermediate_size=64), "gate_inp", EXPERTS_KEPT, id="experts"),
        pytest.param(dict(moe_latent_size=64), "exps", LATENTS_KEPT, id="latent matrices alone"),
    ],
)
def test_quantized_weights_that_a_format_can_store_are_kept(tmp_path, random_checkpoints, changes, plain, expected):
    """Experts too, which have no gate, and latent matrices beside experts that are not kept."""
    folder = random_checkpoints(NemotronCase(f"nemotron_{next(iter(changes))}", dict(EXPERTS.changes, **changes)))

    def one_scale_per_row(name, values):
        if values.ndim < 2 or values.shape[-1] % 32 or plain in name:
            return values, Type.F32
        numbers = (values / numpy.abs(values).max(-1, keepdims=True) * 127).round().astype(numpy.int8)
        blocks = numbers.reshape(*values.shape[:-1], -1, 32)
        scales = numpy.full((*blocks.shape[:-1], 1), 2**-9, numpy.float16).view(numpy.uint8)
        return numpy.concatenate([scales, blocks.view(numpy.uint8)], -1).reshape(*values.shape[:-1], -1), Type.Q8_0

    file = nemotron_file(folder, tmp_path / "plain.gguf")
    kept = load_model(
        rewritten(file, tmp_path / "kept.gguf", one_scale_per_row), torch.float32, keep_quantized=QUANTIZATIONS
    )
    weights = {name: weight for name, weight in kept.named_weights() if isinstance(weight, QuantizedWeight)}
    names = {name.removeprefix("model.").split(".", 2)[-1] for name in weights}
    assert "mamba.in_proj.weight" in names and {name for name in names if "sparse_moe" in name} == expected
    values = load_model(rewritten(tmp_path / "kept.gguf", tmp_path / "values.gguf"))
    tokens = random_tokens(values.config.vocab_size, 1, 20)
    assert (run_cuts(kept, tokens, [20]) - run_cuts(values, tokens, [20])).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"expert_shared_count": 2}, "n_shared_experts is 2, and must be 1"),
        ({"expert_feed_forward_length": [0, 48, 0, 0, 40]}, "is .*, and must be a whole number or a list of 5"),
        ({"feed_forward_length": [48, 0]}, "feed_forward_length is .*, and must be a whole number or a list of 5"),
        ({"attention.value_length": 16}, "attention.value_length is 16, which is not supported; it must be 24."),
        ({"attention.scale": 0.5}, "attention.scale is 0.5, which is not supported; it must be 1 / sqrt"),
        ({"nextn_predict_layers": 5}, "nextn_predict_layers is 5, and must be less than nemotron_h_moe.block_count"),
        ({"attention.layer_norm_epsilon": None, "attention.layer_norm_rms_epsilon": None}, "layer_norm_epsilon"),
        ({"ssm.time_step_rank": 7}, r"must be divisible by nemotron_h_moe.ssm.time_step_rank \(7\)\."),
        ({"expert_group_count": 3}, "n_routed_experts is 8, and must be a multiple of n_group"),
        ({"expert_used_count": [2] * 100}, "expert_used_count is .*, and must be a whole number"),
        ({"expert_used_count": None}, "num_experts_per_tok is 0"),
    ],
)
def test_unsupported_metadata_is_refused(tmp_path, file, metadata, message):
    changed = {f"nemotron_h_moe.{name}": value for name, value in metadata.items()}
    with pytest.raises(UserError, match=message):
        open_checkpoint(rewritten(file, tmp_path / "other.gguf", metadata=changed))


def test_a_router_is_written_in_float32(tmp_path):
    model = random_model(EXPERTS.config(), dtype=torch.bfloat16)
    save_model(model, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    written = open_gguf(tmp_path / "model.gguf").dequantized("blk.1.ffn_gate_inp.weight")
    expected = model.get_parameter("model.layers.1.block_sparse_moe.router.layer.weight")
    assert torch.equal(torch.from_numpy(written), expected)


def test_a_dense_model_uses_no_experts(tmp_path):
    """transformers' default is two for each token, and llama.cpp stops at more than there are."""
    config = dataclasses.replace(DENSE.config(), num_experts_per_tok=2)
    save_model(random_model(config), tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert open_gguf(tmp_path / "model.gguf").get("nemotron_h.expert_used_count") == 0
