"""The parts of vLLM that this package replaces, calls and reads, and a check that the installed vLLM still has them.

Most of them are internal to vLLM and may change in any release. A test compares the table with what this folder
imports. Nothing here imports vLLM before `first_break` is called.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from types import CodeType
from typing import NamedTuple

from typing_extensions import Format, get_annotations

_MODELS = "vllm.model_executor.models"
_LAYERS = "vllm.model_executor.layers"
_GRANITE = f"{_MODELS}.granitemoehybrid"
_NEMOTRON = f"{_MODELS}.nemotron_h"
_MIXER = f"{_LAYERS}.mamba.mamba_mixer2"
_MAMBA2 = "vllm.v1.attention.backends.mamba2_attn"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

_NO_FUNCTION = "is not a function"


class Term(NamedTuple):
    """A condition on `target`, "module:name".

    kind: the kind of condition on the names, a key of `_BREAKS`.
    names: separated by spaces.
    """

    kind: str
    target: str
    names: str


# Needed to see each config of Granite 4 before an engine starts.
HOOK = (
    Term(
        "mentions",
        "vllm.config:VllmConfig.try_verify_and_update_config",
        "MODELS_CONFIG_MAP architecture verify_and_update_config",
    ),
    Term("parameters", f"{_MODELS}.config:VerifyAndUpdateConfig.verify_and_update_config", "vllm_config"),
    Term("has", f"{_MODELS}.config:MODELS_CONFIG_MAP", "get __setitem__"),
    Term("has", "vllm.config:VllmConfig", "model_config speculative_config"),
    Term("has", "vllm.config:ModelConfig", "is_hybrid"),
)

CONTRACT = (
    Term("has", "vllm.platforms:current_platform", "is_cpu"),
    # Configs that are refused, and the worker of the others.
    Term(
        "has",
        "vllm.config:VllmConfig",
        "cache_config lora_config parallel_config additional_config quant_config kv_transfer_config scheduler_config",
    ),
    Term("has", "vllm.config:ModelConfig", "dtype is_moe hf_text_config max_model_len get_vocab_size"),
    Term("has", "vllm.config:CacheConfig", "cache_dtype prefix_match_unit"),
    Term("has", "vllm.config:ParallelConfig", "data_parallel_size tensor_parallel_size worker_cls"),
    Term("has", "vllm.config:SchedulerConfig", "max_num_seqs"),
    Term("has", "vllm.config:SpeculativeConfig", "num_speculative_tokens uses_draft_model"),
    # The mixer: its replacement, its calls, the names that it reads.
    Term("has", "vllm.model_executor.custom_op:op_registry_oot", "get __contains__"),
    Term("mentions", "vllm.model_executor.custom_op:PluggableLayer.__new__", "op_registry_oot"),
    Term("arguments", f"{_MIXER}:MambaMixer2.register_oot", "_decorated_layer_cls name"),
    Term("mentions", f"{_MIXER}:mamba_mixer2", "conv_ssm_forward projected_states output"),
    Term("parameters", f"{_MIXER}:MambaMixer2.conv_ssm_forward", "self projected_states output"),
    Term("parameters", f"{_MIXER}:MambaMixer2.get_state_dtype", "self"),
    Term("mentions", f"{_LAYERS}.mamba.abstract:MambaBase.get_kv_cache_spec", "get_state_dtype"),
    Term(
        "mentions",
        f"{_MIXER}:MambaMixer2.__init__",
        "conv1d conv_weights A D dt_bias n_groups kv_cache prefix model_config use_replayssm "
        "tp_size tped_intermediate_size in_proj out_proj norm",
    ),
    Term("arguments", "vllm.config:get_current_vllm_config", ""),
    Term("arguments", "vllm.forward_context:get_forward_context", ""),
    Term("has", "vllm.forward_context:ForwardContext", "attn_metadata"),
    Term("arguments", f"{_LAYERS}.mamba.mamba_utils:is_conv_state_dim_first", ""),
    # The metadata of a step's states: its builder and the builder's inputs.
    Term("parameters", f"{_MIXER}:MambaMixer2.get_attn_backend", "self"),
    Term("has", "vllm.v1.attention.backend:AttentionBackend", "get_builder_cls"),
    Term("parameters", f"{_MAMBA2}:Mamba2AttentionBackend.get_builder_cls", ""),
    Term("has", f"{_MAMBA2}:Mamba2AttentionMetadataBuilder", "supports_update_block_table"),
    Term("mentions", f"{_MAMBA2}:Mamba2AttentionMetadataBuilder.__init__", "checkpoint_builder"),
    Term(
        "parameters",
        "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder.build",
        "self common_prefix_len common_attn_metadata fast_build num_accepted_tokens num_decode_draft_tokens_cpu kwargs",
    ),
    Term(
        "mentions",
        "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder.__init__",
        "num_spec_tokens",
    ),
    Term("mentions", "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__", "kv_cache_spec vllm_config"),
    Term("has", "vllm.config:CacheConfig", "mamba_cache_mode"),
    Term(
        "has",
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        "block_table_tensor seq_lens seq_lens_cpu_upper_bound query_start_loc query_start_loc_cpu",
    ),
    Term(
        "parameters",
        "vllm.v1.attention.backends.utils:mamba_get_block_table_tensor",
        "block_table seq_lens kv_cache_spec mamba_cache_mode",
    ),
    Term("parameters", f"{_LAYERS}.mamba.checkpoint:MambaPrefillCheckpointBuilder.build", "self m request_rows"),
    Term("has", f"{_LAYERS}.mamba.checkpoint:MambaPrefillCheckpointMetadata", "state_indices offsets"),
    # The model: its replacement, its calls, the names that it reads.
    Term("has", f"{_MODELS}:ModelRegistry", "models"),
    Term("arguments", f"{_MODELS}:ModelRegistry.register_model", "model_arch model_cls"),
    Term("parameters", f"{_GRANITE}:GraniteMoeHybridForCausalLM.__init__", "self vllm_config prefix"),
    Term("parameters", f"{_GRANITE}:GraniteMoeHybridForCausalLM.load_weights", "self weights"),
    Term("parameters", f"{_GRANITE}:GraniteMoeHybridForCausalLM.embed_input_ids", "self input_ids"),
    Term("parameters", f"{_GRANITE}:GraniteMoeHybridForCausalLM.compute_logits", "self hidden_states"),
    Term(
        "parameters",
        f"{_GRANITE}:GraniteMoeHybridForCausalLM.forward",
        "self input_ids positions intermediate_tensors inputs_embeds kwargs",
    ),
    Term("parameters", f"{_GRANITE}:GraniteMoeHybridForCausalLM.get_mamba_state_dtype_from_config", "vllm_config"),
    Term(
        "mentions",
        f"{_GRANITE}:GraniteMoeHybridForCausalLM.__init__",
        "model lm_head config make_empty_intermediate_tensors",
    ),
    Term("mentions", f"{_GRANITE}:GraniteMoeHybridModel.forward", "norm layers"),
    Term("mentions", f"{_GRANITE}:GraniteMoeHybridModel.embed_input_ids", "embed_tokens"),
    Term("mentions", f"{_GRANITE}:GraniteMoeHybridMambaDecoderLayer.__init__", "mamba input_layernorm"),
    Term("mentions", f"{_GRANITE}:GraniteMoeHybridAttentionDecoderLayer.__init__", "self_attn input_layernorm"),
    Term(
        "mentions",
        f"{_GRANITE}:GraniteMoeHybridAttentionDecoderLayer.__init__",
        "post_attention_layernorm shared_mlp block_sparse_moe",
    ),
    Term(
        "mentions",
        f"{_GRANITE}:GraniteMoeHybridAttention.__init__",
        "qkv_proj o_proj attn rotary_emb num_heads num_key_value_heads",
    ),
    Term("has", f"{_LAYERS}.rotary_embedding:RotaryEmbedding", "forward"),
    Term("mentions", f"{_LAYERS}.rotary_embedding.base:RotaryEmbeddingBase.__init__", "cos_sin_cache"),
    Term("mentions", f"{_MODELS}.granitemoeshared:GraniteMoeSharedMLP.__init__", "input_linear output_linear"),
    Term("mentions", f"{_MODELS}.granitemoe:GraniteMoeMoE.__init__", "gate"),
    Term("arguments", f"{_MODELS}.utils:get_pp_missing_layer_names", "model"),
    Term("arguments", "vllm.distributed.parallel_state:get_pp_group", ""),
    Term("has", "vllm.distributed.parallel_state:GroupCoordinator", "is_first_rank is_last_rank world_size"),
    Term("arguments", "vllm.sequence:IntermediateTensors", "tensors"),
    Term("has", "vllm.sequence:IntermediateTensors", "__getitem__"),
    Term("has", "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata", "query_start_loc seq_lens block_table"),
    Term("mentions", "vllm.model_executor.model_loader.utils:process_weights_after_loading", "quant_method"),
    Term("has", f"{_LAYERS}.linear:UnquantizedLinearMethod", "process_weights_after_loading"),
    Term("has", f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod", "process_weights_after_loading"),
    Term(
        "has",
        f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "process_weights_after_loading",
    ),
    Term("mentions", f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts.__init__", "moe_config quant_method"),
    Term("parameters", f"{_NEMOTRON}:NemotronHForCausalLM.get_mamba_state_dtype_from_config", "vllm_config"),
    Term("mentions", f"{_NEMOTRON}:NemotronHMambaDecoderLayer.__init__", "MambaMixer2"),
    # Copies of states.
    Term("arguments", "vllm.triton_utils.dispatcher:register_kernels", "overrides"),
    Term("has", "vllm.triton_utils:HAS_TRITON", ""),
    Term(
        "parameters",
        "vllm.v1.worker.mamba_utils:precopy_mamba_align_fused_kernel",
        "mamba_state_idx_ptr src_col_ptr token_bias_ptr block_table_ptrs_ptr block_table_stride_req "
        "state_base_addrs_ptr state_block_strides_ptr state_elem_sizes_ptr state_inner_sizes_ptr "
        "state_conv_widths_ptr state_group_indices_ptr state_dim_row_count_ptr state_dim_row_stride_ptr "
        "idx_mapping_ptr num_reqs COPY_BLOCK_SIZE CONV_STATE_DIM_FIRST HAS_IDX_MAPPING TEMPORAL_TILES",
    ),
    Term(
        "parameters",
        "vllm.v1.worker.mamba_utils:postprocess_mamba_fused_kernel",
        "num_accepted_tokens_ptr mamba_state_idx_ptr num_scheduled_tokens_ptr num_computed_tokens_ptr "
        "num_draft_tokens_ptr block_table_ptrs_ptr block_table_stride_req state_base_addrs_ptr "
        "state_block_strides_ptr state_elem_sizes_ptr state_inner_sizes_ptr state_conv_widths_ptr "
        "state_group_indices_ptr state_dim_row_count_ptr state_dim_row_stride_ptr num_accepted_tokens_out_ptr "
        "idx_mapping_ptr num_reqs block_size COPY_BLOCK_SIZE CONV_STATE_DIM_FIRST HAS_IDX_MAPPING "
        "PRECOMPUTED_NEW_COMPUTED TEMPORAL_TILES",
    ),
    # Sequences that pause.
    Term("has", "vllm.v1.worker.cpu_model_runner:CPUModelRunner", ""),
    Term("parameters", f"{_RUNNER}._update_states", "self scheduler_output"),
    Term("mentions", f"{_RUNNER}._update_states", "input_batch requests scheduled_cached_reqs num_scheduled_tokens"),
    Term("has", "vllm.v1.core.sched.output:CachedRequestData", "req_ids resumed_req_ids"),
    Term("mentions", "vllm.v1.worker.gpu_input_batch:InputBatch.__init__", "req_id_to_index num_accepted_tokens_cpu"),
    # Sampling.
    Term(
        "parameters",
        "vllm.utils.cpu_triton_utils:_rejection_random_sample_kernel_impl",
        "output_token_ids cu_num_draft_tokens draft_token_ids draft_probs target_probs bonus_token_ids "
        "recovered_token_ids uniform_probs is_greedy max_spec_len vocab_size synthetic_conditional_rates "
        "NO_DRAFT_PROBS SYNTHETIC_MODE",
    ),
    Term(
        "mentions",
        "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides",
        "_rejection_random_sample_kernel_impl",
    ),
    Term(
        "parameters",
        "vllm.utils.cpu_triton_utils:_expand_kernel_impl",
        "output input_val cu_num_tokens replace_from replace_to MAX_NUM_TOKENS",
    ),
    Term("has", "vllm.utils:cpu_triton_utils", "_expand_kernel_impl"),
    Term("mentions", "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides", "_expand_kernel_impl"),
    Term(
        "mentions",
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        "worker_cls auto vllm.v1.worker.cpu_worker.CPUWorker",
    ),
    Term("parameters", "vllm.v1.worker.gpu_worker:Worker.sample_tokens", "self grammar_output"),
    Term("mentions", "vllm.v1.worker.gpu_worker:Worker.__init__", "use_v2_model_runner"),
    Term("mentions", f"{_RUNNER}.sample_tokens", "_sample _bookkeeping_sync"),
    Term("mentions", f"{_RUNNER}._bookkeeping_sync", "discard_request_mask input_batch generators np"),
    Term("mentions", "vllm.v1.worker.gpu_input_batch:InputBatch.__init__", "generators"),
    Term("has", "vllm.v1.worker.gpu_input_batch:InputBatch", "num_reqs"),
    # A proposer of our own.
    Term("mentions", f"{_RUNNER}.propose_draft_token_ids", "custom_class num_tokens_no_spec token_ids_cpu"),
)


def first_break(terms: Iterable[Term]) -> str | None:
    """Return the first thing that the installed vLLM lacks, as a clause; None if all terms hold."""
    for term in terms:
        module, _, name = term.target.partition(":")
        try:
            target = pkgutil.resolve_name(term.target)
        except ImportError:
            return f"there is no module {module}"
        except AttributeError:
            return f"{module} has no {name}"
        lack = _BREAKS[term.kind](target, term.names.split())
        if lack is not None:
            return f"{module}.{name} {lack}"
    return None


def _other_parameters(function: Callable, names: list[str]) -> str | None:
    """Return how the parameters differ from ours.

    vLLM calls our function instead, so they must be the same in the same order.
    """
    if not callable(function):
        return _NO_FUNCTION
    found = list(inspect.signature(_plain(function)).parameters)
    return None if found == names else f"has the parameters {', '.join(found)}, and not {', '.join(names)}"


def _refused_arguments(function: Callable, names: list[str]) -> str | None:
    """Return how a function refuses the arguments with which this package calls it."""
    if not callable(function):
        return _NO_FUNCTION
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        return f"does not take the arguments ({', '.join(names)}): {error}"
    return None


def _missing_attributes(owner: object, names: list[str]) -> str | None:
    """Return the attributes that this package reads and that an object, or a class's instances, lack."""
    bases = owner.__mro__ if isinstance(owner, type) else ()  # vLLM 0.16's platform has None for any name
    annotated = {name for base in bases for name in _annotations(base)}
    return _missing(name for name in names if name not in annotated and not hasattr(owner, name))


