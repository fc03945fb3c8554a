"""The config of a model, from the metadata of a GGUF file."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

from granite4_neuron.checkpoint.gguf.file import GGUFFile
from granite4_neuron.checkpoint.gguf.metadata import Metadata
from granite4_neuron.config import ATTENTION, MAMBA, MODEL_TYPE, ModelConfig, NemotronHConfig, config_from_dict
from granite4_neuron.config.nemotron_h import EXPERTS, MLP
from granite4_neuron.errors import UserError


def read_config(file: GGUFFile) -> ModelConfig:
    """Read the config. The tensors decide the vocabulary's size, biases and whether the head is tied.

    Raises:
        UserError: the model is of another architecture, or its metadata is incomplete or contradicts itself.
    """
    architecture = file.get("general.architecture")
    if architecture not in list(_ARCHITECTURES):  # a file may have a list in its place
        raise UserError(
            f"{file.path} is a model of the architecture {reprlib.repr(architecture)}; only those of Granite and "
            f"Nemotron 3 are run: {', '.join(_ARCHITECTURES)}."
        )
    about = Metadata(file, architecture)
    return config_from_dict(_ARCHITECTURES[architecture](about), str(file.path))


def stored_dtype(file: GGUFFile) -> str:
    """Return the dtype of the weights, or bfloat16 if they are quantized or of several dtypes. Vectors and other small
    tensors are always in float32 and do not count.
    """
    types = {one.type for one in file.tensors.values()} - {"F32"}
    return {(): "float32", ("F16",): "float16"}.get(tuple(types), "bfloat16")


def predicting_layers(file: GGUFFile) -> int:
    """Return the number of layers after the model's own that predict further tokens."""
    return Metadata(file, file.get("general.architecture")).layers()[1]


def _granite(about: Metadata) -> dict[str, Any]:
    """Return the content of a ``config.json`` of a Granite model."""
    hidden, heads = about.count("embedding_length"), about.heads()
    layer_types = [ATTENTION if count else MAMBA for count in about.per_layer("attention.head_count_kv", heads)]
    uses_rope = about.flag("rope.scaling.finetuned", True) and ATTENTION in layer_types
    experts, width = about.count("expert_count", 0), about.count("feed_forward_length")
    values = _common(about) | {
        "model_type": MODEL_TYPE,
        "layer_types": layer_types,
        "intermediate_size": width,
        "shared_intermediate_size": about.count("expert_shared_feed_forward_length", 0) if experts else width,
        "rms_norm_eps": about.number("attention.layer_norm_rms_epsilon"),
        "embedding_multiplier": about.number("embedding_scale", 1.0),
        # In llama.cpp 0 means that the value is absent.
        "attention_multiplier": about.number("attention.scale", 0.0) or 1 / math.sqrt(hidden / heads),
        "residual_multiplier": about.number("residual_scale", 1.0),
        "logits_scaling": about.number("logit_scale", 1.0),
        "position_embedding_type": "rope" if uses_rope else "nope",
        "rope_theta": about.number("rope.freq_base", 10000.0),
    }
    if uses_rope:
        about.check_only("rope.scaling.type", "none")
        about.check_only("rope.dimension_count", hidden // heads)
    if MAMBA not in layer_types:
        return values | {"mamba_n_heads": 1}  # no layer uses it; transformers divides by it
    return values | _mamba(about, divisor=hidden) | {"mamba_expand": about.count("ssm.inner_size") // hidden}


def _nemotron(about: Metadata) -> dict[str, Any]:
    """Return the content of a ``config.json`` of a Nemotron 3 model. A file has no limit of time steps."""
    heads, experts = about.heads(), about.count("expert_count", 0)
    key_heads, widths = about.per_layer("attention.head_count_kv", heads), about.per_layer("feed_forward_length")
    feed_forward = EXPERTS if experts else MLP
    values = _common(about) | _mamba(about)
    head_dim = about.count("attention.key_length", about.count("embedding_length") // heads)
    values |= {
        "layer_types": [
            feed_forward if width else ATTENTION if count else MAMBA
            for width, count in zip(widths, key_heads, strict=True)
        ],
        "head_dim": head_dim,
        "rms_norm_eps": about.first_number("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    }
    about.check_only("attention.value_length", head_dim)
    scale = about.number("attention.scale", 0.0)
    if scale and not math.isclose(head_dim * scale**2, 1.0, rel_tol=1e-6):
        about.check_only("attention.scale", f"1 / sqrt({head_dim})")
    if experts:
        values |= {
            "intermediate_size": max(about.per_layer("expert_feed_forward_length", max(widths))),
            "shared_intermediate_size": about.count("expert_shared_feed_forward_length"),
            # In llama.cpp 0 means that the value is absent.
            "n_group": about.count("expert_group_count", 1) or 1,
            "topk_group": about.count("expert_group_used_count", 1) or 1,
            "norm_topk_prob": about.flag("expert_weights_norm", False),
            "routed_scaling_factor": about.number("expert_weights_scale", 1.0) or 1.0,
        }
    else:
        values["mlp_intermediate_size"] = max(widths)
    only = {
        "model_type": NemotronHConfig.model_type,
        "n_shared_experts": about.count("expert_shared_count", 1) if experts else None,
        "moe_latent_size": about.count("moe_latent_size", 0) or None,
        "mlp_bias": _has(about, ".ffn_up.bias"),
    }
    return {NemotronHConfig.json_name(name): value for name, value in values.items()} | only


_ARCHITECTURES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "granitehybrid": _granite,
    "granite": _granite,
    "granitemoe": _granite,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
}


def _common(about: Metadata) -> dict[str, Any]:
    """Return the values common to all families, by the names of `ModelConfig`."""
    file, (layers, _) = about.file, about.layers()
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{file.path} holds no weights: it lacks token_embd.weight.")
    experts = about.count("expert_count", 0)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": about.count("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": about.heads(),
        "num_key_value_heads": max(about.per_layer("attention.head_count_kv", about.heads())),
        "num_local_experts": experts,
        "num_experts_per_tok": about.count("expert_used_count", 0) if experts else 0,
        "max_position_embeddings": about.count("context_length"),
        "attention_bias": _has(about, ".attn_q.bias"),
        "mamba_conv_bias": _has(about, ".ssm_conv1d.bias"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": stored_dtype(file),
    }


def _has(about: Metadata, ending: str) -> bool:
    """Return whether a layer has such a tensor."""
    return any(name.endswith(ending) for name in about.file.tensors)


def _mamba(about: Metadata, divisor: int = 1) -> dict[str, int]:
    """Return the sizes of Mamba layers, by the names of `ModelConfig`.

    Args:
        divisor: must divide the width, as the number of heads must.
    """
    inner, heads = about.count("ssm.inner_size"), about.count("ssm.time_step_rank")
    if not heads or not divisor or inner % heads or inner % divisor:
        also = "" if divisor == 1 else f" and {about.key('embedding_length')} ({divisor})"
        raise UserError(
            f"{about.file.path}: {about.key('ssm.inner_size')} is {inner}, and must be divisible by "
            f"{about.key('ssm.time_step_rank')} ({heads}){also}."
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": about.count("ssm.state_size"),
        "mamba_n_groups": about.count("ssm.group_count"),
        "mamba_d_conv": about.count("ssm.conv_kernel"),
    }
