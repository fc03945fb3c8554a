"""Configs of Nemotron models: every spelling of the published values, and refusals."""

import json
import math

import pytest

from granite4_neuron.config import (
    ATTENTION,
    MAMBA,
    NemotronHConfig,
    config_from_dict,
    config_from_file,
    published_config,
)
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import parameters
from test.support.checkpoints import HAS_NEMOTRON, NEMOTRON_CASES, nemotron_config


@pytest.fixture
def published():
    """Return the fields that decide the mathematics of Nemotron 3 Nano 30B-A3B, in the older spelling."""
    return dict(
        model_type="nemotron_h",
        vocab_size=131072,
        hidden_size=2688,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        num_hidden_layers=52,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=1856,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128,
        num_experts_per_tok=6,
        routed_scaling_factor=2.5,
        mamba_num_heads=64,
        max_position_embeddings=262144,
        torch_dtype="bfloat16",
        time_step_limit=[0.0, math.inf],
        time_step_min=0.001,
        time_step_max=0.1,
        time_step_floor=1e-4,
    )


def test_the_older_spelling(published):
    config = config_from_dict(published)
    counts = [config.layer_types.count(kind) for kind in (MAMBA, "moe", ATTENTION, "mlp")]
    assert counts == [23, 23, 6, 0] and config.layers_with(MAMBA) == 23 and config.layers_with(ATTENTION) == 6
    assert config.layer_types[:6] == ("mamba", "moe", "mamba", "moe", "mamba", "attention")
    assert (config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv) == (8, 128, 4)  # transformers' defaults
    assert config.time_step_limit == (0.0, math.inf) and config.attention_multiplier == 128**-0.5
    assert config.parts("moe").mlp_width == 3712 and config.eos_token_id == 2
    names = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    newer = {**published, "layers_block_type": [names[one] for one in published.pop("hybrid_override_pattern")]}
    newer.pop("hybrid_override_pattern")
    assert config_from_dict(newer) == config
    older = {**newer, "mamba_n_groups": 4, "mamba_dt_limit": [0.01, 0.1]}
    assert config_from_dict(older).mamba_n_groups == 4 and config_from_dict(older).time_step_limit == (0.01, 0.1)


@pytest.mark.parametrize("case", NEMOTRON_CASES, ids=lambda case: case.name)
def test_a_written_config_is_read_back(case, tmp_path):
    config = case.config()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert config_from_file(tmp_path / "config.json") == config


@pytest.mark.skipif(not HAS_NEMOTRON, reason="this transformers has no Nemotron models")
@pytest.mark.parametrize("case", NEMOTRON_CASES, ids=lambda case: case.name)
def test_transformers_reads_a_written_config(case, tmp_path):
    """The file that transformers writes from it, with more fields, is read as the same config."""
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(case.config().to_dict()))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    assert config_from_file(tmp_path / "theirs" / "config.json") == case.config()


def test_a_model_without_expert_layers_is_dense(published):
    pattern = published["hybrid_override_pattern"].replace("E", "-")
    config = config_from_dict({**published, "hybrid_override_pattern": pattern})
    assert config.num_local_experts == 0 and config.parts("mlp").mlp_width == 1856


def test_degrees_that_split_it(published):
    """Each rank has whole groups of the Mamba layers, or a part of one."""
    config = config_from_dict(published)
    assert config.rank_dimensions(8).mamba_groups == config.rank_dimensions(32).mamba_groups == 1
    with pytest.raises(UserError, match="tp_degree is 64; this model can be split by 1, 2, 4, 8, 16, 32"):
        config.rank_dimensions(64)


REFUSED = {
    "latent space": (dict(moe_latent_size=-1), "moe_latent_size is -1, and must be at least 1, or null"),
    "gated MLP": (dict(mlp_hidden_act="silu"), "mlp_hidden_act is 'silu', and must be one of: relu2"),
    "biases": (dict(mlp_bias=True), "mlp_bias is True, and must be false"),
    "biases of attention": (dict(attention_bias=True), "attention_bias is True, and must be false"),
    "pattern": (dict(hybrid_override_pattern="MEX"), "hybrid_override_pattern is 'MEX', and must be a letter"),
    "no layers": (dict(hybrid_override_pattern=None), "missing: layers_block_type"),
    "layer name": (dict(layers_block_type=["mamba2"]), "layers_block_type has unknown names (mamba2)"),
    "layer count": (dict(num_hidden_layers=51), "layers_block_type names 52 layers, but num_hidden_layers is 51"),
    "groups of experts": (dict(n_group=3), "n_routed_experts is 128, and must be a multiple of n_group (3)"),
    "groups of one": (dict(n_group=128), "n_routed_experts is 128, and must be a multiple of n_group (128)"),
    "chosen groups": (dict(n_group=4, topk_group=5), "topk_group is 5, and must be between 1 and n_group (4)"),
    "too few in the groups": (dict(n_group=32), "num_experts_per_tok is 6, and the groups of a token have 4 experts"),
    "Mamba groups": (dict(n_groups=7), "mamba_num_heads (64) is not divisible by n_groups (7)"),
    "type": (dict(mamba_num_heads="64"), "mamba_num_heads is '64', and must be a whole number"),
    "head width": (dict(head_dim=10**400), "head_dim is 1000000"),
    "width": (dict(intermediate_size=2**40), "intermediate_size is 1099511627776, and can be at most 4,194,304"),
    "time steps": (dict(time_step_limit=0.1), "time_step_limit is 0.1, and must be a pair of numbers"),
    "shared experts": (dict(n_shared_experts=2), "n_shared_experts is 2, and must be 1"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_a_sentence(published, change, message):
    with pytest.raises(UserError) as error:
        config_from_dict({**published, **change}, "the file")
    assert message in str(error.value)
    assert str(error.value).startswith("the file: ") and str(error.value).endswith(".")


def test_another_family_is_not_read_as_one():
    with pytest.raises(UserError, match=r"'granitemoehybrid' .*'granite' .* or 'nemotron_h'"):
        config_from_dict(dict(model_type="llama"))
    with pytest.raises(UserError, match="must be 'nemotron_h'"):
        NemotronHConfig.from_dict({**nemotron_config().to_dict(), "model_type": "granite"})


@pytest.mark.parametrize(
    "name, counts, millions",
    [
        ("nano-4b", (21, 4, 17, 0), 3_974),
        ("nemotron-3-nano-30b-a3b", (23, 6, 0, 23), 31_578),
        ("nemotron-3-super-120b-a12b", (40, 8, 0, 40), 120_669),
        ("nemotron-3-ultra-550b-a55b", (48, 12, 0, 48), 549_309),
    ],
)
def test_published_dimensions(name, counts, millions):
    config = published_config(name)
    assert tuple(config.layer_types.count(kind) for kind in (MAMBA, ATTENTION, "mlp", "moe")) == counts
    assert round(sum(one.numel for one in parameters(config).values()) / 1e6) == millions
