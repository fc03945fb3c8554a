"""GGUF files: config, weights and tokenizer are those of the checkpoint that they were written from."""

import dataclasses
import shutil

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from granite4_neuron import generation
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.gguf.file import open_gguf
from granite4_neuron.checkpoint.gguf.names import from_gguf, to_gguf
from granite4_neuron.checkpoint.gguf.tensors import TYPES
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.commands.cli import main
from granite4_neuron.config import MAMBA
from granite4_neuron.config.aliases import ATTENTION
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.ops import QuantizedWeight
from granite4_neuron.runtime.interface import Row
from test.integration.test_logits import skip_if_not_in_reference
from test.support.checkpoints import CASES, save_dense, small_config
from test.support.gguf_files import in_type, is_small, rewritten, written
from test.support.stepping import random_tokens, reference_logits, run_cuts

pytestmark = pytest.mark.versions

# GGUF cannot store biases of Mamba's projections or limits of time steps.
HELD = [case for case in CASES if case.name not in ("projection_bias", "time_step_limit")]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
QUANTIZED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_QUANTS, "IQ4_NL", "IQ4_XS", "MXFP4"]
WITHOUT_EFFECT = {"mamba_chunk_size"}
VOCABULARY = 1024  # the size of the bundled checkpoint's tokenizer
MATRICES = 1 + 2 + 4 + 2 * 4  # embedding, Mamba layer, attention layer, experts and shared MLPs


def named(name):
    return next(case for case in CASES if case.name == name)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint whose rows are whole blocks of K-quants, with a tokenizer."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shapes = dict(hidden_size=256, intermediate_size=256, shared_intermediate_size=256, mamba_d_head=64)
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    config = small_config(**shapes, **experts, vocab_size=VOCABULARY, layer_types=("mamba", "attention"))
    save_model(random_model(config), folder, files_from=bundled_checkpoint())
    return folder


@pytest.fixture(scope="module")
def wide_file(wide):
    return written(wide)


@pytest.mark.slow_cases
@pytest.mark.parametrize("case_folder", HELD, indirect=True, ids=lambda case: case.name)
def test_every_config_and_weight_comes_back(tmp_path, case_folder):
    file = written(shutil.copytree(case_folder, tmp_path / "model"))
    config, expected = open_checkpoint(file).config, open_checkpoint(case_folder).config
    names = {one.name for one in dataclasses.fields(config)} - WITHOUT_EFFECT
    if not config.num_local_experts:
        names -= {"intermediate_size", "num_experts_per_tok"}
    if MAMBA not in config.layer_types:
        names -= {name for name in names if name.startswith("mamba_")}
    if ATTENTION not in config.layer_types:
        names -= {"num_key_value_heads"}
    if not config.uses_rope:
        names -= {"position_embedding_type", "rope_theta"}  # "nope" or None
    assert {name: getattr(config, name) for name in names} == {name: getattr(expected, name) for name in names}
    original = dict(load_model(case_folder).named_parameters())
    for name, weight in load_model(file).named_parameters():
        if name.endswith("A_log"):  # through the exponential and back
            torch.testing.assert_close(weight, original[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(weight, original[name]), name


@pytest.mark.parametrize("name", ["moe", "two_groups", "attention_only_rope"])
def test_logits_equal_those_of_transformers(tmp_path, random_checkpoints, name):
    skip_if_not_in_reference(name)
    folder = random_checkpoints(named(name))
    file = written(shutil.copytree(folder, tmp_path / "model"))
    tokens = random_tokens(open_checkpoint(file).config.vocab_size, 2, 40)
    assert (run_cuts(load_model(file), tokens, [40]) - reference_logits(folder, tokens)).abs().max() <= 1e-4


def test_logits_of_a_dense_model_equal_those_of_transformers(tmp_path):
    reference = save_dense(tmp_path / "model")
    tokens = random_tokens(264, 2, 40)
    with torch.inference_mode():
        expected = reference(tokens, use_cache=False).logits
    assert (run_cuts(load_model(written(tmp_path / "model")), tokens, [40]) - expected).abs().max() <= 1e-4


@pytest.mark.slow_cases
@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_logits_of_rounded_weights_equal_those_of_transformers(tmp_path, wide, wide_file, type):
    """The reference gets each matrix as gguf rounds it, under its published name and in its published row order."""
    file = rewritten(wide_file, tmp_path / "rounded.gguf", in_type(type))
    weights, kind = load_file(wide / WEIGHTS), Type[type]
    for name, weight in weights.items():
        if not is_small(weight.squeeze().numpy()):
            weights[name] = torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind))
    folder = shutil.copytree(wide, tmp_path / "model")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    tokens = random_tokens(VOCABULARY, 2, 40)
    ours = run_cuts(load_model(file, torch.float32), tokens, [40])
    assert (ours - reference_logits(folder, tokens)).abs().max() <= 1e-4


