"""Granite 4 as a model of vLLM whose layers run this package's fused kernels. Cache and loading are vLLM's.

Matrices are kept once, packed in tiles. The residual stream is float32.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models import granitemoehybrid as upstream
from vllm.model_executor.models.utils import get_pp_missing_layer_names
from vllm.sequence import IntermediateTensors

from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.build import load_kernels
from granite4_neuron.devices.cpu.layers import FeedForward
from granite4_neuron.devices.cpu.weights import PackedWeight, pack
from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.ops.layer_weights import AttentionWeights, FeedForwardWeights, MambaWeights
from granite4_neuron.vllm.cpu import DISTRIBUTION
from granite4_neuron.vllm.cpu.mixer import Granite4MambaMixer2

if TYPE_CHECKING:
    from transformers import GraniteMoeHybridConfig
    from vllm.model_executor.layers.layernorm import RMSNorm

# Below vLLM's own logger, so that it is formatted and written as vLLM's lines are.
_LOGGER = logging.getLogger("vllm.granite4_neuron.model")


MambaDecoderLayer: TypeAlias = upstream.GraniteMoeHybridMambaDecoderLayer
AttentionDecoderLayer: TypeAlias = upstream.GraniteMoeHybridAttentionDecoderLayer
DecoderLayer: TypeAlias = MambaDecoderLayer | AttentionDecoderLayer


class Granite4ForCausalLM(upstream.GraniteMoeHybridForCausalLM):
    """vLLM's model with fused layers. If `refusal` is not None, it says why all layers but the mixer stay vLLM's."""

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
        return vllm_config.model_config.dtype, torch.float32

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.refusal = why_not_fused(vllm_config)
        unknown = unknown_layer(self.model)
        if unknown is not None:
            self.refusal = f"there is {unknown}"
            _LOGGER.warning(
                "granite4-neuron does not know the layer %s, and leaves Granite 4's layers to vLLM; install %s, or "
                "choose among plugins with VLLM_PLUGINS.",
                unknown,
                DISTRIBUTION,
            )
        if self.refusal is not None and get_pp_group().world_size > 1:
            raise ValueError(
                f"vLLM's own Granite 4 layers do not run in a pipeline, and ours are not used ({self.refusal}); "
                "leave out --pipeline-parallel-size."
            )
        if self.refusal is not None and unknown is None:
            _LOGGER.info("granite4-neuron runs the Mamba layers, and vLLM runs the others: %s.", self.refusal)
        self._layers: list[FusedLayer] = []
        if self.refusal is None:
            _keep_matrices(self)
            self.make_empty_intermediate_tensors = self._empty_intermediate_tensors

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights of this rank's layers only; vLLM would look for all layers of a pipeline on each rank."""
        prefixes = tuple(get_pp_missing_layer_names(self))
        return super().load_weights((name, weight) for name, weight in weights if not name.startswith(prefixes))

    def process_weights_after_loading(self) -> None:
        """Fuse the layers; vLLM calls this when all weights are loaded."""
        for module in self.modules():
            if isinstance(module, Granite4MambaMixer2):
                module.forget_weights()
        if self.refusal is not None:
            return
        model, config = self.model, self.config
        packed: dict[int, PackedWeight] = {}
        if get_pp_group().is_first_rank:
            self._embedding = _pack(model.embed_tokens, packed)
        self._layers = [_fused_layer(layer, config, packed) for layer in _own_layers(model)]
        if get_pp_group().is_last_rank:
            self._head = _pack(self.lm_head, packed)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.refusal is not None:
            return super().embed_input_ids(input_ids)
        return self._embedding.rows(input_ids.long())

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Run the model as vLLM's method does."""
        if self.refusal is not None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        if get_pp_group().is_first_rank:
            if inputs_embeds is None:
                assert input_ids is not None
                inputs_embeds = self.embed_input_ids(input_ids)
            hidden_states = inputs_embeds.float() * self.config.embedding_multiplier
        else:
            assert intermediate_tensors is not None  # the previous rank passes them
            hidden_states = intermediate_tensors["hidden_states"]
        rotary = self._rotary(positions)
        for layer in self._layers:
            hidden_states = layer(hidden_states, rotary)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states})
        norm = self.model.norm
        return cpu.rms_norm(hidden_states, norm.weight, norm.variance_epsilon)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Compute logits [tokens, vocab_size] in float32 from hidden states [tokens, hidden_size]."""
        if self.refusal is not None:
            return super().compute_logits(hidden_states)
        logits = cpu.logits(hidden_states, self._head, self.config.logits_scaling)
        return logits[:, : self.config.vocab_size]

    def _rotary(self, positions: torch.Tensor) -> RotaryTables | None:
        """Return the rotary embedding of the positions, [1, tokens, head_dim / 2] in float32; None for a model without
        it.
        """
        attention = (layer.self_attn for layer in _own_layers(self.model) if hasattr(layer, "self_attn"))
        rotary = next((each.rotary_emb for each in attention), None)  # all layers share one
        if rotary is None:
            return None
        cos, sin = rotary.cos_sin_cache[positions].float().chunk(2, dim=-1)
        return cos.contiguous()[None], sin.contiguous()[None]

    def _empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        shape = (batch_size, self.config.hidden_size)
        return IntermediateTensors({"hidden_states": torch.zeros(shape, dtype=torch.float32, device=device)})


class FusedLayer(ABC):
    """One decoder layer of vLLM's model, run by this package's kernels.

    Args:
        layer: its matrices are moved out of it.
        config: the model's.
        packed: matrices that are already packed, by the parameter's id.
    """

    def __init__(self, layer: DecoderLayer, config: GraniteMoeHybridConfig, packed: dict[int, PackedWeight]):
        self._feed_forward = _feed_forward(layer, config, packed)

    def __call__(self, hidden_states: torch.Tensor, rotary: RotaryTables | None) -> torch.Tensor:
        """Run the layer on hidden states [tokens, hidden_size] in float32.

        rotary: of the tokens' positions, [1, tokens, head_dim / 2].
        """
        if get_forward_context().attn_metadata is not None:  # None while vLLM measures the memory of a step
            hidden_states = self._mix(hidden_states, rotary)
        return self._feed_forward.step(hidden_states=hidden_states)

    @abstractmethod
    def _mix(self, hidden_states: torch.Tensor, rotary: RotaryTables | None) -> torch.Tensor:
        """Run the first half of the layer, the mixer or attention."""


class FusedMambaLayer(FusedLayer):
    """A layer with a Mamba mixer."""

    def __init__(
        self,
        layer: MambaDecoderLayer,
        config: GraniteMoeHybridConfig,
        packed: dict[int, PackedWeight],
    ):
        super().__init__(layer, config, packed)
        self._mixer = layer.mamba
        weights = MambaWeights(
            mixer=layer.mamba.own_mixer.record,
            norm=layer.input_layernorm.weight,
            in_proj=_pack(layer.mamba.in_proj, packed),
            in_bias=layer.mamba.in_proj.bias,
            gated_norm=layer.mamba.norm.weight,
            out_proj=_pack(layer.mamba.out_proj, packed),
            out_bias=layer.mamba.out_proj.bias,
            **_residual(layer.input_layernorm, config),
        )
        self._half = cpu.layers.mamba_layer(weights, layer.mamba.own_mixer.fused)

    def _mix(self, hidden_states: torch.Tensor, rotary: RotaryTables | None) -> torch.Tensor:
        decoding = self._mixer.decode_rows(len(hidden_states))
        if decoding is None:
            projected, xBC_dt = self._half.project(hidden_states=hidden_states)
            return self._half.finish(hidden_states=hidden_states, projected=projected, y=self._mixer.mix(xBC_dt))
        pages, rows = decoding
        return self._half.step_paged(
            hidden_states=hidden_states,
            conv_state=pages.conv,
            ssm_state=pages.ssm,
            starts=rows.starts,
            pages=rows.pages,
            accepted=rows.accepted,
        )


class FusedAttentionLayer(FusedLayer):
    """A layer with attention."""

    def __init__(
        self,
        layer: AttentionDecoderLayer,
        config: GraniteMoeHybridConfig,
        packed: dict[int, PackedWeight],
    ):
        super().__init__(layer, config, packed)
        self._attention = attention = layer.self_attn
        self._cache: torch.Tensor | None = None
        sizes = [heads * attention.head_dim for heads in (attention.num_heads, *[attention.num_key_value_heads] * 2)]
        qkv = attention.qkv_proj
        q_proj, k_proj, v_proj = (pack(part, part.dtype) for part in qkv.weight.data.split(sizes))
        q_bias, k_bias, v_bias = [None] * 3 if qkv.bias is None else qkv.bias.split(sizes)
        _clear(qkv.weight)
        weights = AttentionWeights(
            norm=layer.input_layernorm.weight,
            q_proj=q_proj,
            q_bias=q_bias,
            k_proj=k_proj,
            k_bias=k_bias,
            v_proj=v_proj,
            v_bias=v_bias,
            o_proj=_pack(attention.o_proj, packed),
            o_bias=attention.o_proj.bias,
            head_dim=attention.head_dim,
            scale=attention.attn.impl.scale,
            **_residual(layer.input_layernorm, config),
        )
        self._half = cpu.layers.attention_layer(weights)

    def _mix(self, hidden_states: torch.Tensor, rotary: RotaryTables | None) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata[self._attention.attn.layer_name]
        key_pages, value_pages = self._pages()
        cos, sin = rotary or (None, None)
        return self._half.step_paged(
            hidden_states=hidden_states,
            key_pages=key_pages,
            value_pages=value_pages,
            starts=metadata.query_start_loc,
            lengths=metadata.seq_lens,
            pages=metadata.block_table,
            cos=cos,
            sin=sin,
        )

    def _pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each [pages, kv_heads, page_size, head_dim], in the cache that vLLM has bound last.
        The cache is [pages, kv_heads, page_size, 2 * head_dim].
        """
        cache = self._attention.attn.kv_cache
        if cache is not self._cache:
            head_dim = self._attention.head_dim
            self._cache, self._views = cache, cache.view(*cache.shape[:2], -1, head_dim).chunk(2, dim=2)
        return self._views


