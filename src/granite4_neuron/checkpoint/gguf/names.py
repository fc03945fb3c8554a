"""The names, shapes and values that llama.cpp's converter gives the tensors of models."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from granite4_neuron.config import ModelConfig

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.router.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.fc1_latent_proj": "ffn_latent_down",
    "block_sparse_moe.fc2_latent_proj": "ffn_latent_up",
}
# Names for MLPs and experts, the first with a gate.
_GATED = {"input_linear": ("ffn_gate", "ffn_up"), "output_linear": ("ffn_down",)}
_NOT_GATED = {"input_linear": ("ffn_up",), "output_linear": ("ffn_down",)}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def gguf_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the tensors that together make the parameter of this published name."""
    match = _LAYER.fullmatch(name)
    prefix, part = (f"blk.{match[1]}.", match[2]) if match else ("", name)
    module, ending = (part, "") if part in _NAMES else part.rsplit(".", 1)
    ending = ending and f".{ending}"
    block, _, linear = module.partition(".")
    feed_forward = _GATED if config.has_gated_mlp else _NOT_GATED
    if linear in feed_forward:
        which = "_exps" if block == "block_sparse_moe" else "_shexp" if config.num_local_experts else ""
        return tuple(f"{prefix}{one}{which}{ending}" for one in feed_forward[linear])
    return (f"{prefix}{_NAMES[module]}{ending}",)


def to_gguf(name: str, tensor: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, ...]:
    """Convert a parameter to tensors under the names of `gguf_names`."""
    if name.endswith("input_linear.weight") and config.has_gated_mlp:
        return tensor.chunk(2, dim=-2)
    if name.endswith("mamba.A_log"):
        return (-tensor.exp()[:, None],)
    if name.endswith("mamba.D"):
        return (tensor[:, None],)
    if name.endswith("mamba.norm.weight"):
        return (tensor.unflatten(0, (config.mamba_n_groups, -1)),)
    if name.endswith("mamba.conv1d.weight"):
        return (tensor.squeeze(1),)
    if heads := _rotary_heads(name, config):
        return (tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2),)
    return (tensor,)


def from_gguf(name: str, tensors: Sequence[torch.Tensor], shape: Sequence[int], config: ModelConfig) -> torch.Tensor:
    """Convert the tensors under the names of `gguf_names` to the parameter. A_log, which a file has as -exp(A_log) in
    float32, comes back exactly but for the last digit.

    Args:
        tensors: in the shapes of `to_gguf`; a matrix may have another number of columns.
        shape: the parameter's, if it is not a matrix.
    """
    if name.endswith("mamba.A_log"):
        return (-tensors[0]).log().view(*shape)
    if name.endswith(("mamba.D", "mamba.norm.weight", "mamba.conv1d.weight")):
        return tensors[0].reshape(*shape)
    if heads := _rotary_heads(name, config):
        return tensors[0].unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=-2)


def _rotary_heads(name: str, config: ModelConfig) -> int | None:
    """Return the number of heads of a projection whose rows the converter reorders, even in models without rotary
    positions: each row of the first half of a head is followed by the row of the second half that it rotates with.
    """
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        return config.num_attention_heads
    return config.num_key_value_heads if name.endswith(("k_proj.weight", "k_proj.bias")) else None
