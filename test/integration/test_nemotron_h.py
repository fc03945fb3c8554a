"""Nemotron checkpoints in files, and their state beside that of transformers. Logits are compared in test_logits.py."""

import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from granite4_neuron.checkpoint.adapters import read_adapter
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.quantized import CompressedFormat
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS, StoredTensors
from granite4_neuron.config.quantization import WeightScheme
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.errors import UserError
from granite4_neuron.evaluation import accuracy
from granite4_neuron.evaluation.reference import load_reference
from granite4_neuron.model.step import step_of
from granite4_neuron.ops import FORMATS
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import MambaState
from test.support.checkpoints import HAS_NEMOTRON, NEMOTRON_CASES, NEMOTRON_EXPERTS, NemotronCase, nemotron_config
from test.support.compressed_tensors import Scheme, compress
from test.support.stepping import poisoned_state, random_tokens, reference_logits, run_cuts

pytestmark = pytest.mark.skipif(not HAS_NEMOTRON, reason="this transformers has no Nemotron models")


@pytest.fixture(scope="module", params=NEMOTRON_EXPERTS, ids=lambda case: case.name)
def folder(request, random_checkpoints):
    return random_checkpoints(request.param)


@pytest.fixture
def copy(folder, tmp_path):
    """Return a copy of the folder, its tensors, and a function that writes them back after a change."""
    shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / WEIGHTS)
    return tmp_path / "copy", tensors, lambda: save_file(tensors, tmp_path / "copy" / WEIGHTS)


def weights_of(folder):
    return dict(load_model(folder).named_parameters())


def assert_same(weights, expected):
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_published_names_are_read_and_written(folder):
    """Each expert has tensors of its own, and transformers writes the same names and numbers."""
    from transformers import AutoModelForCausalLM

    ours = load_file(folder / WEIGHTS)
    assert {"backbone.layers.1.mixer.experts.7.up_proj.weight", "backbone.norm_f.weight", "lm_head.weight"} <= set(ours)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.save_pretrained(folder.parent / "theirs")
    theirs = load_file(folder.parent / "theirs" / WEIGHTS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_other_spellings_of_names_are_read(folder, copy):
    """transformers' names in memory begin with "model.", not "backbone.", files of 5.3 to 5.17 have another name of the
    embedding, and older configs spell lists differently.
    """
    other, tensors, write = copy
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    write()
    assert_same(weights_of(other), weights_of(folder))
    for name in [name for name in tensors if name.startswith("backbone.")]:
        tensors[name.replace("backbone.", "model.")] = tensors.pop(name)
    write()
    values = json.loads((other / "config.json").read_text())
    values["hybrid_override_pattern"] = "".join(
        {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}[kind]
        for kind in values.pop("layers_block_type")
    )
    (other / "config.json").write_text(json.dumps(values))
    assert_same(weights_of(other), weights_of(folder))


def test_multi_token_prediction_is_left_out_with_a_sentence(folder, copy):
    other, tensors, write = copy
    tensors |= {"mtp.layers.0.norm.weight": torch.ones(64), "mtp.layers.0.eh_proj.weight": torch.ones(64, 128)}
    write()
    remarks = []
    load_model(other, remark=remarks.append)
    assert remarks == ["2 tensors for multi-token prediction are left out; only --speculate mtp uses them."]
    assert_same(weights_of(other), weights_of(folder))


def lacks_an_expert(tensors):
    tensors.pop("backbone.layers.1.mixer.experts.5.up_proj.weight")


def has_an_expert_more(tensors):
    tensors["backbone.layers.1.mixer.experts.8.up_proj.weight"] = torch.zeros(48, 64)


def has_a_wide_norm(tensors):
    tensors["backbone.layers.3.norm.weight"] = torch.zeros(65)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lacks_an_expert, r"lack a part of model.layers.1.block_sparse_moe.input_linear.weight"),
        (has_an_expert_more, r"not of this model: backbone.layers.1.mixer.experts.8.up_proj.weight\."),
        (has_a_wide_norm, r"backbone.layers.3.norm.weight is \[65\] instead of \[64\]"),
    ],
)
def test_a_damaged_checkpoint_is_refused(copy, damage, message):
    folder, tensors, write = copy
    damage(tensors)
    write()
    with pytest.raises(UserError, match=message):
        load_model(folder)