def _annotations(cls: type) -> Iterable[str]:
    # From Python 3.14 on a class evaluates them on demand, and some may name types that are not imported.
    return get_annotations(cls, format=Format.FORWARDREF)


def _missing_in_code(function: Callable, names: list[str]) -> str | None:
    """Return the names that this package relies on and that a function's code neither calls nor sets."""
    code = getattr(inspect.unwrap(_plain(function)), "__code__", None)
    return _NO_FUNCTION if code is None else _missing(sorted(set(names) - _names_in(code)))


def _missing(names: Iterable[str]) -> str | None:
    listed = ", ".join(names)
    return f"has no {listed}" if listed else None


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    return texts.union(code.co_names, *_keywords_in(code), *map(_names_in, inner))


def _keywords_in(code: CodeType) -> list[tuple[str, ...]]:
    """Return the names of keyword arguments, which are constant tuples in bytecode."""
    return [
        constant
        for constant in code.co_consts
        if isinstance(constant, tuple) and all(isinstance(name, str) for name in constant)
    ]


def _plain(function: Callable) -> Callable:
    """Return the Python function of a Triton kernel, and any other object unchanged."""
    return getattr(function, "fn", function)


_BREAKS: dict[str, Callable[..., str | None]] = {
    "parameters": _other_parameters,
    "arguments": _refused_arguments,
    "has": _missing_attributes,
    "mentions": _missing_in_code,
}