@pytest.mark.slow_cases
@pytest.mark.parametrize("type", QUANTIZED)
def test_weights_are_those_that_gguf_dequantizes(tmp_path, wide_file, type):
    """Weights have the bits of a file with the dequantized values in float32, rounded once to bfloat16."""
    assert {*QUANTIZED} == {*TYPES} - {"F32", "F16", "BF16"}
    file = rewritten(wide_file, tmp_path / "quantized.gguf", in_type(type))
    assert type in {tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    values = dict(load_model(rewritten(file, tmp_path / "values.gguf")).named_parameters())
    sentences = []
    for name, weight in load_model(file, torch.float32).named_parameters():
        assert torch.equal(weight, values[name]) and weight.isfinite().all(), name
    for name, weight in load_model(file, remark=sentences.append).named_parameters():
        assert torch.equal(weight, values[name].bfloat16()), name
    assert sentences == [
        f"{file} has weights in {type}, which are kept in bfloat16 here and rounded where it does not hold their "
        "values; float32 does."
    ]


def one_scale_per_row(_, values):
    """Round to Q8_0 with one scale in each row."""
    if is_small(values):
        return values, Type.F32
    scale = (numpy.abs(values).max(-1, keepdims=True) / 127).astype(numpy.float16)
    numbers = (values / scale.astype(numpy.float32)).round().astype(numpy.int8)
    blocks = numbers.reshape(*values.shape[:-1], -1, 32)
    scales = numpy.broadcast_to(scale[..., None], (*blocks.shape[:-1], 1)).copy().view(numpy.uint8)
    return numpy.concatenate([scales, blocks.view(numpy.uint8)], -1).reshape(*values.shape[:-1], -1), Type.Q8_0


def scales_of_bfloat16(name, values):
    """Round to Q4_0 with scales that are numbers of bfloat16."""
    if is_small(values):
        return values, Type.F32
    blocks = quantize(values, Type.Q4_0).reshape(*values.shape[:-1], -1, 18)
    scales = torch.from_numpy(blocks[..., :2].copy().view(numpy.float16).astype(numpy.float32)).bfloat16()
    blocks[..., :2] = scales.half().numpy().view(numpy.uint8)
    return blocks.reshape(*values.shape[:-1], -1), Type.Q4_0


@pytest.mark.parametrize("tensors, format", [(one_scale_per_row, "int8"), (scales_of_bfloat16, "int4")])
def test_weights_that_a_format_can_store_are_kept(tmp_path, wide_file, tensors, format):
    file = rewritten(wide_file, tmp_path / "kept.gguf", tensors)
    stored, sentences = open_checkpoint(file).tensors, []
    model = load_model(file, torch.float32, keep_quantized=QUANTIZATIONS, remark=sentences.append)
    kept = {name: weight for name, weight in model.named_weights() if isinstance(weight, QuantizedWeight)}
    assert len(kept) == MATRICES and {weight.format.name for weight in kept.values()} == {format}
    for name, weight in kept.items():
        assert torch.equal(weight.dequantize(torch.float32), stored.read(name)), name
    assert not sentences
    runtime, _ = generation.load(file, dtype=torch.float32)
    assert runtime.is_quantized
    tokens = random_tokens(VOCABULARY, 1, 20)[0].tolist()
    ours = runtime.step(runtime.allocate(1, 20), [Row(1, 0, tokens)], all_logits=True)[0]
    expected = run_cuts(load_model(file, torch.float32), torch.tensor([tokens]), [20])[0]
    assert (ours[:20] - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("tensors", [one_scale_per_row, scales_of_bfloat16])
def test_weights_whose_last_row_no_format_can_store_are_not_kept(tmp_path, wide_file, tensors):
    def change(name, values):
        raw, type = tensors(name, values)
        if type != Type.F32:
            last_scale = raw.reshape(-1, 34 if type == Type.Q8_0 else 18)[-1, :2]
            last_scale[:] = numpy.float16([1 + 2**-10]).view(numpy.uint8)
        return raw, type

    model = load_model(rewritten(wide_file, tmp_path / "last.gguf", change), keep_quantized=QUANTIZATIONS)
    assert not [name for name, weight in model.named_weights() if isinstance(weight, QuantizedWeight)]


def test_missing_metadata_has_llama_cpps_defaults(tmp_path, random_checkpoints):
    file = written(shutil.copytree(random_checkpoints(named("attention_only_rope")), tmp_path / "model"))
    scales = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
    architecture = open_gguf(file).get("general.architecture")
    without = {f"{architecture}.{name}": None for name in ("rope.scaling.finetuned", "rope.freq_base", *scales)}
    config = open_checkpoint(rewritten(file, tmp_path / "without.gguf", metadata=without)).config
    assert config.position_embedding_type == "rope" and config.rope_theta == 10000.0
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) == (1.0, 1.0, 1.0)
    assert config.attention_multiplier == pytest.approx(config.head_dim**-0.5)


def test_experts_are_kept_together_or_not_at_all(tmp_path, wide_file):
    def change(name, values):
        return in_type("Q4_0")(name, values) if "down_exps" in name else scales_of_bfloat16(name, values)

    file = rewritten(wide_file, tmp_path / "mixed.gguf", change)
    model = load_model(file, keep_quantized=QUANTIZATIONS)
    weights = dict(model.named_weights())
    assert isinstance(weights["model.layers.0.mamba.in_proj.weight"], QuantizedWeight)
    for which in ("input", "output"):
        assert isinstance(weights[f"model.layers.0.block_sparse_moe.{which}_linear.weight"], torch.Tensor)


def test_rows_are_ordered_so_that_neighbours_rotate():
    """Rotating neighbouring rows of the file gives the same scores as rotating halves of the original rows."""
    config = small_config(position_embedding_type="rope")
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(config.head_dim // 2, generator=generator)
    cos, sin = angle.cos(), angle.sin()

    def scores(rotate, in_file):
        heads = []
        for name, count in (("q_proj", 4), ("k_proj", 2)):
            weight = torch.randn(count * config.head_dim, 64, generator=torch.Generator().manual_seed(count))
            name = f"model.layers.0.self_attn.{name}.weight"
            (stored,) = to_gguf(name, weight, config)
            assert torch.equal(from_gguf(name, [stored], weight.shape, config), weight)
            rows = (stored if in_file else weight).unflatten(0, (count, -1))
            # Keys stay at position 0: two of the same position would give the same scores in any order of rows.
            heads.append(rotate(rows.movedim(1, -1)).movedim(-1, 1) if name.endswith("q_proj.weight") else rows)
        query, key = heads
        return torch.einsum("hdc,gde->hgce", query, key)

    def halves(x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def neighbours(x):
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

    torch.testing.assert_close(scores(neighbours, True), scores(halves, False))


def test_the_commands_take_a_file(tmp_path, wide, wide_file, capsys):
    file = rewritten(wide_file, tmp_path / "model.gguf", in_type("Q8_0"))
    options = ["--model", str(file), "--dtype", "float32"]
    assert main(["generate", *options, "An assignment", "--max-tokens", "8"]) == 0
    output, error = capsys.readouterr()
    assert f"{file} has weights in Q8_0, which are kept in float32 here, with the same values." in error
    assert main(["convert", *options, "--output", str(tmp_path / "converted")]) == 0
    capsys.readouterr()
    assert main(["generate", "--model", str(tmp_path / "converted"), "An assignment", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == output != ""
    assert main(["check", *options, "--prompt", "An assignment", "--tokens", "2"]) == 0
    assert main(["generate", *options, "--quantize", "int4", "An assignment", "--max-tokens", "1"]) == 0
    capsys.readouterr()
    assert main(["info", "--model", str(file)]) == 0
    assert "F32, Q8_0" in capsys.readouterr().out
