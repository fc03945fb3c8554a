"""Converts weights from published names and layouts to those of the traced model, before NxD shards them."""

from __future__ import annotations

import re

import torch

from granite4_neuron.checkpoint.names import part_of
from granite4_neuron.checkpoint.sharding import rank_slices
from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig

# NxD gives each rank an equal contiguous part of a weight, so ranks' slices are in order. A part is a view of the whole
# weight: sharding needs no memory beyond the checkpoint.
_SLICED = re.compile(r"layers\.\d+\.(mamba|shared_mlp)\.")
# NxD's names for the experts' weights, which it has transposed.
_EXPERTS = {
    "input_linear.weight": "expert_mlps.mlp_op.gate_up_proj.weight",
    "output_linear.weight": "expert_mlps.mlp_op.down_proj.weight",
}


def convert(state_dict: dict[str, torch.Tensor], config: GraniteMoeHybridInferenceConfig) -> dict[str, torch.Tensor]:
    """Convert the weights of the whole model, for all ranks.

    Args:
        state_dict: under stored names without the leading "model.". It is emptied meanwhile, to save memory.
    """
    granite, degree = config.granite, config.neuron_config.tp_degree
    ranks = torch.arange(degree, dtype=torch.int32)
    converted = {"rank_util.rank": ranks}
    stored: dict[str, dict[int, str]] = {}
    for stored_name in state_dict:
        part = part_of(stored_name)
        stored.setdefault(part.name, {})[part.number] = stored_name
    for name, numbered in stored.items():
        parts = [state_dict.pop(stored_name) for _, stored_name in sorted(numbered.items())]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        layer, _, of_experts = name.partition(".block_sparse_moe.")
        if _SLICED.match(name):
            converted[name] = rank_slices(f"model.{name}", tensor, granite, degree)
        elif of_experts in _EXPERTS:
            slices = rank_slices(f"model.{name}", tensor, granite, degree)
            converted[f"{layer}.block_sparse_moe.{_EXPERTS[of_experts]}"] = slices.transpose(1, 2).contiguous()
        else:
            converted[name] = tensor
        if name.endswith("self_attn.o_proj.weight"):
            converted[name.replace("o_proj.weight", "rank_util.rank")] = ranks
    if config.neuron_config.fused_qkv:
        _fuse_qkv(converted)
    return converted


def _fuse_qkv(state_dict: dict[str, torch.Tensor]) -> None:
    for name in [name for name in state_dict if ".self_attn.q_proj." in name]:
        parts = [state_dict.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        state_dict[name.replace("q_proj", "Wqkv")] = torch.cat(parts)
