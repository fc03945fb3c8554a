"""Dense Granite checkpoints (GraniteForCausalLM) run through the hybrid model and are compared with transformers."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, GraniteMoeHybridForCausalLM

from granite4_neuron import load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.stored_tensors import INDEX, WEIGHTS
from granite4_neuron.commands.cli import main
from granite4_neuron.config import GraniteMoeHybridConfig, config_from_file
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import parameters
from granite4_neuron.ops import QuantizedWeight
from granite4_neuron.runtime.interface import Row
from test.integration.test_model import cpu_mode  # noqa: F401 (a fixture)
from test.support import nxdi
from test.support.checkpoints import save_byte_tokenizer, save_dense
from test.support.compressed_tensors import Scheme, compress
from test.support.stepping import random_tokens, run_cuts

pytestmark = pytest.mark.versions

TOLERANCE = 1e-4
CASES = {
    "grouped heads, tied": dict(tie_word_embeddings=True, rope_theta=1e7),
    "biases, untied": dict(attention_bias=True, num_key_value_heads=4),
    "one key head": dict(num_key_value_heads=1, rope_theta=5e5),
}
# granite-3.1-2b-instruct, as published.
PUBLISHED = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49155,
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def dense(request, tmp_path_factory):
    """Return each checkpoint in turn: its folder, tokens [2, 120], and transformers' logits."""
    folder = tmp_path_factory.mktemp("dense")
    return folder, *reference(save_dense(folder, **request.param))


@pytest.fixture(scope="module")
def texting(tmp_path_factory):
    """Return the folder of a checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("texting")
    save_dense(folder)
    save_byte_tokenizer(folder)
    return folder


@torch.inference_mode()
def reference(model):
    tokens = random_tokens(model.config.vocab_size, 2, 120)
    logits = model(tokens, use_cache=False).logits
    assert logits.std() > 0.1
    return tokens, logits


def error(model, tokens, expected, cuts=(100, *[1] * 10, 10)):
    return (run_cuts(model, tokens, cuts) - expected).abs().max()


def test_logits(dense, kernels):
    folder, tokens, expected = dense
    assert error(load_model(folder, operators=kernels).bind(kernels), tokens, expected) <= TOLERANCE


def test_shards_may_split_a_weight(tmp_path):
    """Parts of one weight may be in different files."""
    tokens, expected = reference(save_dense(tmp_path, max_shard_size="20KB"))
    files = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    pairs = [(name, name.replace("gate_proj", "up_proj")) for name in files if "gate_proj" in name]
    assert any(files[gate] != files[up] for gate, up in pairs)
    assert error(load_model(tmp_path), tokens, expected) <= TOLERANCE


def test_a_converted_checkpoint_is_a_granite_4(dense, tmp_path, capsys):
    """All layers of the converted checkpoint are attention layers, for transformers too."""
    folder, tokens, expected = dense
    assert main(["convert", "--model", str(folder), "--output", str(tmp_path / "new")]) == 0
    theirs = GraniteMoeHybridForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32).eval()
    with torch.inference_mode():
        assert (theirs(tokens, use_cache=False).logits - expected).abs().max() <= TOLERANCE
    assert error(load_model(tmp_path / "new"), tokens, expected) <= TOLERANCE
    assert load_model(tmp_path / "new").config == replace(load_model(folder).config, torch_dtype="float32")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized(name, texting, tmp_path, capsys):
    """Quantizing on loading gives the same as `convert`, and most tokens equal the unquantized model's."""
    assert main(["convert", "--model", str(texting), "--quantize", name, "--output", str(tmp_path / "new")]) == 0
    tokens = random_tokens(264, 2, 120)
    plain, converted, quantized = (
        run_cuts(load_model(folder, quantize=quantize), tokens, [120])
        for folder, quantize in ((texting, None), (tmp_path / "new", None), (texting, name))
    )
    assert torch.equal(converted, quantized) and not torch.equal(quantized, plain)
    assert (quantized.argmax(-1) == plain.argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4), Scheme(8), Scheme(8, None, "int-quantized")], ids=str)
