"""The config of a model, from the metadata of a GGUF file."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from granite4_neuron.checkpoint.gguf.file import GGUFFile
from granite4_neuron.config import MAMBA, MODEL_TYPE, ModelConfig, config_from_dict
from granite4_neuron.config.aliases import ATTENTION
from granite4_neuron.config.checks import LARGEST
from granite4_neuron.errors import UserError

HYBRID, DENSE, EXPERTS = ARCHITECTURES = ("granitehybrid", "granite", "granitemoe")


def read_config(file: GGUFFile) -> ModelConfig:
    """Read the config. The vocabulary's size, biases and a tied head are those of the tensors.

    Raises:
        UserError: the model is of another architecture, or its metadata is incomplete or contradicts itself.
    """
    architecture = file.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{file.path} is a model of the architecture {reprlib.repr(architecture)}; only those of Granite are run: "
            f"{', '.join(ARCHITECTURES)}."
        )
    about = _Metadata(file, architecture)
    layers, hidden, heads = _layers(about), about.count("embedding_length"), _heads(about)
    key_heads = _per_layer(about, "attention.head_count_kv", layers, heads)
    experts = about.count("expert_count", 0)
    width = about.count("feed_forward_length")
    layer_types = [ATTENTION if count else MAMBA for count in key_heads]
    uses_rope = about.flag("rope.scaling.finetuned", True) and ATTENTION in layer_types
    values = {
        "model_type": MODEL_TYPE,
        "vocab_size": _vocabulary(file),
        "hidden_size": hidden,
        "intermediate_size": width,
        "shared_intermediate_size": about.count("expert_shared_feed_forward_length", 0) if experts else width,
        "num_hidden_layers": layers,
        "layer_types": layer_types,
        "num_attention_heads": heads,
        "num_key_value_heads": max(key_heads),
        "num_local_experts": experts,
        "num_experts_per_tok": about.count("expert_used_count", 0) if experts else 0,
        "embedding_multiplier": about.number("embedding_scale", 1.0),
        # In llama.cpp 0 stands for what is not there.
        "attention_multiplier": about.number("attention.scale", 0.0) or 1 / math.sqrt(hidden / heads),
        "residual_multiplier": about.number("residual_scale", 1.0),
        "logits_scaling": about.number("logit_scale", 1.0),
        "rms_norm_eps": about.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": about.count("context_length"),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "position_embedding_type": "rope" if uses_rope else "nope",
        "rope_theta": about.number("rope.freq_base", 10000.0),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": stored_dtype(file),
    }
    if uses_rope:
        _check_rope(about, hidden // heads)
    return config_from_dict(values | _mamba(about, layer_types, hidden), str(file.path))


def stored_dtype(file: GGUFFile) -> str:
    """Return the dtype that holds the weights, or bfloat16 if they are quantized or of several dtypes. Vectors and
    other small tensors are always in float32.
    """
    types = {one.type for one in file.tensors.values()} - {"F32"}
    return {(): "float32", ("F16",): "float16"}.get(tuple(types), "bfloat16")


class _Metadata:
    """The metadata of one architecture, with checks of its types."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self._architecture = file, architecture

    def key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        value = self.file.get(self.key(name))
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.file.path} lacks {self.key(name)}.")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        # One value for each layer, all of them the same.
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        return self._checked(name, value, type(value) is int and value >= 0, "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        """Return the shortest decimal number that is the same in float32, as it was in the original config."""
        value = self.get(name, default)
        self._checked(name, value, type(value) in (int, float) and math.isfinite(value), "a number")
        # Not at the top: most commands read no GGUF file.
        import numpy

        return float(str(numpy.float32(value)))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        return self._checked(name, value, isinstance(value, bool), "true or false")

    def _checked(self, name: str, value: Any, is_right: bool, what: str) -> Any:
        if not is_right:
            raise UserError(f"{self.file.path}: {self.key(name)} is {reprlib.repr(value)}, and must be {what}.")
        return value


def _vocabulary(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{file.path} holds no weights: it lacks token_embd.weight.")
    return embedding.shape[0]


def _layers(about: _Metadata) -> int:
    layers, most = about.count("block_count"), LARGEST["num_hidden_layers"]
    if layers > most:
        raise UserError(f"{about.file.path}: {about.key('block_count')} is {layers}, and can be at most {most:,}.")
    return layers


def _heads(about: _Metadata) -> int:
    heads = about.count("attention.head_count")
    if heads == 0:
        raise UserError(f"{about.file.path}: {about.key('attention.head_count')} is 0, and must be at least 1.")
    return heads


def _per_layer(about: _Metadata, name: str, layers: int, default: int) -> list[int]:
    """Return a number for each layer, which the file has as a list or once; those that are not 0 are the same."""
    value = about.get(name, default)
    values = value if isinstance(value, list) else [value] * layers
    is_right = all(type(each) is int and each >= 0 for each in values) and len(set(values) - {0}) <= 1
    if len(values) != layers or not values or not is_right:
        raise UserError(
            f"{about.file.path}: {about.key(name)} is {reprlib.repr(value)}, and must be a whole number or a list of "
            f"{layers}, each 0 or the same."
        )
    return values


def _check_rope(about: _Metadata, head_dim: int) -> None:
    for name, supported in (("rope.scaling.type", "none"), ("rope.dimension_count", head_dim)):
        value = about.get(name, supported)
        if value != supported:
            raise UserError(
                f"{about.file.path}: {about.key(name)} is {reprlib.repr(value)}, which is not supported; it must be "
                f"{supported}."
            )


def _mamba(about: _Metadata, layer_types: list[str], hidden: int) -> dict[str, int]:
    if MAMBA not in layer_types:
        return {"mamba_n_heads": 1}  # of no layer; transformers divides by it
    inner, heads = about.count("ssm.inner_size"), about.count("ssm.time_step_rank")
    if not heads or not hidden or inner % heads or inner % hidden:
        raise UserError(
            f"{about.file.path}: {about.key('ssm.inner_size')} is {inner}, and must be divisible by "
            f"{about.key('ssm.time_step_rank')} ({heads}) and {about.key('embedding_length')} ({hidden})."
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": about.count("ssm.state_size"),
        "mamba_n_groups": about.count("ssm.group_count"),
        "mamba_d_conv": about.count("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
    }