def why_not_fused(vllm_config: VllmConfig) -> str | None:
    """Return why all layers but the mixer must stay vLLM's, as a clause; None if they need not."""
    cases = {
        "tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
        "quantization": vllm_config.quant_config is not None,
        "a cache that is sent elsewhere": vllm_config.kv_transfer_config is not None,
        "no shared MLP": getattr(vllm_config.model_config.hf_text_config, "shared_intermediate_size", 0) == 0,
    }
    reason = next((f"there is {case}" for case, is_so in cases.items() if is_so), None)
    return load_kernels() or reason


def unknown_layer(model: upstream.GraniteMoeHybridModel) -> str | None:
    """Return the class of a decoder layer or mixer that this package does not know, if any."""
    known = {
        MambaDecoderLayer: ("mamba", Granite4MambaMixer2),
        AttentionDecoderLayer: ("self_attn", upstream.GraniteMoeHybridAttention),
    }
    for layer in _own_layers(model):
        name, part = known.get(type(layer), ("", object))
        if not name:
            return _name(layer)
        if type(getattr(layer, name)) is not part:
            return _name(getattr(layer, name))
        rotary = getattr(getattr(layer, name), "rotary_emb", None)
        if type(rotary) not in (RotaryEmbedding, NoneType):
            return _name(rotary)
    return None