def test_the_router_stays_in_float32(folder, tmp_path):
    """As in transformers. In 16 bits the router would choose other experts."""
    half = load_model(folder, torch.bfloat16)
    router = half.get_submodule("model.layers.1.block_sparse_moe.router")
    assert router.layer.weight.dtype == router.e_score_correction_bias.dtype == torch.float32
    assert half.get_parameter("model.layers.1.shared_mlp.input_linear.weight").dtype == torch.bfloat16
    whole = weights_of(folder)
    save_model(half, tmp_path / "half")
    again = weights_of(tmp_path / "half")
    for name in ("layer.weight", "e_score_correction_bias"):
        name = f"model.layers.1.block_sparse_moe.router.{name}"
        assert torch.equal(again[name], whole[name])


def test_quantized_experts_are_written_and_read(tmp_path, folder):
    """Experts are quantized whole, stored each by itself, and read as they were."""
    quantized = load_model(folder, torch.bfloat16, quantize="int8")
    save_model(quantized, tmp_path / "int8")
    stored = load_file(tmp_path / "int8" / WEIGHTS)
    assert stored["backbone.layers.1.mixer.experts.3.down_proj.weight"].dtype == torch.int8
    again = load_model(tmp_path / "int8")
    name = "model.layers.1.block_sparse_moe.output_linear"
    before, after = (model.get_submodule(name).weight for model in (quantized, again))
    assert after.format is FORMATS["int8"] and torch.equal(before.values, after.values)
    assert torch.equal(before.scales, after.scales)


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, None, "int-quantized")], ids=["int4", "int8"])
def test_experts_of_compressed_tensors(folder, tmp_path, scheme):
    """Each expert's numbers, scales and shape are separate tensors, and all experts become one weight."""
    is_expert = re.compile(r".*\.experts\.\d+\.up_proj\.weight").fullmatch  # their rows are whole groups
    meaning = compress(folder, tmp_path / "small", lambda name, _: scheme if is_expert(name) else None)
    config = open_checkpoint(folder).config
    stored = StoredTensors(tmp_path / "small", config)
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    found = CompressedFormat(WeightScheme(scheme.num_bits, scheme.group_size, scheme.format == "pack-quantized"))
    weight = found.read(name, torch.Size([8, 48, config.expert_hidden_size]), stored)
    expected = [meaning[f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight"] for expert in range(8)]
    assert torch.equal(weight.dequantize(torch.float32), torch.stack(expected))


@torch.inference_mode()
def test_state_after_prefill_and_decode(random_checkpoints, kernels):
    """The convolution's window, the SSM state, and keys and values are those of transformers' cache.

    Time steps have no limits, because transformers ignores them in decode.
    """
    folder = random_checkpoints(NemotronCase("nemotron_unlimited", dict(time_step_limit=(0.0, math.inf))))
    reference = load_reference(folder, torch.float32)
    model = load_model(folder, torch.float32).bind(kernels)
    tokens = random_tokens(model.config.vocab_size, 1, 43)
    state = poisoned_state(model, 1, 64)
    slot, cache = torch.tensor([1]), None
    for start, stop in ((0, 40), (40, 41), (41, 42), (42, 43)):
        lengths = torch.tensor([stop - start])
        model(tokens[:, start:stop], step_of(torch.arange(start, stop)[None], lengths, slot, state), state)
        output = reference(tokens[:, start:stop], cache=cache, use_cache=True)
        cache = output.cache
        if start in (0, 42):
            assert_state_is_that_of(cache, state, stop)


def test_a_dense_model_with_biases_equals_transformers(random_checkpoints, kernels):
    folder = random_checkpoints(NEMOTRON_CASES[1])
    model = load_model(folder, torch.float32).bind(kernels)
    tokens = random_tokens(model.config.vocab_size, 2, 60)
    expected = reference_logits(folder, tokens)
    for cuts in ([60], [40] + [1] * 20):
        assert (run_cuts(model, tokens, cuts) - expected).abs().max() <= 1e-5 * expected.abs().max()


def assert_state_is_that_of(cache, state, length):
    for number, layer in enumerate(state.layers):
        if isinstance(layer, MambaState):
            window = cache.get_conv_state(number, state_idx=0)
            recurrent = cache.get_recurrent_state(number, state_idx=0)
            assert (layer.conv_state[1] - window[0, :, -3:]).abs().max() <= 1e-5
            assert (layer.ssm_state[1] - recurrent[0]).abs().max() <= 1e-5 * max(1.0, recurrent.abs().max())
        elif vars(layer):
            assert (layer.key[1, :, :length] - cache.layers[number].keys[0]).abs().max() <= 1e-5
            assert (layer.value[1, :, :length] - cache.layers[number].values[0]).abs().max() <= 1e-5


def test_an_adapter_of_a_projection(tmp_path, folder):
    """PEFT names an adapter's tensors by transformers' names in memory."""
    down, up = torch.randn(4, 64), torch.randn(392, 4)
    prefix = "base_model.model.model.layers.0.mixer.in_proj"
    tmp_path.joinpath("adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=4, lora_alpha=8)))
    save_file({f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}, tmp_path / "adapter_model.safetensors")
    adapter = read_adapter(tmp_path, nemotron_config())
    assert list(adapter.additions) == ["model.layers.0.mamba.in_proj.weight"]
    merged = load_model(folder, adapters=[adapter])
    expected = load_model(folder).model.layers[0].mamba.in_proj.weight + 2 * up @ down
    assert (merged.model.layers[0].mamba.in_proj.weight - expected).abs().max() <= 1e-4


@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
def test_an_adapter_of_experts(tmp_path, folder):
    """Their matrices have no gate; projections may be around them. Logits are PEFT's, merged and beside the weights."""
    adapters = pytest.importorskip("test.support.adapters", reason="peft is not installed")
    config = open_checkpoint(folder).config
    around = ["fc1_latent_proj", "fc2_latent_proj"] if config.moe_latent_size else []
    options = dict(target_modules=["q_proj", *around], target_parameters=list(adapters.NEMOTRON_EXPERTS))
    path = adapters.save_adapter(folder, tmp_path, **options)
    tokens = [(7 * place + place * place) % 160 for place in range(40)]
    expected = adapters.peft_logits(folder, path, tokens)
    adapter = read_adapter(path, config)
    merged = CPURuntime(load_model(folder, torch.float32, adapters=[adapter]), GenerationConfig())
    beside = CPURuntime(load_model(folder, torch.float32), GenerationConfig(), adapters={"one": adapter})
    for runtime, number in ((merged, 0), (beside, 1)):
        state = runtime.allocate(1, len(tokens))
        logits = runtime.step(state, [Row(1, 0, tokens, number)], all_logits=True)[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    plain = beside.step(beside.allocate(1, len(tokens)), [Row(1, 0, tokens)], all_logits=True)[0]
    assert (plain - expected).abs().max() > 0.1


@torch.inference_mode()
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.001, math.inf), (0.0, 0.05)])
def test_time_steps_are_limited_as_config_json_says(tmp_path, kernels, limit):
    """Most time steps are below the config's time_step_min, as trained ones are, which is of the initialisation only.

    transformers takes it for the lower limit, of prompts only. Here the limits hold in prefill and decode.
    """
    from transformers import AutoModelForCausalLM

    layer_types = ("mamba", "attention", "mlp", "mamba")
    model = random_model(nemotron_config(layer_types=layer_types, time_step_limit=limit, num_local_experts=0))
    for layer in (0, 3):
        model.model.layers[layer].mamba.dt_bias.copy_(torch.linspace(-9.0, -3.0, 8))
    save_model(model, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert reference.config.time_step_min == 0.001
    tokens = random_tokens(model.config.vocab_size, 1, 48)
    expected = {}
    for other in ((0.0, math.inf), (0.001, math.inf), (0.0, 0.05)):
        for layer in (0, 3):
            reference.model.layers[layer].mixer.time_step_limit = other
        expected[other] = reference(tokens, use_cache=False).logits
    for cuts in ([48], [20] + [1] * 28):
        logits = run_cuts(load_model(tmp_path, torch.float32).bind(kernels), tokens, cuts)
        difference = {other: (logits - exact).abs().max().item() for other, exact in expected.items()}
        assert difference.pop(limit) <= 1e-4 and min(difference.values()) > 1e-2
    runtime = CPURuntime(load_model(tmp_path, torch.float32), GenerationConfig())
    assert accuracy.measure(tmp_path, tokens.tolist(), 4, runtime).passed()
