import json
import math

import pytest
import torch
from transformers import GraniteMoeHybridConfig as ReferenceConfig

from granite4_neuron.config import GraniteMoeHybridConfig, config_from_file, published_config
from granite4_neuron.errors import UserError
from granite4_neuron.model.families import model_of
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from test.support.checkpoints import CASES, granite_names, small_config

pytestmark = pytest.mark.versions

# Parameters (as published where they are), state bytes per sequence and KV bytes per token in bfloat16.
FAMILY = {
    "h-350m": (340_332_224, 28 * (48 * 32 * 128 * 4 + 1792 * 3 * 2), 4096),
    "h-1b": (1_461_538_368, 36 * (48 * 64 * 128 * 4 + 3328 * 3 * 2), 8192),
    "h-micro": (3_191_396_096, 36 * (64 * 64 * 128 * 4 + 4352 * 3 * 2), 8192),
    "h-tiny": (6_939_037_248, 36 * (48 * 64 * 128 * 4 + 3328 * 3 * 2), 8192),
    "h-small": (32_207_337_984, 36 * (128 * 64 * 128 * 4 + 8448 * 3 * 2), 16384),
    "micro": (3_402_836_480, 0, 81920),
    "1b": (1_631_750_144, 0, 81920),
    "350m": (352_379_904, 0, 28672),
}


@pytest.fixture
def published():
    """Return a published config.json as the object that it holds."""
    return {**small_config().to_dict(), "torch_dtype": "bfloat16", "init_method": "mup", "rope_scaling": None}


def test_every_family_member_is_there():
    assert len(granite_names()) == 9
    for name in granite_names():
        config = published_config(name)
        assert GraniteMoeHybridConfig.from_dict(config.to_dict()) == config
        assert config.vocab_size > 0 and config.torch_dtype == "bfloat16" and config.time_step_limit == (0.0, math.inf)


