"""Writes a checkpoint as a GGUF file for llama-bench and llama-server, in its stored dtype and without its tokenizer.

    python -m benchmarks.gguf_checkpoint FOLDER FILE

This needs gguf (`pip install gguf`). llama-quantize quantizes the file.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.errors import reports_errors
from granite4_neuron.checkpoint.stored_tensors import StoredTensors
from granite4_neuron.config import MAMBA, GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import parameters

if TYPE_CHECKING:
    import gguf

_ARCHITECTURE = "granitehybrid"
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
}
_FEED_FORWARDS = {"input_linear": ("ffn_gate", "ffn_up"), "output_linear": ("ffn_down",)}
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NORMAL = 1  # a token that is neither a byte nor a control character
_FLOAT32 = ("ssm_conv1d", "ssm_norm", "ffn_gate_inp")  # and all vectors


def write_gguf(folder: Path, file: Path) -> None:
    """Write the model of a checkpoint folder, tensor by tensor.

    Raises:
        UserError: gguf is not installed, the model has rotary embeddings, or the checkpoint is not one.
    """
    try:
        import gguf
    except ImportError:
        raise UserError("a GGUF file needs gguf; install it with: pip install gguf.") from None
    config = GraniteMoeHybridConfig.from_file(folder / "config.json")
    if config.uses_rope:
        raise UserError(f"the model in {folder} has rotary embeddings, which are not written to GGUF files here.")
    stored = StoredTensors(folder)
    stored.check(config)
    dtype = stored.dtype()
    writer = gguf.GGUFWriter(file, _ARCHITECTURE)
    _write_config(writer, config)
    shapes = {name: one.shape for name, one in parameters(config).items()}
    for name, shape in shapes.items():
        for written, tensor in _written(name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), config):
            raw = gguf.GGMLQuantizationType[_TYPES[tensor.dtype]]
            writer.add_tensor_info(written, tensor.shape, None, tensor.nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in shapes:
        for _, tensor in _written(name, stored.read(name).to(getattr(torch, dtype)), config):
            writer.write_tensor_data(tensor.contiguous().view(torch.uint8).numpy())
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: GraniteMoeHybridConfig) -> None:
    writer.add_block_count(len(config.layer_types))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(config.vocab_size)
    # llama-server gives no tokens without a text for each; these are their numbers.
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([_NORMAL] * config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(
        config.intermediate_size if config.num_local_experts else config.shared_intermediate_size
    )
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([0 if kind == MAMBA else config.num_key_value_heads for kind in config.layer_types])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_finetuned(False)  # which says that there are no rotary embeddings
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_intermediate_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def _written(name: str, tensor: torch.Tensor, config: GraniteMoeHybridConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the names and values in the GGUF file for a stored tensor."""
    layer, prefix, part = "", "", name
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        layer, part = match.groups()
        prefix = f"blk.{layer}."
    part = part.removesuffix(".weight")
    block, _, linear = part.partition(".")
    if linear in _FEED_FORWARDS:
        ending = "_exps" if block == "block_sparse_moe" else "_shexp" if config.num_local_experts else ""
        names = _FEED_FORWARDS[linear]
        for one, half in zip(names, tensor.chunk(len(names), dim=-2), strict=True):
            yield f"{prefix}{one}{ending}.weight", half
        return
    ending = ".weight" if name.endswith(".weight") else ""
    if part.endswith(".bias"):
        part, ending = part.removesuffix(".bias"), ".bias"
    written = _NAMES[part]
    if tensor.dim() == 1 or written in _FLOAT32:
        tensor = tensor.float()
    if written == "ssm_a":
        tensor = -tensor.exp()
    if written in ("ssm_a", "ssm_d"):
        tensor = tensor[:, None]
    if written == "ssm_norm":
        tensor = tensor.unflatten(0, (config.mamba_n_groups, -1))
    if written == "ssm_conv1d" and tensor.dim() > 1:
        tensor = tensor.squeeze(1)
    yield f"{prefix}{written}{ending}", tensor


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the checkpoint")
    parser.add_argument("file", type=Path, help="to write")
    options = parser.parse_args(arguments)
    write_gguf(options.folder, options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
