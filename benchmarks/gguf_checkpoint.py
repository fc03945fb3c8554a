"""Writes a checkpoint as a GGUF file for llama.cpp, in its stored dtype and with its tokenizer, if it has one.

    python -m benchmarks.gguf_checkpoint FOLDER FILE

llama-quantize quantizes the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.pre_tokenizers import Sequence as Steps
from transformers import PreTrainedTokenizerFast

from benchmarks.errors import reports_errors
from granite4_neuron.checkpoint.gguf.names import gguf_names, to_gguf
from granite4_neuron.checkpoint.gguf.tokenizer import AS_LLAMA_3, WORDS
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.stored_tensors import StoredTensors
from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig, NemotronHConfig, config_from_file
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import parameters

if TYPE_CHECKING:
    import gguf

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FLOAT32 = ("mamba.conv1d.weight", "router.layer.weight")  # besides all vectors


def write_gguf(folder: Path, file: Path) -> None:
    """Write the model of a checkpoint folder, tensor by tensor.

    Raises:
        UserError: the folder is not a checkpoint, or not a folder, or a GGUF file cannot hold the model.
    """
    import gguf

    config = config_from_file(folder / "config.json")
    if config.written_time_step_limit:
        raise UserError("a GGUF file has no place for limits of time steps.")
    stored = StoredTensors(folder, config)
    stored.check(config)
    dtype = getattr(torch, stored.dtype())
    writer = gguf.GGUFWriter(file, _architecture(config))
    _write_config(writer, config)
    if (folder / "tokenizer.json").is_file():
        _write_tokenizer(writer, open_checkpoint(folder).load_tokenizer(), config.vocab_size)
    else:
        _write_placeholders(writer, config.vocab_size)
    shapes = {name: one.shape for name, one in parameters(config).items()}
    for name, shape in shapes.items():
        for written, tensor in _written(name, torch.empty(shape, dtype=dtype, device="meta"), dtype, config):
            raw = gguf.GGMLQuantizationType[_TYPES[tensor.dtype]]
            writer.add_tensor_info(written, tensor.shape, None, tensor.nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in shapes:
        for _, tensor in _written(name, stored.read(name), dtype, config):
            writer.write_tensor_data(tensor.contiguous().view(torch.uint8).numpy())
    writer.close()


def _architecture(config: ModelConfig) -> str:
    if isinstance(config, NemotronHConfig):
        return "nemotron_h_moe" if config.num_local_experts else "nemotron_h"
    if MAMBA in config.layer_types:
        return "granitehybrid"
    return "granitemoe" if config.num_local_experts else "granite"


def _write_config(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(len(config.layer_types))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok if config.num_local_experts else 0)
    writer.add_head_count(config.num_attention_heads)
    key_heads = config.num_key_value_heads
    writer.add_head_count_kv([key_heads if config.parts(kind).mixer == ATTENTION else 0 for kind in config.layer_types])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_finetuned(config.uses_rope)  # GGUF marks rotary embeddings this way
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if isinstance(config, NemotronHConfig):
        _write_nemotron(writer, config)
    else:
        _write_granite(writer, config)
    for number, add in (
        (config.bos_token_id, writer.add_bos_token_id),
        (config.eos_token_id, writer.add_eos_token_id),
        (config.pad_token_id, writer.add_pad_token_id),
    ):
        if isinstance(number, int):
            add(number)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_intermediate_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def _write_granite(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_feed_forward_length(
        config.intermediate_size if config.num_local_experts else config.shared_intermediate_size
    )
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _write_nemotron(writer: gguf.GGUFWriter, config: NemotronHConfig) -> None:
    all_parts = [config.parts(kind) for kind in config.layer_types]
    width = config.intermediate_size if config.num_local_experts else config.mlp_intermediate_size
    writer.add_feed_forward_length([width if parts.mlp_width else 0 for parts in all_parts])
    writer.add_layer_norm_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if not config.num_local_experts:
        return
    if any(parts.mlp_width and not parts.has_experts for parts in all_parts):
        raise UserError("a GGUF file has no place for a Nemotron model with experts and with layers that are an MLP.")
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(1)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.moe_latent_size:
        writer.add_moe_latent_size(config.moe_latent_size)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    from gguf import TokenType

    about = json.loads(tokenizer.backend_tokenizer.to_str())
    known = (name for name, same in WORDS.items() if _pre_tokenizer(same()) == about["pre_tokenizer"])
    words = next((name for name in known if (name in AS_LLAMA_3) == about["model"].get("ignore_merges")), None)
    if about["model"]["type"] != "BPE" or words is None:
        raise UserError("only tokenizers of Granite and Nemotron 3 models can be written to GGUF files.")
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, number in tokenizer.get_vocab().items():
        tokens[number], types[number] = token, TokenType.NORMAL
    for added in about["added_tokens"]:
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_add_bos_token(tokenizer("").input_ids == [tokenizer.bos_token_id])
    writer.add_token_merges([" ".join(merge) for merge in about["model"]["merges"]])
    if tokenizer.chat_template is not None:
        template = tokenizer.chat_template
        named = isinstance(template, dict) and [{"name": name, "template": one} for name, one in template.items()]
        writer.add_chat_template(named or template)


def _write_placeholders(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Write each token's number as its text, because llama-server returns no tokens without texts."""
    from gguf import TokenType

    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(vocab_size)])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([TokenType.NORMAL] * vocab_size)


def _pre_tokenizer(steps: list[PreTokenizer]) -> dict[str, Any]:
    """Return the list of pre-tokenizers in tokenizer.json."""
    return json.loads((steps[0] if len(steps) == 1 else Steps(steps)).__getstate__())


def _written(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the names and values in the GGUF file for a stored tensor."""
    is_small = tensor.dim() == 1 or name.endswith(_FLOAT32)
    tensor = tensor.to(torch.float32 if is_small else dtype)
    return zip(gguf_names(name, config), to_gguf(name, tensor, config), strict=True)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the checkpoint's folder")
    parser.add_argument("file", type=Path, help="to write")
    options = parser.parse_args(arguments)
    write_gguf(options.folder, options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
