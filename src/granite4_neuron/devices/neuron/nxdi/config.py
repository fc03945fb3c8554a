"""NxD Inference's config of the model: the checkpoint's config.json, and how to run it."""

from __future__ import annotations

from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.config.choices import DECODE_KERNELS, EXPERTS_DECODE, PREFILL_SCANS
from granite4_neuron.devices.graphs.operators import XLA, expert_path
from granite4_neuron.devices.neuron.compiled_graphs import continuation_tokens
from granite4_neuron.devices.neuron.expert_slots import num_slots
from granite4_neuron.devices.neuron.nki.experts_decode import check_experts_decode
from granite4_neuron.devices.neuron.nki.experts_prefill import check_experts_prefill
from granite4_neuron.devices.neuron.sdk import (
    COMPILED_STATE_DTYPES,
    EXPERT_PATHS,
    LOGICAL_CORE_SIZE,
    require_nki,
)
from granite4_neuron.devices.selection import default_experts_decode, select_operators, uses_nki
from granite4_neuron.errors import UserError, check_choice
from granite4_neuron.ops import Operators

# The most tokens of a graph whose experts are computed choice by choice; longer graphs sort rows into blocks.
SLOT_TOKENS = 128
# NxD's kernel that splits a block's widths over two cores takes blocks of multiples of this many tokens.
_INTERMEDIATE_BLOCK = 256
# Multiples that NxD's kernels for experts take, as nki-library's core/moe/moe_cte checks them.
_HIDDEN_BLOCK, _WIDTH_BLOCK = 512, 16

# Options of NeuronConfig that change the meaning of a state tensor, a position or a rank's share of the tokens, with
# the only value of each that the recurrent state supports.
_SUPPORTED = {
    "padding_side": "right",
    "sequence_parallel_enabled": False,
    "cp_degree": 1,
    "attention_dp_degree": 1,
    "pp_degree": 1,
    "ep_degree": 1,
    "moe_ep_degree": 1,
    "flash_decoding_enabled": False,
    "is_prefix_caching": False,
    "is_block_kv_layout": False,
    "is_chunked_prefill": False,
    "windowed_context_encoding_size": None,
    "k_cache_transposed": False,
    "kv_cache_quant": False,
    "kv_quant_config": None,
    "token_generation_batches": None,
    "medusa_speculation_length": 0,
    "enable_eagle_speculation": False,
    "enable_token_tree": False,
    "is_medusa": False,
    "quantized": False,
    "lora_config": None,
    "async_mode": False,
    "layer_boundary_markers": False,
    "attn_block_tkg_nki_kernel_enabled": False,
    "qkv_kernel_fuse_residual_add": False,
}