@pytest.mark.parametrize("name", FAMILY)
def test_family_sizes(name):
    parameters, per_sequence, per_token = FAMILY[name]
    config = published_config(name)
    with torch.device("meta"):
        model = model_of(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert token_bytes(config, torch.bfloat16.itemsize) == per_token
    assert sequence_bytes(config, torch.bfloat16.itemsize) == per_sequence


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_round_trip_through_transformers(case, tmp_path):
    """The config that the installed transformers writes, in any spelling, is read as the same model."""
    config = case.config()
    ReferenceConfig(**config.to_dict()).save_pretrained(tmp_path)
    read = config_from_file(tmp_path / "config.json")
    for name in vars(config):
        if name not in ("torch_dtype", "time_step_limit"):
            assert getattr(read, name) == getattr(config, name), name


def test_both_spellings_of_every_field(published):
    expected = GraniteMoeHybridConfig.from_dict({**published, "position_embedding_type": "rope", "rope_theta": 1e7})
    other = {**published, "position_embedding_type": "rope"}
    other["layers_block_type"] = other.pop("layer_types")
    other["dtype"] = other.pop("torch_dtype")
    del other["rope_theta"]
    other["rope_parameters"] = {"rope_theta": 1e7, "rope_type": "default"}
    other["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    other["mamba_d_head"] = "auto"
    assert GraniteMoeHybridConfig.from_dict(other) == expected

    renamed = {"mamba": "linear_attention", "attention": "full_attention"}
    other["layer_types"] = [renamed[kind] for kind in other.pop("layers_block_type")]
    other["dtype"] = "torch.bfloat16"
    assert GraniteMoeHybridConfig.from_dict(other) == expected


def test_defaults_are_those_of_transformers(published):
    for name in ("layer_types", "num_key_value_heads", "mamba_d_head", "time_step_limit", "tie_word_embeddings"):
        published.pop(name, None)
    config = GraniteMoeHybridConfig.from_dict(published)
    reference = ReferenceConfig(**published)
    assert config.layer_types == ("mamba",) * config.num_hidden_layers
    assert config.num_key_value_heads == reference.num_key_value_heads
    assert config.mamba_d_head == reference.mamba_d_head
    assert config.tie_word_embeddings == reference.tie_word_embeddings


def test_attention_only_models_may_have_meaningless_mamba_fields(published):
    published |= {"layer_types": ["attention"] * 6, "mamba_n_heads": 7, "mamba_d_state": 0}
    assert GraniteMoeHybridConfig.from_dict(published).layer_types == ("attention",) * 6


REFUSED = {
    "model type": (dict(model_type="llama"), "model_type is 'llama'"),
    "missing field": (dict(hidden_size=None), "missing: hidden_size"),
    "activation": (dict(hidden_act="gelu"), "hidden_act is 'gelu', and must be one of: silu"),
    "positions": (dict(position_embedding_type="alibi"), "position_embedding_type is 'alibi'"),
    "rope type": (
        dict(position_embedding_type="rope", rope_parameters={"rope_type": "yarn"}),
        "rope_type must be 'default'",
    ),
    "mamba width": (dict(mamba_n_heads=5), "mamba_n_heads * mamba_d_head (5 * 16) must equal"),
    "groups": (dict(mamba_n_groups=3), "mamba_n_heads (8) is not divisible by mamba_n_groups (3)"),
    "heads": (dict(num_attention_heads=5), "hidden_size (64) is not divisible by num_attention_heads (5)"),
    "kv heads": (dict(num_key_value_heads=3), "num_attention_heads (4) is not divisible by num_key_value_heads (3)"),
    "experts": (dict(num_experts_per_tok=7), "num_experts_per_tok is 7"),
    "no experts chosen": (dict(num_experts_per_tok=0), "num_experts_per_tok is 0"),
    "layer name": (dict(layer_types=["mamba"] * 5 + ["conv"]), "unknown names (conv)"),
    "layer count": (dict(layer_types=["mamba"] * 5), "layer_types names 5 layers, but num_hidden_layers is 6"),
    "conv width": (dict(mamba_d_conv=1), "mamba_d_conv is 1"),
    "type": (dict(hidden_size="64"), "hidden_size is '64', and must be a whole number"),
    "fraction": (dict(hidden_size=64.5), "hidden_size is 64.5, and must be a whole number"),
    "infinite": (dict(vocab_size=math.inf), "vocab_size is inf"),
    "boolean": (dict(mamba_conv_bias=1), "mamba_conv_bias is 1"),
    "dtype": (dict(torch_dtype="int8"), "torch_dtype is 'int8'"),
    "limit": (dict(time_step_limit=[1.0, 0.5]), "time_step_limit is [1.0, 0.5]"),
    "limit shape": (dict(time_step_limit=[1.0]), "must be a pair of numbers"),
    "not a number": (dict(rms_norm_eps=math.nan), "rms_norm_eps is nan"),
    "rope parameters": (dict(position_embedding_type="rope", rope_parameters="yarn"), "must be an object"),
    "layer types of lists": (dict(layer_types=[["mamba"]] * 6), "must be a list with one name per layer"),
    "no heads": (dict(layer_types=["mamba"] * 6, num_attention_heads=0), "num_attention_heads is 0"),
    "scaling": (dict(logits_scaling=0), "logits_scaling is 0.0"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_a_sentence(published, tmp_path, change, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**published, **change}))
    with pytest.raises(UserError) as error:
        config_from_file(file)
    assert message in str(error.value)
    assert str(error.value).startswith(str(file)) and str(error.value).endswith(".")


@pytest.mark.parametrize("content, message", [("{", "not valid JSON"), ("[]", "JSON list"), (None, "does not exist")])
def test_not_a_config_file(tmp_path, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message):
        config_from_file(file)


def test_unknown_family_member():
    with pytest.raises(UserError, match=r"no family member 'h-9b'; choose one of: .*granite-4.0-h-small"):
        published_config("h-9b")