def _name(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


class _KeptLinear(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: the model packs it."""


class _KeptEmbedding(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: the model packs it."""


class _KeptExperts(UnquantizedFusedMoEMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: the model packs them."""


def _keep_matrices(model: nn.Module) -> None:
    """Keep vLLM from packing matrices itself, which would leave two copies of each."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, RoutedExperts):
            module.quant_method = _KeptExperts(module.moe_config)
        elif isinstance(method, UnquantizedEmbeddingMethod):
            module.quant_method = _KeptEmbedding()
        elif isinstance(method, UnquantizedLinearMethod) and module.get_parameter("weight").dim() == 2:
            module.quant_method = _KeptLinear()  # not for the convolution, whose weight has three axes


def _own_layers(model: upstream.GraniteMoeHybridModel) -> Iterator[DecoderLayer]:
    """Return the layers of this rank of a pipeline."""
    return iter(model.layers[model.start_layer : model.end_layer])


def _pack(module: nn.Module, packed: dict[int, PackedWeight], name: str = "weight") -> PackedWeight:
    """Pack a module's matrix and move it out of the module; modules that share a matrix get the same one."""
    parameter = getattr(module, name)
    key = id(parameter)
    if key not in packed:
        packed[key] = pack(parameter.data, parameter.dtype)
        _clear(parameter)
    return packed[key]


def _clear(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.new_empty(0)


def _fused_layer(layer: DecoderLayer, config: GraniteMoeHybridConfig, packed: dict[int, PackedWeight]) -> FusedLayer:
    is_mamba = isinstance(layer, upstream.GraniteMoeHybridMambaDecoderLayer)
    return (FusedMambaLayer if is_mamba else FusedAttentionLayer)(layer, config, packed)


def _feed_forward(layer: DecoderLayer, config: GraniteMoeHybridConfig, packed: dict[int, PackedWeight]) -> FeedForward:
    norm, mlp, experts = layer.post_attention_layernorm, layer.shared_mlp, layer.block_sparse_moe
    router = expert_input = expert_output = None
    top_k = 0
    if experts is not None:
        assert config.num_experts_per_tok is not None
        top_k = config.num_experts_per_tok
        (routed,) = (module for module in experts.modules() if isinstance(module, RoutedExperts))
        router = _pack(experts.gate, packed)
        expert_input, expert_output = (_pack(routed, packed, name) for name in ("w13_weight", "w2_weight"))
    weights = FeedForwardWeights(
        norm=norm.weight,
        input=_pack(mlp.input_linear, packed),
        output=_pack(mlp.output_linear, packed),
        router=router,
        expert_input=expert_input,
        expert_output=expert_output,
        top_k=top_k,
        **_residual(norm, config),
    )
    return cpu.layers.feed_forward(weights)


def _residual(norm: RMSNorm, config: GraniteMoeHybridConfig) -> dict[str, Any]:
    return {"eps": norm.variance_epsilon, "residual_multiplier": config.residual_multiplier}
