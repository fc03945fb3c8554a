"""Small random checkpoints that together cover the config options of each model family."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedTokenizerFast

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.config import GraniteMoeHybridConfig, ModelConfig, NemotronHConfig
from granite4_neuron.config.published import published_names

MIXED = ("mamba", "attention", "mamba", "mamba", "attention", "mamba")


def granite_names() -> list[str]:
    """Return the names of the published Granite 4.0 checkpoints."""
    return [name for name in published_names() if name.startswith("granite-")]


def small_config(**changes) -> GraniteMoeHybridConfig:
    """Return the config of a hybrid MoE model of a few hundred thousand parameters, with `changes`."""
    values = dict(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=48,
        shared_intermediate_size=80,
        num_hidden_layers=len(changes.get("layer_types", MIXED)),
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=3,
        embedding_multiplier=12.0,
        attention_multiplier=0.09,
        residual_multiplier=0.4,
        logits_scaling=1.1,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        layer_types=MIXED,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=32,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GraniteMoeHybridConfig(**{**values, **changes})


ONE_PART_LAYERS = ("mamba", "moe", "mamba", "attention", "mlp", "moe")


def nemotron_config(**changes) -> NemotronHConfig:
    """Return the config of a small Nemotron model whose layers are of all kinds, with `changes`."""
    values = dict(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=48,
        shared_intermediate_size=80,
        mlp_intermediate_size=72,
        num_hidden_layers=len(changes.get("layer_types", ONE_PART_LAYERS)),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        layer_types=ONE_PART_LAYERS,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=4,
        time_step_limit=(0.02, 0.5),  # many of a random model's time steps are outside
        bos_token_id=1,
        eos_token_id=2,
    )
    return NemotronHConfig(**{**values, **changes})


def large_config(**changes) -> GraniteMoeHybridConfig:
    """Return the config of a dense model of 180 MB in bfloat16, in tensors of a few MB each, with `changes`."""
    values = dict(hidden_size=512, mamba_d_head=128, shared_intermediate_size=2048, layer_types=("mamba",) * 20)
    return small_config(**{**values, "num_local_experts": 0, **changes})


@dataclass(frozen=True)
class Case:
    """One random checkpoint of the parity tests."""

    name: str
    changes: dict = field(default_factory=dict)
    max_A: float = 16.0

    def config(self) -> ModelConfig:
        return small_config(**self.changes)


@dataclass(frozen=True)
class NemotronCase(Case):
    """A checkpoint of a Nemotron model."""

    def config(self) -> ModelConfig:
        return nemotron_config(**self.changes)


DENSE = dict(num_local_experts=0, num_experts_per_tok=0)
CASES = (
    Case("moe"),
    Case("dense", DENSE),
    Case("fast_decay", max_A=128.0),
    Case("two_groups", dict(mamba_n_groups=2, mamba_d_state=32)),
    Case("conv3_no_bias", dict(mamba_d_conv=3, mamba_conv_bias=False)),
    Case("conv2_state128", dict(mamba_d_conv=2, mamba_d_state=128)),
    Case("projection_bias", dict(mamba_proj_bias=True, attention_bias=True)),
    Case("rope", dict(position_embedding_type="rope", rope_theta=1e7)),
    Case("untied_head", dict(tie_word_embeddings=False, **DENSE)),
    Case("attention_only_rope", dict(layer_types=("attention",) * 3, position_embedding_type="rope", **DENSE)),
    Case("attention_only_nope", dict(layer_types=("attention",) * 3, num_key_value_heads=4)),
    Case("mamba_only", dict(layer_types=("mamba",) * 4, mamba_d_state=64)),
    Case("time_step_limit", dict(time_step_limit=(0.01, 0.2))),
    Case("one_expert_per_token", dict(num_experts_per_tok=1, num_key_value_heads=1)),
    Case("two_wide_mamba_heads", dict(mamba_n_heads=2, mamba_d_head=64)),
)

# Installed with transformers 5; older releases do not have the class.
HAS_NEMOTRON = hasattr(transformers, "NemotronHForCausalLM")
NEMOTRON_CASES = (
    NemotronCase("nemotron"),
    NemotronCase(
        "nemotron_dense",
        dict(
            layer_types=("mamba", "attention", "mlp"),
            num_local_experts=0,
            hidden_size=72,
            mamba_n_groups=2,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
        ),
    ),
    NemotronCase("nemotron_latent", dict(layer_types=("mamba", "moe", "attention", "moe"), moe_latent_size=32)),
)
NEMOTRON_EXPERTS = NEMOTRON_CASES[0], NEMOTRON_CASES[2]  # those with routed experts


def save_dense(folder: Path, max_shard_size: str = "1GB", **changes) -> GraniteForCausalLM:
    """Write a small random checkpoint of transformers' GraniteForCausalLM in which every part affects the output."""
    values = dict(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        embedding_multiplier=12.0,
        attention_multiplier=0.09,
        residual_multiplier=0.4,
        logits_scaling=1.1,
        max_position_embeddings=600,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = GraniteForCausalLM(GraniteConfig(**{**values, **changes})).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 1 / 12 if "embed" in name else 0.2 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        with torch.no_grad():
            parameter.normal_(1.0 if "norm" in name else 0.0, scale, generator=generator)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_byte_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write a tokenizer with one token per byte and a few special ones, 262 in all."""
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|bos|>"]
    vocabulary = {token: number for number, token in enumerate(special + sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def save_endless(folder: Path) -> Path:
    """Save the bundled model with an end-of-sequence token that it never generates."""
    shutil.copytree(bundled_checkpoint(), folder)
    for name, change in (
        ("config.json", {"eos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": 0}),
        ("tokenizer_config.json", {"eos_token": "<|pad|>"}),
    ):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    return folder
