"""Models beside llama.cpp, which converts the same checkpoint by itself: an oracle that is not transformers."""

import json
import math

import pytest
import torch
from transformers import GenerationConfig

from benchmarks.accuracy.gguf import our_log_probabilities, their_log_probabilities
from benchmarks.gguf_checkpoint import write_gguf
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.devices.cpu.runtime import CPURuntime
from test.support.checkpoints import DENSE, nemotron_config, save_dense, small_config
from test.support.llama_cpp import IF_THERE, IS_THERE, PROGRAMS, converted
from test.support.stepping import random_tokens

pytestmark = pytest.mark.skipif(not IS_THERE, reason=IF_THERE)

UNLIMITED = dict(time_step_limit=(0.0, math.inf))  # llama.cpp knows no limits
NO_EXPERTS = dict(layer_types=("mamba", "attention", "mlp", "mamba"), num_local_experts=0)
ROTARY = dict(position_embedding_type="rope", tie_word_embeddings=False, intermediate_size=80, **DENSE)
CONFIGS = {
    "granite": small_config(mamba_n_groups=2),
    "granite, rotary": small_config(layer_types=("attention",) * 3, **ROTARY),
    "nemotron": nemotron_config(layer_types=("mamba", "moe", "attention", "moe", "mamba"), **UNLIMITED),
    "nemotron, one expert": nemotron_config(
        layer_types=("mamba", "moe", "attention"), num_experts_per_tok=1, **UNLIMITED
    ),
    "nemotron, latent": nemotron_config(
        layer_types=("mamba", "moe", "attention", "moe"), moe_latent_size=40, **UNLIMITED
    ),
    "nemotron, dense": nemotron_config(**NO_EXPERTS, **UNLIMITED),
}
TOLERANCE = 5e-5


def save_published(config, folder):
    """Write a random model of a config as its publisher does. Some time steps are below 0.001, as trained ones are."""
    model = random_model(config)
    for layer in model.model.layers:
        if layer.has_mixer and layer.is_mamba:
            layer.mamba.dt_bias.copy_(torch.linspace(-9.0, 1.0, config.mamba_n_heads))
    save_model(model, folder)
    values = json.loads((folder / "config.json").read_text())
    if "mlp" in config.layer_types:  # llama.cpp's converter takes it for one with experts by its fields
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
        values["hybrid_override_pattern"] = "".join(map(letters.get, values.pop("layers_block_type")))
        for name in ("num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group", "topk_group"):
            del values[name]
        (folder / "config.json").write_text(json.dumps(values))


def difference(folder, file, kernels="fused"):
    """Return the largest difference of a log-probability between our model of `folder` and llama.cpp's of `file`."""
    runtime = CPURuntime(load_model(folder, torch.float32), GenerationConfig(), cpu_kernels=kernels)
    vocab_size = runtime.config.vocab_size
    about = random_tokens(vocab_size, 40).tolist(), (1, 2, 9, 40)
    theirs = their_log_probabilities(PROGRAMS, file, *about, vocab_size)
    return (our_log_probabilities(runtime, *about) - theirs).abs().max().item()


@pytest.mark.parametrize("name", [*CONFIGS, "granite of another class"])
def test_log_probabilities_are_those_of_llama_cpp(name, tmp_path):
    folder = tmp_path / "model"
    save_published(CONFIGS[name], folder) if name in CONFIGS else save_dense(folder)
    file = converted(folder, tmp_path / "model.gguf")
    for model, kernels in ((folder, "fused"), (folder, "torch"), (file, "fused")):
        assert difference(model, file, kernels) <= TOLERANCE


def test_a_hybrid_has_the_positions_of_its_config(tmp_path):
    """llama.cpp computes them, but its converter takes every hybrid for a model without positions, as published."""
    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    save_published(small_config(**ROTARY), folder)
    assert difference(folder, converted(folder, file)) > 1e-2
    write_gguf(folder, file)
    assert difference(folder, file) <= TOLERANCE
