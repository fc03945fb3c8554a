"""GGUF files of small checkpoints in any type, also damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize
from safetensors.torch import load_file

from benchmarks.gguf_checkpoint import write_gguf

# The bytes of a block that hold the float16 scales of K-quants, and of IQ4.
_K_QUANTS = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
SCALES = _K_QUANTS | {"IQ4_NL": (0, 2), "IQ4_XS": (0, 2)}

# Takes a tensor's name and values, and returns its bytes and type, or None to leave it out.
Change = Callable[[str, numpy.ndarray], tuple[numpy.ndarray, Type] | None]


def written(folder: Path, type: str | None = None) -> Path:
    """Write a checkpoint as GGUF beside its folder, with all matrices in `type` or as `write_gguf` stores them."""
    plain = folder.parent / f"{folder.name}.gguf"
    write_gguf(folder, plain)
    return plain if type is None else rewritten(plain, folder.parent / f"{folder.name}-{type}.gguf", in_type(type))


def nemotron_file(folder: Path, to: Path, predicting: bool = False) -> Path:
    """Write a Nemotron checkpoint folder as llama.cpp's converter does, from its published names.

    Args:
        predicting: add a layer for multi-token prediction after the others, or its beginning.
    """
    values, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    kinds, experts = values["layers_block_type"], "moe" in values["layers_block_type"]
    writer = gguf.GGUFWriter(to, "nemotron_h_moe" if experts else "nemotron_h")
    width = values["moe_intermediate_size"] if experts else values["intermediate_size"]
    key_heads = values["num_key_value_heads"]
    writer.add_block_count(len(kinds) + predicting)
    writer.add_context_length(2**20)
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds] + [width] * predicting)
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(
        [key_heads if kind == "full_attention" else 0 for kind in kinds] + [key_heads] * predicting
    )
    writer.add_layer_norm_rms_eps(values["layer_norm_epsilon"])
    writer.add_layer_norm_eps(values["layer_norm_epsilon"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_rope_dimension_count(values["hidden_size"] // values["num_attention_heads"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_vocab_size(values["vocab_size"])
    writer.add_ssm_conv_kernel(values["conv_kernel"])
    writer.add_ssm_state_size(values["ssm_state_size"])
    writer.add_ssm_group_count(values["n_groups"])
    writer.add_ssm_inner_size(values["mamba_num_heads"] * values["mamba_head_dim"])
    writer.add_ssm_time_step_rank(values["mamba_num_heads"])
    if experts:
        writer.add_expert_used_count(values["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(values["moe_shared_expert_intermediate_size"])
        writer.add_expert_count(values["n_routed_experts"])
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(values["norm_topk_prob"])
        writer.add_expert_weights_scale(values["routed_scaling_factor"])
        writer.add_expert_group_count(values["n_group"])
        writer.add_expert_group_used_count(values["topk_group"])
        if values["moe_latent_size"] is not None:
            writer.add_moe_latent_size(values["moe_latent_size"])
    if predicting:
        writer.add_nextn_predict_layers(1)
    writer.add_bos_token_id(values["bos_token_id"])
    writer.add_eos_token_id(values["eos_token_id"])
    for name, array in _converted(tensors, values).items():
        writer.add_tensor(name, array)
    if predicting:
        writer.add_tensor(f"blk.{len(kinds)}.nextn.enorm.weight", numpy.ones(values["hidden_size"], numpy.float32))
        writer.add_tensor(f"blk.{len(kinds)}.attn_norm.weight", numpy.ones(values["hidden_size"], numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


_OUTSIDE = {
    "backbone.embeddings.weight": "token_embd",
    "backbone.norm_f.weight": "output_norm",
    "lm_head.weight": "output",
}
_OF_LAYER = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}


def _converted(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, numpy.ndarray]:
    """Return a published Nemotron checkpoint's tensors under GGUF's names."""
    found = {}
    for name, tensor in tensors.items():
        if name in _OUTSIDE:
            found[f"{_OUTSIDE[name]}.weight"] = tensor
            continue
        _, _, number, part = name.split(".", 3)
        if ".experts." in part:
            which = part.split(".")[3].removesuffix("_proj")
            stack = found.setdefault(f"blk.{number}.ffn_{which}_exps.weight", [None] * values["n_routed_experts"])
            stack[int(part.split(".")[2])] = tensor
            continue
        if part.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif part.endswith("A_log"):
            tensor = -tensor.exp()[:, None]
        elif part.endswith("mixer.D"):
            tensor = tensor[:, None]
        elif part.endswith("mixer.norm.weight"):
            tensor = tensor.reshape(values["n_groups"], -1)
        elif part.endswith(("q_proj.weight", "k_proj.weight")):
            heads = values["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
            shape = tensor.shape
            tensor = tensor.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)
        found[f"blk.{number}.{_OF_LAYER[part]}"] = tensor
    stacked = {name: torch.stack(one) if isinstance(one, list) else one for name, one in found.items()}
    return {name: one.contiguous().numpy() for name, one in stacked.items()}


def in_type(name: str) -> Change:
    """Return a change that stores all matrices in a type. gguf cannot quantize to those of SCALES, so they are
    random.
    """
    kind, random = Type[name], numpy.random.default_rng(0)

    def change(_: str, values: numpy.ndarray) -> tuple[numpy.ndarray, Type]:
        if is_small(values):
            return values, Type.F32
        if name not in SCALES:
            return quantize(values, kind), kind
        blocks = random.integers(0, 256, quant_shape_to_byte_shape(values.shape, kind), dtype=numpy.uint8)
        start, end = SCALES[name]
        bytes_of_block = gguf.GGML_QUANT_SIZES[kind][1]
        scales = blocks.reshape(-1, bytes_of_block)[:, start:end].view(numpy.uint16)
        # Finite and small, of either sign: an exponent of 4 to 7.
        scales[:] = scales & 0x83FF | (scales >> 10 & 3 | 4) << 10
        blocks.reshape(-1, bytes_of_block)[:, start:end] = scales.view(numpy.uint8)
        return blocks, kind

    return change


def is_small(values: numpy.ndarray) -> bool:
    """Return whether llama.cpp stores a tensor in float32 in every file."""
    return values.ndim < 2 or min(values.shape[-2:]) < 16


def rewritten(
    source: Path, to: Path, tensors: Change = lambda name, values: (values, Type.F32), metadata: Mapping[str, Any] = {}
) -> Path:
    """Copy a GGUF file with changed tensors and metadata. None removes one."""
    reader = gguf.GGUFReader(source)
    architecture = metadata.get("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(to, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in metadata:
            continue
        of_items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], of_items)
    for name, value in metadata.items():
        if value is not None and name != "general.architecture":
            of_items = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value), of_items)
    for tensor in reader.tensors:
        changed = tensors(tensor.name, dequantize(tensor.data, tensor.tensor_type))
        if changed is not None:
            writer.add_tensor(tensor.name, numpy.array(changed[0]), raw_dtype=changed[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to