class GraniteMoeHybridInferenceConfig(InferenceConfig):
    """The config of `NeuronGraniteMoeHybridForCausalLM`, dense models included; its neuron_config is a MoENeuronConfig.

    Args:
        prefill_scan, decode_kernel: by keyword; see `devices.selection`.
        expert_path: by keyword, one of `sdk.EXPERT_PATHS`.
        experts_decode: by keyword, one of `choices.EXPERTS_DECODE`, for the experts of few tokens if expert_path is one
            of this package's; None for `default_experts_decode`.
        state_dtype: by keyword, of SSM states: "float32", or "bfloat16" with the NKI kernel for decode, which rounds as
            the hardware does.

    Raises:
        UserError: the checkpoint is not a Granite 4 hybrid, tp_degree does not divide it, or neuron_config asks for
            something that is not supported.
    """

    prefill_scan = "chunked"
    decode_kernel = "torch"
    expert_path = "torch"
    experts_decode: str | None = None
    state_dtype = "float32"

    @property
    def granite(self) -> GraniteMoeHybridConfig:
        """The model's own config."""
        return GraniteMoeHybridConfig.from_dict(self.__dict__)

    @property
    def operators(self) -> Operators:
        """Operators of this package's layers, with the kernels named by prefill_scan and decode_kernel."""
        return select_operators(XLA, self.granite, self.neuron_config.tp_degree, self.prefill_scan, self.decode_kernel)

    def form_of_experts(self, tokens: int) -> str:
        """Return how a graph of that many tokens computes the experts: one of `choices.EXPERTS_DECODE`; "blocks" of
        rows in torch; "nki blocks" by kernel; or "nxd".
        """
        is_by_kernel = self.expert_path == "nki"
        if self.expert_path == "nxd":
            return "nxd"
        if tokens > SLOT_TOKENS:
            return "nki blocks" if is_by_kernel else "blocks"
        sizes = self.granite, self.neuron_config.tp_degree, tokens
        return self.experts_decode or default_experts_decode(self.expert_path, *sizes)

    @property
    def _uses_kernel_for_experts(self) -> bool:
        return self.expert_path == "nki" or self.experts_decode == "kernel"

    def notes(self, tokens: int) -> tuple[str, ...]:
        """Return a sentence for each choice made for a graph of that many tokens, with the reason."""
        if not self.granite.num_local_experts:
            return self.operators.fallbacks
        return (*self.operators.fallbacks, f"experts: {self._path_of_experts(tokens)}.")

    def _path_of_experts(self, tokens: int) -> str:
        form = self.form_of_experts(tokens)
        if form == "nxd":
            return "NxD's, by neuron_config.blockwise_matmul_config"
        if form in ("kernel", "nki blocks"):
            rows = "all rows at once" if form == "kernel" else "blocks of rows"
            return f"by an NKI kernel over {rows}, which reads each chosen one once"
        granite = self.granite
        width = granite.rank_dimensions(self.neuron_config.tp_degree).intermediate_size
        gathers = form == "gather"
        path = expert_path(tokens, granite.num_experts_per_tok, granite.num_local_experts, width, gathers)
        return f"{path}, in torch, as {path.reason}"

    def add_derived_config(self) -> None:
        """Set the attributes that NxD Inference's layers need besides config.json's fields."""
        super().add_derived_config()
        self.head_dim = self.granite.head_dim
        # NxD Inference's shared experts have the experts' width. Granite's shared MLP has its own width and is a layer
        # here.
        self.n_shared_experts = 0
        neuron_config = self.neuron_config
        if isinstance(neuron_config, MoENeuronConfig):
            neuron_config.normalize_top_k_affinities = False  # the softmax is already over the chosen experts
        neuron_config.kv_cache_tiling = False  # an option of fused speculation: tiles have a fifth axis
        # By default each collective adds a read of one of its elements to the graph.
        neuron_config.disable_numeric_cc_token = True
        if neuron_config.on_cpu:
            neuron_config.attn_kernel_enabled = False  # the kernel runs on the device only
        if self.expert_path == "nxd":
            _choose_kernel_of_nxd(neuron_config)
        if neuron_config.is_continuous_batching:
            # Mark rows that only fill the batch, so that they leave their slots' state alone.
            neuron_config.apply_seq_ids_mask = True

    def validate_config(self) -> None:
        super().validate_config()
        neuron_config = self.neuron_config
        if not isinstance(neuron_config, MoENeuronConfig):
            raise UserError(f"neuron_config is a {type(neuron_config).__name__}, and must be a MoENeuronConfig.")
        for name, supported in _SUPPORTED.items():
            value = getattr(neuron_config, name)
            if value != supported:
                raise UserError(f"neuron_config.{name} is {value!r}; this model runs with {supported!r} only.")
        if neuron_config.output_logits and neuron_config.on_device_sampling_config is None:
            raise UserError(
                "neuron_config.output_logits is set without on_device_sampling_config; set both or neither: "
                "where nothing is sampled on the device, logits are what is returned."
            )
        self._check_sizes()
        self._check_speculation()
        self.granite.rank_dimensions(neuron_config.tp_degree)
        self._check_kernels()
        if self.granite.num_local_experts:
            self._check_experts()

    def _check_sizes(self) -> None:
        neuron_config, longest = self.neuron_config, self.granite.max_position_embeddings
        if neuron_config.max_context_length < 2:
            raise UserError("neuron_config.max_context_length is 1, which is a graph for decode; it must be 2 or more.")
        if 1 in (neuron_config.context_encoding_buckets or ()):
            raise UserError("neuron_config.context_encoding_buckets has 1, which is a graph for decode; leave it out.")
        if neuron_config.seq_len > longest:
            raise UserError(f"neuron_config.seq_len is {neuron_config.seq_len}; the model's longest is {longest}.")
        if neuron_config.is_continuous_batching and neuron_config.ctx_batch_size != 1:
            raise UserError("neuron_config.ctx_batch_size must be 1 with is_continuous_batching.")
        if neuron_config.kv_cache_batch_size != neuron_config.max_batch_size:
            raise UserError("neuron_config.kv_cache_batch_size must be what it is by default, the batch size.")

    def _check_speculation(self) -> None:
        neuron_config = self.neuron_config
        tokens = neuron_config.speculation_length
        if not tokens and not neuron_config.enable_fused_speculation:
            return
        of_prompts = continuation_tokens([neuron_config.max_context_length])
        if not 2 <= tokens < of_prompts:
            raise UserError(
                f"neuron_config.speculation_length is {tokens}; it must be at least 2, and less than {of_prompts}, the "
                "tokens that a prompt's graphs take."
            )
        if neuron_config.enable_fused_speculation:
            self._check_fused_speculation()
        elif not neuron_config.is_continuous_batching or neuron_config.on_device_sampling_config is not None:
            raise UserError(
                "neuron_config.speculation_length is set; without enable_fused_speculation that needs "
                "is_continuous_batching, and no on-device sampling."
            )

    def _check_fused_speculation(self) -> None:
        neuron_config = self.neuron_config
        sampling = neuron_config.on_device_sampling_config
        if sampling is None or sampling.do_sample or sampling.dynamic:
            raise UserError(
                "neuron_config.enable_fused_speculation needs on_device_sampling_config with do_sample=False and "
                "dynamic=False: NxD Inference compares a draft with the likeliest token."
            )
        for name in ("output_logits", "tensor_capture_config"):
            if getattr(neuron_config, name):
                raise UserError(f"neuron_config.{name} is set; enable_fused_speculation gives tokens only.")

    def _check_kernels(self) -> None:
        option_choices = {
            "prefill_scan": PREFILL_SCANS,
            "decode_kernel": DECODE_KERNELS,
            "expert_path": EXPERT_PATHS,
            "state_dtype": COMPILED_STATE_DTYPES,
        }
        for name, choices in option_choices.items():
            check_choice(name, getattr(self, name), choices)
        if self.experts_decode is not None:
            check_choice("experts_decode", self.experts_decode, EXPERTS_DECODE)
            if self.expert_path == "nxd":
                raise UserError(
                    f"experts_decode is {self.experts_decode}; with expert_path='nxd' NxD's kernels decide. Leave one "
                    "of them out."
                )
        if self.state_dtype != "float32" and self.decode_kernel != "nki":
            raise UserError(
                f"SSM states in {self.state_dtype} need decode_kernel='nki', which rounds them as the hardware does."
            )
        cores = self.neuron_config.logical_nc_config
        is_nki = uses_nki(self.prefill_scan, self.decode_kernel) or self._uses_kernel_for_experts
        if is_nki:
            require_nki()
        if is_nki and cores != LOGICAL_CORE_SIZE:
            raise UserError(
                f"neuron_config.logical_nc_config is {cores}; with NKI kernels it must be {LOGICAL_CORE_SIZE}, as they "
                "are launched."
            )

    def _check_experts(self) -> None:
        if self.expert_path == "nxd":
            self._check_kernel_of_nxd()
        elif self._uses_kernel_for_experts:
            self._check_kernel_for_experts()

    def _check_kernel_for_experts(self) -> None:
        granite, neuron_config = self.granite, self.neuron_config
        tokens = min(max(neuron_config.max_batch_size, neuron_config.max_context_length), SLOT_TOKENS)
        slots = num_slots(tokens, granite.num_experts_per_tok, granite.num_local_experts)
        width = granite.rank_dimensions(neuron_config.tp_degree).intermediate_size
        itemsize = neuron_config.torch_dtype.itemsize
        check_experts_decode(tokens, slots, granite.hidden_size, width, itemsize)
        check_experts_prefill(granite.hidden_size, width, itemsize)

    def _check_kernel_of_nxd(self) -> None:
        config, tokens = self.neuron_config.blockwise_matmul_config, self.neuron_config.max_context_length
        if config.use_torch_block_wise or tokens * self.granite.num_experts_per_tok < config.block_size:
            return  # torch throughout, or all experts for every token
        if self.neuron_config.logical_nc_config != LOGICAL_CORE_SIZE:
            raise UserError(f"NxD's kernels for experts need neuron_config.logical_nc_config={LOGICAL_CORE_SIZE}.")
        hidden_size = self.granite.hidden_size
        width = self.granite.rank_dimensions(self.neuron_config.tp_degree).intermediate_size
        if hidden_size % _HIDDEN_BLOCK or width % _WIDTH_BLOCK:
            raise UserError(
                f"NxD's kernels for experts take a hidden size that is a multiple of {_HIDDEN_BLOCK}, and a rank's "
                f"width of experts that is one of {_WIDTH_BLOCK}; here they are {hidden_size} and {width}. Leave "
                "expert_path at 'torch'."
            )
        if config.use_shard_on_intermediate_dynamic_while:
            if config.block_size % _INTERMEDIATE_BLOCK:
                raise UserError(
                    f"neuron_config.blockwise_matmul_config has block_size={config.block_size}; with "
                    f"use_shard_on_intermediate_dynamic_while it must be a multiple of {_INTERMEDIATE_BLOCK}."
                )
        elif config.use_shard_on_block_dynamic_while and "PING_PONG" not in str(config.block_sharding_strategy):
            raise UserError(
                "neuron_config.blockwise_matmul_config has use_shard_on_block_dynamic_while, which needs "
                "block_sharding_strategy='PING_PONG' beside it."
            )

    @classmethod
    def get_neuron_config_cls(cls) -> type[MoENeuronConfig]:
        return MoENeuronConfig


def _choose_kernel_of_nxd(neuron_config: MoENeuronConfig) -> None:
    """Choose NxD's kernel for experts, unless blockwise_matmul_config names one. NxD's default is not in the Neuron
    SDK.

    The chosen kernel splits the experts' widths over the two cores, and ends with the last block that has tokens.
    Others have measured it on SDK 2.31.
    """
    config = neuron_config.blockwise_matmul_config
    if neuron_config.on_cpu:
        config.use_torch_block_wise = True  # the kernels run on the device only
    elif not (config.use_torch_block_wise or config.use_shard_on_block_dynamic_while):
        config.use_shard_on_intermediate_dynamic_while = True