def test_compressed_tensors(scheme, tmp_path):
    """Gate and up are quantized separately, and become one weight of the same numbers and scales."""
    save_dense(tmp_path, intermediate_size=96)

    def scheme_of(name, tensor):
        return scheme if tensor.dim() == 2 and ("self_attn" in name or "mlp" in name) else None

    meaning = compress(tmp_path, tmp_path / "compressed", scheme_of)
    quantized = {
        name: weight.dequantize(torch.float32)
        for name, weight in load_model(tmp_path / "compressed", torch.float32).named_weights()
        if isinstance(weight, QuantizedWeight)
    }
    assert len(quantized) == 3 * 6
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        parts = [meaning[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(quantized[f"{prefix}.shared_mlp.input_linear.weight"], torch.cat(parts))
        down = meaning[f"{prefix}.mlp.down_proj.weight"]
        assert torch.equal(quantized[f"{prefix}.shared_mlp.output_linear.weight"], down)


def test_a_published_config():
    """The model has the published parameter count and an odd vocabulary, and is the same in the spelling of 5.x."""
    config = GraniteMoeHybridConfig.from_dict(PUBLISHED)
    with pytest.raises(UserError, match=r"can be split by 1\."):
        config.rank_dimensions(2)
    assert sum(one.numel for one in parameters(config).values()) == 2_533_531_648
    assert config.layer_types == ("attention",) * 40 and config.uses_rope and config.rope_theta == 5e6
    other = {name: value for name, value in PUBLISHED.items() if name not in ("rope_theta", "rope_scaling")}
    other["rope_parameters"] = {"rope_theta": 5e6, "rope_type": "default"}
    other["dtype"] = other.pop("torch_dtype")
    assert GraniteMoeHybridConfig.from_dict(other) == config


def test_commands(texting, capsys):
    """`generate` gives transformers' text, also with a dense draft model. `check` and `info` take the folder too."""
    theirs = AutoModelForCausalLM.from_pretrained(texting, dtype=torch.float32).eval()
    tokenizer = load(texting)[1]
    prompt = tokenizer("some text", return_tensors="pt")["input_ids"]
    settings = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    tokens = theirs.generate(prompt, generation_config=settings)[0, prompt.shape[1] :]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    common = ["--model", str(texting)]
    generate = ["generate", *common, "--max-tokens", "12", "--ignore-eos", "some text"]
    for options in ([], ["--draft-model", str(texting)]):
        assert main([*generate, *options]) == 0
        assert capsys.readouterr().out == f"{expected}\n"
    assert main(["check", *common, "--prompt", "some text", "--tokens", "4"]) == 0
    assert "passed" in capsys.readouterr().out
    assert main(["info", *common]) == 0
    assert f"{sum(tensor.numel() for tensor in load_file(texting / WEIGHTS).values()):,}" in capsys.readouterr().out


def test_xla(texting):
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; the xla backend runs with torch 2.9")
    runtime, _ = load(texting, backend="xla")
    tokens, expected = reference(AutoModelForCausalLM.from_pretrained(texting, dtype=torch.float32).eval())
    state, row = runtime.allocate(1, 120), tokens[0].tolist()
    for start, stop in ((0, 100), (100, 101), (101, 102), (102, 110)):
        logits = runtime.step(state, [Row(1, start, row[start:stop])])
        assert (logits[0] - expected[0, stop - 1]).abs().max() <= TOLERANCE


@pytest.mark.usefixtures("cpu_mode")
def test_nxd_inference(dense, tmp_path):
    folder, tokens, expected = dense
    model = nxdi.cpu_model(folder, batch_size=2)
    lengths, steps = (100, 30), 16
    logits = nxdi.run(model, tokens, lengths, steps)
    assert (logits - nxdi.at(expected, lengths, steps)).abs().max() <= TOLERANCE
    model.config.save(str(tmp_path))
    saved = type(model.config).load(str(tmp_path))
    assert saved.granite == config_from_file(folder / "config.json")
